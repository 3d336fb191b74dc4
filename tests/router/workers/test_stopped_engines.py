"""Engines that stop without a word (SIGSTOP, a hung host): noticed, avoided, welcomed back."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from router_harness import Cluster, cluster, sse_events, until

from tools.stand_ins.mock_engine import MockEngine


def impatient(*flags: str, **more: Any) -> AbstractAsyncContextManager[Cluster]:
    """A cluster with smaller limits of its own, so that tests need not wait for them."""
    monitor = {"quiet_s": 0.05, "doubt_timeout_s": 0.2, "fast_s": 0.05}
    return cluster(*flags, **more, relay={"last_chance_s": 0.1}, monitor=monitor)


async def ticking(c: Any) -> asyncio.Task[None]:
    async def tick() -> None:
        while True:
            c.server.registry.tick()
            await asyncio.sleep(0.02)

    return asyncio.create_task(tick())


def first_choice(c: Any, role: str) -> MockEngine:
    url = next(up.instance for up in c.scheduler.up.values() if up.role == role)
    engine: MockEngine = next(e for e in (*c.prefill, *c.decode) if e.url == url)
    return engine


@pytest.mark.parametrize("policy", ["sbs", "round_robin"], ids=["polled", "unpolled"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_waits_for_a_stopped_engine_is_served_elsewhere(role: str, policy: str) -> None:
    async with impatient("--policy", policy, prefill=2, decode=2) as c:
        ticks = await ticking(c)
        stopped = first_choice(c, role)
        stopped.freeze()
        status, answer = await c.generate(text="x")
        assert status == 200
        assert answer["text"] == "t1 t2 t3"
        worker = c.server.registry.get(stopped.url)
        assert worker is not None and not worker.healthy
        assert "no answer in time" in worker.problems["unhealthy"]
        # Continued (SIGCONT), it is used again.
        stopped.thaw()
        await until(lambda: worker.usable)
        await c.settled()
        assert c.scheduler.ended() == ["failed", "completed"]
        c.check_books()
        ticks.cancel()


async def test_a_stream_of_a_stopped_decode_engine_ends_with_an_error_event() -> None:
    async with impatient(decode=2) as c:
        ticks = await ticking(c)
        stopped = first_choice(c, "decode")
        stopped.token_gate.close()
        async with c.post("/generate", {"text": "x", "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            stopped.freeze()
            events = sse_events(await response.read())
        assert events[-1]["error"]["code"] == "decode_server_error"
        await c.settled()
        c.check_books()
        ticks.cancel()


async def test_an_engine_that_is_merely_busy_is_asked_and_left_in_peace() -> None:
    async with impatient("--policy", "round_robin") as c:
        ticks = await ticking(c)
        c.decode[0].gate.close()
        task = asyncio.create_task(c.generate(text="x"))
        await c.decode[0].gate.arrived(1)
        asked = c.decode[0].hits.get("/ready", 0)
        await until(lambda: c.decode[0].hits.get("/ready", 0) >= asked + 3)
        assert all(worker.usable for worker in c.server.registry)
        c.decode[0].gate.open()
        assert (await task)[0] == 200
        ticks.cancel()


async def test_an_idle_engine_without_the_plugin_is_left_alone() -> None:
    async with impatient("--policy", "round_robin") as c:
        asked = c.decode[0].hits.get("/ready", 0)
        for _ in range(20):
            c.server.registry.tick()
            await asyncio.sleep(0.01)
        assert c.decode[0].hits.get("/ready", 0) == asked
        assert c.decode[0].hits.get("/health", 0) == 0
