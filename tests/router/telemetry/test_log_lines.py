"""The line that is logged once a minute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from router_harness import until

from sglang_sbs.router import server
from sglang_sbs.router.processes import scheduler_process
from sglang_sbs.router.processes.scheduler_process import SchedulerProcess
from sglang_sbs.router.server import RouterServer


def of_router(line: Callable[..., str]) -> Coroutine[Any, Any, None]:
    minute = SimpleNamespace(take=line)
    router: Any = SimpleNamespace(
        in_flight=SimpleNamespace(recent=SimpleNamespace(minute=minute)),
        scheduler=SimpleNamespace(gain=str),
    )
    return RouterServer._log_minutes(router)


def of_scheduler(line: Callable[..., str]) -> Coroutine[Any, Any, None]:
    process: Any = SimpleNamespace(_local=SimpleNamespace(gain=line))
    return SchedulerProcess._log_gain(process)


@pytest.mark.parametrize("log", [of_router, of_scheduler])
async def test_an_error_in_one_minute_does_not_end_the_lines_of_later_ones(
    log: Callable[[Callable[..., str]], Coroutine[Any, Any, None]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(server, "_MINUTE_S", 0.0)
    monkeypatch.setattr(scheduler_process, "MINUTE_S", 0.0)
    caplog.set_level("INFO")
    results = iter([ZeroDivisionError("a defect"), "the later line"])

    def line(*_gain: str) -> str:
        result = next(results, "")
        if isinstance(result, Exception):
            raise result
        return result

    task = asyncio.create_task(log(line))
    try:
        await until(lambda: "the later line" in caplog.text or task.done())
    finally:
        task.cancel()
    assert "the later line" in caplog.text
    assert "a defect" in caplog.text
