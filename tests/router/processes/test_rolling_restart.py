"""One router takes the port over from another while clients keep asking."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp
import orjson
import pytest
from harness.front_ends import IN_FLIGHT, Load, complete
from router_harness import until
from router_processes import START_S, alive, fresh_client, running, start_group

from tools.stand_ins.ports import free_ports


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control socket of this test only."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


class KeepAlive:
    """Clients that keep their connection as long as they may."""

    def __init__(self, url: str, clients: int = 4) -> None:
        self.failures: list[str] = []
        self.served = 0
        self._url = url
        self._stop = False
        self._tasks = [asyncio.create_task(self._client()) for _ in range(clients)]

    async def _client(self) -> None:
        async with fresh_client() as client:
            while not self._stop:
                body = {"input_ids": [1] * 20}
                try:
                    async with client.post(self._url + "/generate", json=body) as got:
                        orjson.loads(await got.read())
                        if got.status != 200:
                            self.failures.append(str(got.status))
                except (aiohttp.ClientError, TimeoutError) as error:
                    self.failures.append(repr(error))
                self.served += 1
                await asyncio.sleep(0.001)

    async def end(self) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)


async def test_no_request_fails_while_one_router_follows_another() -> None:
    async with running() as (engines, first):
        old, port = first, str(first.port)
        load, kept = Load(engines, old), KeepAlive(old.url)
        # A stream that outlives the change stays with the router that has it.
        engines.decode[0].token_gate.close()
        await engines.decode[0].token_gate.arrived(6)
        for generation in range(2):
            try:
                new = await start_group(
                    *engines.flags, "--port", port, "--workers", "2", "--sbs-take-over"
                )
            except BaseException:
                await old.end()
                raise
            try:
                if generation == 0:
                    engines.decode[0].token_gate.open()
                async with asyncio.timeout(START_S):
                    assert await old.process.wait() == 0
                await load.more()
            except BaseException:
                await new.end()
                raise
            await old.end()
            old = new
        try:
            assert set(await load.end()) == {"complete"}, load.outcomes
            await kept.end()
            assert not kept.failures
            assert kept.served > 0
            await engines.shows(old, IN_FLIGHT, 0)
        finally:
            await old.end()


async def test_the_successor_gets_the_endforward_endpoint_and_the_metrics_port() -> None:
    endforward, metrics = free_ports(2)
    ports = ("--sbs-endforward-bind", f"tcp://127.0.0.1:{endforward}")
    ports += ("--prometheus-port", str(metrics))
    async with running(*ports) as (engines, old):
        engines.decode[0].token_gate.close()
        stream = asyncio.create_task(engines.generate(old.url))
        await engines.decode[0].token_gate.arrived(1)
        flags = (*engines.flags, *ports, "--port", str(old.port), "--workers", "2")
        new = await start_group(*flags, "--sbs-take-over")
        try:
            # While the old one still has a stream.
            await new.says(f"EndForward at .*:{endforward}$")
            await new.says(f"metrics at :{metrics}$")
            assert old.process.returncode is None
            engines.decode[0].token_gate.open()
            assert complete(await stream)
            async with asyncio.timeout(START_S):
                assert await old.process.wait() == 0
            assert complete(await engines.generate(new.url))
        finally:
            await new.end()


async def test_the_port_is_not_shared_by_accident() -> None:
    async with running() as (engines, group):
        with pytest.raises(AssertionError, match="--sbs-take-over"):
            await start_group(*engines.flags, "--port", str(group.port), "--workers", "2")
        assert complete(await engines.generate(group.url))


async def test_sigterm_lets_streams_end_and_leaves_no_process() -> None:
    async with running() as (engines, group):
        engines.decode[0].token_gate.close()
        streams = [asyncio.create_task(engines.generate(group.url)) for _ in range(8)]
        await engines.decode[0].token_gate.arrived(8)
        pids = list(group.pids.values())
        group.process.send_signal(signal.SIGTERM)
        await group.says("front ends finish what they have")
        engines.decode[0].token_gate.open()
        assert all(map(complete, await asyncio.gather(*streams)))
        async with asyncio.timeout(START_S):
            assert await group.process.wait() == 0
        assert not alive(pids)


async def test_when_the_supervisor_is_killed_its_children_finish_and_end() -> None:
    async with running() as (engines, group):
        engines.decode[0].token_gate.close()
        streams = [asyncio.create_task(engines.generate(group.url)) for _ in range(8)]
        await engines.decode[0].token_gate.arrived(8)
        pids = list(group.pids.values())
        group.process.kill()
        await group.says("the supervisor is gone")
        engines.decode[0].token_gate.open()
        assert all(map(complete, await asyncio.gather(*streams)))
        async with asyncio.timeout(START_S):
            await until(lambda: not alive(pids))
