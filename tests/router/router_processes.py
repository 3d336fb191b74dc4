"""A router of several real processes between mock engines, for the tests of this folder.

Ends only processes it started, by their ids. The engines live in the test's own event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from router_harness import TIMEOUT_S

from tools.stand_ins.mock_engine import MockEngine, Rooms

START_S = 180.0
"""Starting several Python processes on a busy machine."""

_SERVES = re.compile(r"(scheduler|front end \d+) serves \(pid (\d+)\)")
_PORT = re.compile(r"sglang-sbs \S+: policy \S+ at [^:]*:(\d+),")
_METRICS = re.compile(r"metrics at :([1-9]\d*)")


@dataclass
class Group:
    """One ``launch_router`` with its children."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)
    said: asyncio.Condition = field(default_factory=asyncio.Condition)
    reader: asyncio.Task[None] | None = None
    ended: bool = False

    async def read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            async with self.said:
                self.lines.append(line.decode())
                self.said.notify_all()
        async with self.said:
            self.ended = True
            self.said.notify_all()

    def find(self, pattern: str) -> list[str]:
        return [line for line in self.lines if re.search(pattern, line)]

    async def says(self, pattern: str, times: int = 1) -> None:
        """Until so many lines of the log have matched."""
        try:
            async with asyncio.timeout(START_S), self.said:
                await self.said.wait_for(lambda: self.ended or len(self.find(pattern)) >= times)
        except TimeoutError:
            pass
        if len(self.find(pattern)) < times:
            raise AssertionError(f"never said {pattern!r}:\n" + "".join(self.lines))

    @property
    def pids(self) -> dict[str, int]:
        """The children by name, the youngest of each."""
        found = (_SERVES.search(line) for line in self.lines)
        return {match[1]: int(match[2]) for match in found if match}

    @property
    def port(self) -> int:
        return int(self._last(_PORT))

    @property
    def metrics_port(self) -> int:
        """Return the metrics port of the present scheduler process: port 0 gives each another
        one."""
        return int(self._last(_METRICS))

    def _last(self, pattern: re.Pattern[str]) -> str:
        found = [match[1] for match in map(pattern.search, self.lines) if match]
        assert found, "".join(self.lines)
        return found[-1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def end(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            try:
                async with asyncio.timeout(START_S):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        if self.reader is not None:
            await self.reader


async def start_group(*flags: str, ready: str = r"sglang-sbs \S+: policy ") -> Group:
    """Start ``launch_router`` and wait until it serves."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sglang_sbs.launch_router"),
        *("--host", "127.0.0.1", "--prometheus-host", "127.0.0.1", "--prometheus-port", "0"),
        *("--sbs-endforward-bind", "tcp://127.0.0.1:*", "--retry-initial-backoff-ms", "1"),
        *flags,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    group = Group(process)
    group.reader = asyncio.create_task(group.read())
    try:
        await group.says(ready)
    except BaseException:
        await group.end()
        raise
    return group


@dataclass
class Site:
    """Mock engines, and a client."""

    prefill: list[MockEngine]
    decode: list[MockEngine]
    client: aiohttp.ClientSession

    @property
    def flags(self) -> list[str]:
        flags = []
        for engine in self.prefill:
            flags += ["--prefill", engine.url, "9000"]
        for engine in self.decode:
            flags += ["--decode", engine.url]
        return flags

    async def ready(self, group: Group) -> None:
        """Until every front end is likely to know a pair: each connection asks one of them."""
        good = 0
        async with asyncio.timeout(START_S):
            while good < 8:
                async with fresh_client() as client, client.get(group.url + "/readiness") as got:
                    good = good + 1 if got.status == 200 else 0
                if not good:
                    await asyncio.sleep(0.05)

    async def metrics(self, group: Group) -> str:
        """The one page of all processes."""
        async with self.client.get(f"http://127.0.0.1:{group.metrics_port}/metrics") as got:
            assert got.status == 200
            return await got.text()

    async def metric(self, group: Group, series: str) -> float:
        """The value of one series, NaN without it."""
        for line in (await self.metrics(group)).splitlines():
            if line.rpartition(" ")[0] == series:
                return float(line.rpartition(" ")[2])
        return float("nan")

    async def shows(self, group: Group, series: str, value: float) -> None:
        """Until the series has that value."""
        seen = float("nan")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while (seen := await self.metric(group, series)) != value:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{series} is {seen}, never {value}") from None

    async def generate(self, url: str, **body: Any) -> tuple[int, bytes]:
        """One request on a connection of its own."""
        body = {"input_ids": [1] * 20, "stream": True} | body
        async with fresh_client() as client, client.post(url + "/generate", json=body) as got:
            return got.status, await got.read()


def fresh_client() -> aiohttp.ClientSession:
    """More patient than anybody is to be with a router that starts: a test may hold an engine's
    answers back until then, and its clients wait all that time."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=START_S + TIMEOUT_S))


@asynccontextmanager
async def site(prefill: int = 2, decode: int = 1) -> AsyncIterator[Site]:
    """Engines of two ranks each."""
    rooms = Rooms()
    prefills = [MockEngine("prefill", dp_size=2, rooms=rooms) for _ in range(prefill)]
    decodes = [MockEngine("decode", dp_size=2, rooms=rooms) for _ in range(decode)]
    for engine in prefills + decodes:
        await engine.start()
    client = fresh_client()
    try:
        yield Site(prefills, decodes, client)
    finally:
        await client.close()
        for engine in prefills + decodes:
            await engine.stop()


@asynccontextmanager
async def running(*flags: str, workers: int = 2) -> AsyncIterator[tuple[Site, Group]]:
    """Engines and a router with ``workers`` front ends, ready."""
    async with site() as engines:
        group = await start_group(*engines.flags, "--port", "0", "--workers", str(workers), *flags)
        try:
            await engines.ready(group)
            yield engines, group
        finally:
            await group.end()


def alive(pids: Iterable[int]) -> bool:
    return any(Path(f"/proc/{pid}").exists() for pid in pids)


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
