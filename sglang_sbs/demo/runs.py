"""One policy over the engines of a running cluster: its router, a load, the result.

Owns the router process of a run and its event log. Must not know how the engines were started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_sbs.cluster.logs import last_log_lines
from sglang_sbs.cluster.plan import InstancePlan, ProcessPlan, Role
from sglang_sbs.cluster.readiness import (
    ROUTER_READINESS_PATHS,
    NotReadyError,
    wait_until_ready,
)
from sglang_sbs.cluster.spawn import ChildSpawner
from sglang_sbs.cluster.supervise import Supervisor
from sglang_sbs.demo.load import Arrival, Sample, run_load
from sglang_sbs.demo.passes import EngineRecord, read_engines

ROUTER_TIMEOUT_S = 60.0
STOP_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class RouterPorts:
    """Where routers of this cluster listen, one at a time."""

    http: int
    endforward: int
    prometheus: int


@dataclass(slots=True)
class Run:
    """The outcome of one policy."""

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
        RuntimeError: it did not become ready; the message has its last log lines.
    """
    argv = [sys.executable, "-m", "sglang_sbs.launch_router", "--pd-disaggregation"]
    for instance in instances:
        if instance.role is Role.PREFILL:
            argv += ["--prefill", instance.url, str(instance.bootstrap_port)]
        elif instance.role is Role.DECODE:
            argv += ["--decode", instance.url]
    argv += ["--host", "127.0.0.1", "--port", str(ports.http)]
    argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(ports.prometheus)]
    argv += ["--sbs-endforward-bind", f"tcp://127.0.0.1:{ports.endforward}", *flags]
    plan = ProcessPlan(name, tuple(argv), dict(os.environ), log_dir / f"{name}.log")
    url = f"http://127.0.0.1:{ports.http}"
    supervisor = Supervisor()
    try:
        process = await supervisor.start(plan, ChildSpawner())
        async with aiohttp.ClientSession() as session:
            try:
                await wait_until_ready(session, url, ROUTER_READINESS_PATHS, ROUTER_TIMEOUT_S)
            except NotReadyError as error:
                state = "it ended" if process.exited.done() else str(error)
                raise RuntimeError(
                    f"the router did not start: {state}. Last lines of {plan.log_path}:\n"
                    f"{last_log_lines(plan.log_path)}"
                ) from error
        yield url
    finally:
        await supervisor.stop(STOP_GRACE_S)


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
