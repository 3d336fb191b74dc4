"""The router of a scale measurement and its engines, as processes, and what each part costs."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.router_processes import (
    Contender,
    Helper,
    Processes,
    cpu_s,
    helper,
    serving,
)
from benchmarks.scale.fleet import FleetCounts, FleetShape
from tools.stand_ins.ports import free_ports

PREFILL_DP = 8
DECODE_DP = 32
_READY_S = 60.0
_Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def shape_of(ranks: int, endforward: str, reports_per_s: float, token_s: float) -> FleetShape:
    """A quarter of the DP ranks in prefill instances of 8, the rest in decode ones of up to 32."""
    prefill = max(1, round(ranks / 4 / PREFILL_DP))
    left = max(1, ranks - prefill * PREFILL_DP)
    decode = [DECODE_DP] * (left // DECODE_DP)
    if left % DECODE_DP:
        decode.append(left % DECODE_DP)
    return FleetShape(
        prefill=[PREFILL_DP] * prefill,
        decode=decode,
        endforward=endforward,
        reports_per_s=reports_per_s,
        token_s=token_s,
    )


class FleetProcess:
    def __init__(self, process: Helper, ports: list[int]) -> None:
        self.process, self.ports = process, ports

    async def ask(self, word: str) -> FleetCounts:
        """Send a command; what the engines have seen so far."""
        self.process.stdin.write(word.encode() + b"\n")
        return msgspec.json.decode(await self.process.stdout.readline(), type=FleetCounts)


@asynccontextmanager
async def running_fleet(shape: FleetShape) -> AsyncIterator[FleetProcess]:
    """Raises: RuntimeError, it ended at its start."""
    async with helper("benchmarks.scale.fleet") as process:
        process.stdin.write(msgspec.json.encode(shape) + b"\n")
        ports = [int(word) for word in (await process.stdout.readline()).split()]
        if len(ports) != len(shape.prefill) + len(shape.decode):
            raise RuntimeError("the engines' process ended at its start; it has said why")
        yield FleetProcess(process, ports)


@dataclass(slots=True)
class Reading:
    at_s: float
    cpu_s: dict[str, float]
    """CPU time by component."""
    memory_bytes: dict[str, int]
    """Proportional set size: shared pages count once over all processes."""
    series: _Series = field(default_factory=dict)
    scrape_s: float = 0.0
    scrape_bytes: int = 0


class ScaledRouter:
    def __init__(self, port: int, metrics_port: int, pid: int, scheduler: int | None) -> None:
        """``scheduler``: its process, where it is none of the router's own."""
        self.port, self.pid = port, pid
        self._scheduler = scheduler
        self._metrics = f"http://127.0.0.1:{metrics_port}/metrics"
        self.components = self._find()

    def _find(self) -> dict[str, list[int]]:
        """Process ids by what they are."""
        own = [] if self._scheduler is None else [self._scheduler]
        found: dict[str, list[int]] = {"supervisor": [self.pid], "scheduler": own, "front ends": []}
        for pid in Processes(self.pid).pids()[1:]:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"--sbs-role" in words:
                role = words[words.index(b"--sbs-role") + 1]
                found["scheduler" if role == b"scheduler" else "front ends"].append(pid)
        return found

    async def read(self, others: Mapping[str, list[int]]) -> Reading:
        """``others``: processes that are weighed with those of the router.

        Raises:
            RuntimeError: a process of the router is another one than at the start.
        """
        if self._find() != self.components:
            raise RuntimeError("a process of the router died under this load and was restarted")
        every = {**self.components, **others}
        reading = Reading(
            time.perf_counter(),
            {name: cpu_s(pids) for name, pids in every.items()},
            {name: sum(map(_memory_bytes, pids)) for name, pids in every.items()},
        )
        await self.scrape(reading)
        return reading

    async def scrape(self, into: Reading) -> None:
        started_s = time.perf_counter()
        async with aiohttp.ClientSession() as session, session.get(self._metrics) as answer:
            text = await answer.text()
        into.scrape_s, into.scrape_bytes = time.perf_counter() - started_s, len(text)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                into.series[sample.name, tuple(sorted(sample.labels.items()))] = sample.value


@asynccontextmanager
async def running_router(
    fleet: FleetProcess,
    shape: FleetShape,
    workers: int,
    endforward: str,
    flags: tuple[str, ...],
    log: Path,
    *,
    tcp: bool = False,
) -> AsyncIterator[ScaledRouter]:
    """Ready: every engine has been described, and every rank of it has reported.

    ``tcp``: its scheduler is a process of its own, over TCP with encryption, as on another machine.

    Raises:
        RuntimeError: it does not get there.
    """
    port, metrics_port, listen, unused = free_ports(4)
    urls = [f"http://127.0.0.1:{engine}" for engine in fleet.ports]
    prefill = [(url, 8998) for url in urls[: len(shape.prefill)]]
    decode = urls[len(shape.prefill) :]
    hears = ("--sbs-endforward-bind", endforward, "--log-level", "warn", *flags)
    own = ("--frontends", str(workers), *(() if tcp else hears))
    async with AsyncExitStack() as stack:
        scheduler = None
        if tcp:
            key = log.with_suffix(".key")
            key.touch(0o600)
            key.write_text(secrets.token_hex(32))
            address, shared = f"tcp://127.0.0.1:{listen}", ("--sbs-scheduler-key-file", str(key))
            alone = Contender(
                *("the scheduler", "sglang_sbs.launch_scheduler"),
                ("--sbs-listen", address, *shared, *hears),
            )
            argv = alone.command(prefill, decode, unused, metrics_port)
            remote = await stack.enter_async_context(serving(alone, argv, metrics_port, log))
            scheduler = remote.pid
            own = (*own, "--sbs-scheduler", address, *shared, "--log-level", "warn")
        contender = Contender("the router", "sglang_sbs.launch_router", own)
        known = ([], []) if tcp else (prefill, decode)
        argv = contender.command(*known, port, free_ports(1)[0] if tcp else metrics_port)
        process = await stack.enter_async_context(serving(contender, argv, port, log))
        router = ScaledRouter(port, metrics_port, process.pid, scheduler)
        await _until_reported(router, shape)
        yield router


async def _until_reported(router: ScaledRouter, shape: FleetShape) -> None:
    limit_s = time.monotonic() + _READY_S
    while time.monotonic() < limit_s:
        reading = Reading(0.0, {}, {})
        await router.scrape(reading)
        reported = sum(name == "sbs_endforward_messages_total" for name, _ in reading.series)
        healthy = sum(v for (name, _), v in reading.series.items() if name == "smg_worker_health")
        if reported == shape.ranks and healthy == len(shape.prefill) + len(shape.decode):
            return
        await asyncio.sleep(0.5)
    raise RuntimeError(
        f"the router received reports of {reported} of {shape.ranks} ranks in {_READY_S:g} s"
    )


def _memory_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
