"""The dashboard of a router with ``--workers``, as real processes."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from router_harness import TIMEOUT_S
from router_processes import start_group

from sglang_sbs.dashboard.client import frames
from tools.stand_ins.mock_engine import MockEngine, Rooms


async def test_every_front_end_shows_the_one_scheduler() -> None:
    rooms = Rooms()
    prefill, decode = MockEngine("prefill", rooms=rooms), MockEngine("decode", rooms=rooms)
    for engine in (prefill, decode):
        await engine.start()
    group = await start_group(
        *("--port", "0", "--workers", "2", "--policy", "sbs", "--admin-api-key", "secret"),
        *("--prefill", prefill.url, "9000", "--decode", decode.url),
    )
    try:
        shown: list[dict[str, Any]] = []

        async def watch() -> None:
            """Until a request of this client is among the decisions."""
            async for frame in frames(group.url, "secret"):
                shown.append(frame)
                if any(gang["requests"] for gang in frame["gangs"]):
                    return

        watching = [asyncio.create_task(watch()) for _ in range(6)]
        async with aiohttp.ClientSession() as client, asyncio.timeout(TIMEOUT_S):
            while not all(task.done() for task in watching):
                body = {"text": "hello", "sampling_params": {"max_new_tokens": 2}}
                async with client.post(group.url + "/generate", json=body) as answer:
                    await answer.read()
                await asyncio.sleep(0.05)
            await asyncio.gather(*watching)
        assert not any(frame["alone"] for frame in shown)
        assert {frame["prefill"][0]["instance"] for frame in shown} == {prefill.url}
        gangs = {
            (gang["batch"], gang["at_s"], gang["prefill"])
            for frame in shown
            for gang in frame["gangs"]
        }
        assert len({batch for batch, _, _ in gangs}) == len(gangs), "one scheduler, one numbering"
    finally:
        await group.end()
        for engine in (prefill, decode):
            await engine.stop()
