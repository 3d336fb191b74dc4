"""Two schedulers and two front ends, each a process tree of its own, on 127.0.0.1 and 127.0.0.2.

Everything but engines' HTTP goes through forwarders (:mod:`.cut`).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

import aiohttp

from benchmarks.breakable import BreakableProcesses
from benchmarks.chaos.ha.cut import Cut
from sglang_sbs.cluster.plan import ProcessPlan
from sglang_sbs.cluster.readiness import wait_until_ready

HOSTS = ("127.0.0.1", "127.0.0.2")
_PORTS_PER_HOST = 16
_READY_S = 60.0
_CHANGE_S = 30.0
_ASK = aiohttp.ClientTimeout(total=0.5)

Elect = Callable[[tuple[str, int]], tuple[str, dict[str, str]]]
"""The ``--sbs-election`` of a scheduler that reaches the store at this address, and what it needs
in its environment."""


@dataclass(slots=True)
class Part:
    """A scheduler or a front end: a process tree, and its network."""

    name: str
    host: str
    plan: ProcessPlan
    asked: str
    """Where it answers this program, whatever is done to its network."""
    network: list[Cut] = field(default_factory=list)
    public: str = ""

    def cut(self) -> None:
        for way in self.network:
            way.cut()

    def heal(self) -> None:
        for way in self.network:
            way.heal()


@dataclass(frozen=True, slots=True)
class Standing:
    part: Part
    active: bool
    term: int
    front_ends: int


class _Ports:
    """Hands out the ports of one host in order."""

    def __init__(self, host: str, first: int) -> None:
        self.host = host
        self._next: Iterator[int] = iter(range(first, first + _PORTS_PER_HOST))

    def address(self) -> tuple[str, int]:
        return self.host, next(self._next)

    def way(self, target: tuple[str, int]) -> Cut:
        return Cut(self.address(), target)


class Places:
    """The four of them. Names: ``scheduler 1``, ``front end 2``."""

    def __init__(self, ports: Sequence[int], store: tuple[str, int] | None) -> None:
        """``ports``: first of a block per host; ``store``: where the lock is, if there is one."""
        self._supervisor = BreakableProcesses()
        self._session: aiohttp.ClientSession
        self.schedulers: list[Part] = []
        self.front_ends: list[Part] = []
        self.stores: list[Cut] = []
        """A scheduler's way to the store, in order; empty: there is none."""
        self.endforward: list[str] = []
        self._hosts = [_Ports(host, first) for host, first in zip(HOSTS, ports, strict=True)]
        self._listens: list[tuple[str, int]] = []
        self._endforward_binds: list[tuple[str, int]] = []
        self._ways: list[tuple[Cut, Cut]] = []
        for host in self._hosts:
            listens, hears = host.address(), host.address()
            ways = host.way(listens), host.way(hears)
            self._listens.append(listens)
            self._endforward_binds.append(hears)
            self._ways.append(ways)
            self.endforward.append(_tcp(ways[1].listen))
            if store is not None:
                self.stores.append(host.way(store))

    def plan(self, workers: Sequence[str], elect: Elect | None, log_dir: Path) -> None:
        """``workers``: the schedulers' flags that name them; ``elect``: ``None``: fixed order."""
        known = ",".join(_tcp(way.listen) for way, _ in self._ways)
        for number, host in enumerate(self._hosts):
            way, hears = self._ways[number]
            metrics = host.address()
            store = self.stores[number] if elect is not None else None
            argv = [
                *("--sbs-listen", _tcp(self._listens[number])),
                *("--sbs-advertise", _tcp(way.listen)),
                *("--sbs-endforward-bind", _tcp(self._endforward_binds[number])),
                *("--prometheus-host", host.host, "--prometheus-port", str(metrics[1])),
                *("--policy", "sbs", *workers),
            ]
            environment: dict[str, str] = {}
            if elect is not None and store is not None:
                url, environment = elect(store.listen)
                argv += ["--sbs-election", url]
            else:
                argv += ["--sbs-scheduler", known]
            self.schedulers.append(
                Part(
                    name := f"scheduler {number + 1}",
                    host.host,
                    _plan(name, "scheduler", argv, log_dir, environment),
                    _http(metrics),
                    [way, hears, *([store] if store is not None else [])],
                    _tcp(way.listen),
                )
            )
        for number, host in enumerate(self._hosts):
            serves, metrics = host.address(), host.address()
            way = host.way(serves)
            argv = [
                *("--sbs-scheduler", known),
                *("--host", host.host, "--port", str(serves[1])),
                *("--prometheus-host", host.host, "--prometheus-port", str(metrics[1])),
            ]
            self.front_ends.append(
                Part(
                    name := f"front end {number + 1}",
                    host.host,
                    _plan(name, "router", argv, log_dir),
                    _http(serves),
                    [way],
                    _http(way.listen),
                )
            )

    @property
    def parts(self) -> list[Part]:
        return [*self.schedulers, *self.front_ends]

    async def start(self) -> None:
        """All four, ready; one of the schedulers leads.

        Raises:
            NotReadyError: one did not come up.
        """
        for part in self.parts:
            for way in part.network:
                await way.start()
        for part in self.parts:
            await self._supervisor.start(part.plan)
        await self.healthy()

    async def healthy(self) -> None:
        """Until all are ready, one schedules, and both front ends are served by it.

        Raises:
            NotReadyError, TimeoutError: that does not come.
        """
        for part in self.parts:
            await wait_until_ready(self._session, part.asked, ("/readiness",), _READY_S)
        async with asyncio.timeout(_CHANGE_S):
            while True:
                standing = await self.standing()
                if [scheduler.front_ends for scheduler in standing if scheduler.active] == [
                    len(self.front_ends)
                ]:
                    return
                await asyncio.sleep(0.1)

    async def standing(self) -> list[Standing]:
        answers = await asyncio.gather(
            *(self._ask(part.asked, "/active") for part in self.schedulers)
        )
        return [
            Standing(part, said.get("scheduler") == "active", said["term"], said["front_ends"])
            for part, said in zip(self.schedulers, answers, strict=True)
            if said is not None
        ]

    async def active(self) -> list[Part]:
        return [scheduler.part for scheduler in await self.standing() if scheduler.active]

    def signal(self, part: Part, number: Signals) -> None:
        self._supervisor.signal(part.name, number)

    async def kill(self, part: Part) -> None:
        """kill -9 of every process of its tree."""
        await self._supervisor.kill(part.name)

    async def start_again(self, part: Part, more: Sequence[str] = ()) -> None:
        """After :meth:`kill`; ``more`` flags win over the earlier ones."""
        argv = (*part.plan.argv, *more)
        plan = ProcessPlan(part.name, argv, part.plan.environment, part.plan.log_path)
        await self._supervisor.start(plan)

    async def stop(self) -> None:
        for part in self.parts:
            with suppress(KeyError, ProcessLookupError):
                self.signal(part, Signals.SIGCONT)
            part.heal()
        await self._supervisor.stop(10.0)
        for part in self.parts:
            for way in part.network:
                await way.close()

    async def _ask(self, url: str, path: str) -> dict[str, Any] | None:
        try:
            async with self._session.get(url + path, timeout=_ASK) as response:
                found = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with aiohttp.ClientSession() as self._session:
            try:
                await self.start()
                yield
            finally:
                await self.stop()


def _plan(
    name: str, verb: str, argv: Sequence[str], log_dir: Path, more: Mapping[str, str] = {}
) -> ProcessPlan:
    whole = (sys.executable, "-m", "sglang_sbs.cli", verb, *argv)
    log = log_dir / f"{name.replace(' ', '-')}.log"
    return ProcessPlan(name, whole, {**os.environ, **more}, log)


def _tcp(address: tuple[str, int]) -> str:
    return f"tcp://{address[0]}:{address[1]}"


def _http(address: tuple[str, int]) -> str:
    return f"http://{address[0]}:{address[1]}"
