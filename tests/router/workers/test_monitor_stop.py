"""Watching ends when it is asked to, also in the moment a probe times out, and not before."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from sglang_sbs.router.options.config import MonitorConfig
from sglang_sbs.router.workers.health import Monitor
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import WorkerInfo


class Deaf(Monitor):
    """Its probes answer a cancellation with their own time-out, as aiohttp does at that moment."""

    probes: asyncio.Event

    async def _get(self, worker, path, timeout_s=None):
        self.probes.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise TimeoutError from None
        raise AssertionError

    async def _describe(self, worker):
        return True


@pytest.mark.parametrize("all_at_once", [True, False])
async def test_a_cancellation_that_a_timeout_hid_is_not_outlived(all_at_once: bool) -> None:
    registry = Registry()
    worker = registry.add("http://127.0.0.1:1", "decode")
    registry.described(worker, WorkerInfo(dp_size=1))
    async with aiohttp.ClientSession() as session:
        config = MonitorConfig(health_interval_s=0.01, failure_threshold=10**6)
        monitor = Deaf(registry, session, config, lambda event: None)
        monitor.probes = asyncio.Event()
        monitor.start(worker)
        (watching, *_) = monitor._tasks[worker.url]
        await monitor.probes.wait()
        if all_at_once:
            monitor.stop_all()
        else:
            monitor.stop(worker)
        await asyncio.sleep(0)
        _, pending = await asyncio.wait({watching}, timeout=10)
        assert not pending
        await monitor.close()


async def test_an_error_in_a_tick_does_not_end_the_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    ticks = asyncio.Semaphore(0)

    def broken() -> None:
        ticks.release()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(registry, "tick", broken)
    async with aiohttp.ClientSession() as session, asyncio.timeout(10):
        monitor = Monitor(registry, session, MonitorConfig(), lambda event: None)
        ticking = asyncio.create_task(monitor._tick(0.001))
        for _ in range(3):
            await ticks.acquire()
        ticking.cancel()
        await monitor.close()
