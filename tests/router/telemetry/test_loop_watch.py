"""A blocked event loop is reported with the length, the stack and the cause."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading

import pytest

from sglang_sbs.router.telemetry import loop_watch
from sglang_sbs.router.telemetry.loop_watch import LoopWatch, _cause


def holds_the_loop(until: threading.Event) -> None:
    assert until.wait(60)


async def test_the_stack_is_logged_while_the_loop_stands_and_the_time_after(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logged = threading.Event()

    class SetWhenLogged(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.set()

    handler = SetWhenLogged()
    loop_watch.logger.addHandler(handler)
    watch = LoopWatch()
    task = asyncio.create_task(watch.run())
    try:
        await asyncio.sleep(0)
        holds_the_loop(logged)  # until the other thread has logged it
        while not watch.stalls:  # noqa: ASYNC110 (the next beat)
            await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        loop_watch.logger.removeHandler(handler)
    while_it_stood, after = [record.getMessage() for record in caplog.records[:2]]
    assert "holds_the_loop" in while_it_stood
    assert after.startswith("the event loop was blocked for")
    assert watch.stalled_s >= loop_watch.STILL_S
    values = {metric.name: metric.samples[0].value for metric in watch.families()}
    assert values == {"sbs_loop_stalls": 1.0, "sbs_loop_stalled_seconds": watch.stalled_s}


def test_a_host_that_is_too_slow_writes_a_line_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0
    watch = LoopWatch(clock=lambda: now_s)
    for _ in range(100):
        now_s += 1.0
        watch._beat(1.0)
    assert watch.stalls == 100
    assert len(caplog.records) == 100 / loop_watch.QUIET_S
    assert "(91 times so far)" in caplog.records[-1].getMessage()


async def test_nothing_is_left_behind() -> None:
    before = list(gc.callbacks)
    task = asyncio.create_task(LoopWatch().run())
    await asyncio.sleep(0)
    assert gc.callbacks != before
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert gc.callbacks == before
    async with asyncio.timeout(60):
        while any(thread.name == "loop watch" for thread in threading.enumerate()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_the_cause_is_derived_from_cpu_time_and_collections() -> None:
    assert "garbage collection took 0.80 s" in _cause(1.0, 1.0, 0.8)
    assert "waited for a processor or for a disk" in _cause(1.0, 0.1, 0.0)
    assert "computed for 0.90 s" in _cause(1.0, 0.9, 0.0)


def test_collections_of_other_threads_do_not_count() -> None:
    watch = LoopWatch(clock=iter([1.0, 3.0]).__next__)
    watch._thread_id = threading.get_ident()
    other = threading.Thread(target=watch._on_collection, args=("start", {}))
    other.start()
    other.join()
    watch._on_collection("start", {})
    watch._on_collection("stop", {})
    assert watch._collected_s == 2.0
