"""One policy over the engines of a running cluster: its router, a load, the result."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_sbs.cluster.logs import last_log_lines
from sglang_sbs.cluster.plan import InstancePlan, ProcessPlan, Role, pd_urls
from sglang_sbs.cluster.readiness import (
    ROUTER_READINESS_PATHS,
    NotReadyError,
    wait_until_ready,
)
from sglang_sbs.cluster.router_command import router_argv
from sglang_sbs.cluster.spawn import ChildSpawner, SpawnedProcess
from sglang_sbs.cluster.supervise import Supervisor
from sglang_sbs.demo.load import Arrival, Sample, run_load
from sglang_sbs.demo.passes import EngineRecord, read_engines

ROUTER_TIMEOUT_S = 60.0
STOP_GRACE_S = 10.0


class RouterStartError(RuntimeError):
    """A router did not become ready; the message says why and has its last log lines."""

    def __init__(self, why: str, log: Path) -> None:
        super().__init__(
            f"the router did not start: {why}. Last lines of {log}:\n{last_log_lines(log)}"
        )


@dataclass(frozen=True, slots=True)
class RouterPorts:
    """Where routers of this cluster listen, one at a time."""

    http: int
    endforward: int
    prometheus: int


@dataclass(slots=True)
class Run:
    label: str
    samples: list[Sample]
    engines: EngineRecord

    @property
    def completed(self) -> list[Sample]:
        return [s for s in self.samples if s.completed]


def instance_names(instances: Sequence[InstancePlan]) -> dict[str, str]:
    """Worker URL -> ``p0``, ``d0``, in the order of the plan."""
    names: dict[str, str] = {}
    for role, letter in ((Role.PREFILL, "p"), (Role.DECODE, "d")):
        mine = [i for i in instances if i.role is role]
        names |= {instance.url: f"{letter}{number}" for number, instance in enumerate(mine)}
    return names


@asynccontextmanager
async def running_router(
    instances: Sequence[InstancePlan],
    ports: RouterPorts,
    flags: Sequence[str],
    log_dir: Path,
    name: str = "router",
) -> AsyncIterator[str]:
    """Start ``launch_router`` over the instances; its URL once it is ready. Stops it at the end.

    Raises:
        RouterStartError: it did not become ready.
    """
    argv = router_argv(*pd_urls(instances))
    argv += ["--host", "127.0.0.1", "--port", str(ports.http)]
    argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(ports.prometheus)]
    argv += ["--sbs-endforward-bind", f"tcp://127.0.0.1:{ports.endforward}", *flags]
    plan = ProcessPlan(name, tuple(argv), dict(os.environ), log_dir / f"{name}.log")
    url = f"http://127.0.0.1:{ports.http}"
    async with router_process(plan, url, ROUTER_READINESS_PATHS, STOP_GRACE_S):
        yield url


@asynccontextmanager
async def router_process(
    plan: ProcessPlan, url: str, ready_paths: Sequence[str], stop_grace_s: float
) -> AsyncIterator[SpawnedProcess]:
    """Start a router of any make, and stop it at the end; its process once it is ready at ``url``.

    Raises:
        RouterStartError: it ended at its start, or did not become ready in time.
    """
    supervisor = Supervisor()
    try:
        process = await supervisor.start(plan, ChildSpawner())
        async with aiohttp.ClientSession() as session:
            waiting = asyncio.create_task(
                wait_until_ready(session, url, ready_paths, ROUTER_TIMEOUT_S)
            )
            either: list[asyncio.Future[Any]] = [waiting, process.exited]
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    raise RouterStartError("it ended at its start", plan.log_path)
                waiting.result()
            except NotReadyError as error:
                raise RouterStartError(str(error), plan.log_path) from error
            finally:
                waiting.cancel()
        yield process
    finally:
        await supervisor.stop(stop_grace_s)


async def run_policy(
    label: str,
    instances: Sequence[InstancePlan],
    ports: RouterPorts,
    flags: Sequence[str],
    arrivals: Sequence[Arrival],
    log_dir: Path,
    *,
    warm_up: Sequence[Arrival] = (),
    timeout_s: float = 120.0,
) -> Run:
    """Send a load through a router with these flags, with a progress bar; read its event log.

    ``warm_up`` goes first and is in no figure but the event counts: it fills connection pools and
    teaches the scheduler the forward time.
    """
    event_log = log_dir / f"{label}.events"
    with Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        transient=True,
    ) as progress:
        task = progress.add_task(label, total=len(warm_up) + len(arrivals))

        def done(_sample: Sample) -> None:
            progress.advance(task)

        flags = [*flags, "--sbs-event-log", str(event_log)]
        async with running_router(instances, ports, flags, log_dir, f"router-{label}") as url:
            if warm_up:
                await run_load(url, warm_up, timeout_s=timeout_s, on_done=done)
            samples = await run_load(url, arrivals, timeout_s=timeout_s, on_done=done)
    return Run(label, samples, read_engines(event_log, instance_names(instances)))
