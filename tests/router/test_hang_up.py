"""Signals that must not cut off streams: SIGHUP of a terminal that is closed, SIGUSR1 and 2."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from router_processes import START_S, site, start_group


@pytest.fixture(autouse=True)
def _not_ignored() -> Iterator[None]:
    """Under ``nohup`` SIGHUP is ignored, and a process that is started inherits that; what has a
    handler here is back to the default there."""
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_streams_outlive_a_closed_terminal(workers: str) -> None:
    async with site(prefill=1) as engines:
        group = await start_group(*engines.flags, "--port", "0", "--workers", workers)
        try:
            await engines.ready(group)
            engines.decode[0].token_gate.close()
            answer = asyncio.create_task(engines.generate(group.url))
            await engines.decode[0].token_gate.arrived(1)
            group.process.send_signal(signal.SIGHUP)
            await group.says(r"stopping: ")
            group.process.send_signal(signal.SIGHUP)  # the shell, then the terminal
            await asyncio.sleep(0.2)
            engines.decode[0].token_gate.open()
            status, raw = await answer
            assert status == 200
            assert raw.endswith(b"data: [DONE]\n\n")
            async with asyncio.timeout(START_S):
                assert await group.process.wait() == 0
        finally:
            await group.end()


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_user_signals_end_no_process(workers: str) -> None:
    async with site(prefill=1) as engines:
        group = await start_group(*engines.flags, "--port", "0", "--workers", workers)
        try:
            await engines.ready(group)
            pids = {group.process.pid, *(group.pids.values() if workers == "2" else ())}
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                for pid in pids:
                    os.kill(pid, number)
                await group.says(rf"{number.name} does nothing here", len(pids))
            status, _ = await engines.generate(group.url)
            assert status == 200
        finally:
            await group.end()
