"""The line that is logged once a minute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from router_harness import until

from sglang_sbs.router.processes.scheduler_process import SchedulerProcess
from sglang_sbs.router.server import RouterServer


def of_router(line: Callable[..., str]) -> Coroutine[Any, Any, None]:
    minute = SimpleNamespace(take=line)
    router: Any = SimpleNamespace(
        in_flight=SimpleNamespace(recent=SimpleNamespace(minute=minute)),
        scheduler=SimpleNamespace(gain=str),
    )
    return RouterServer._log_minutes(router, 0.0)


def of_scheduler(line: Callable[..., str]) -> Coroutine[Any, Any, None]:
    process: Any = SimpleNamespace(_local=SimpleNamespace(gain=line))
    return SchedulerProcess._log_gain(process, 0.0)


@pytest.mark.parametrize("log", [of_router, of_scheduler])
async def test_an_error_in_one_minute_does_not_end_the_lines_of_later_ones(
    log: Callable[[Callable[..., str]], Coroutine[Any, Any, None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
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
