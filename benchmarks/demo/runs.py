"""A router over the engines of a running cluster, and the result of a load through it."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.demo.load import Latency, Sample
from benchmarks.demo.passes import EngineRecord, PassStatistics, pass_statistics
from sglang_sbs.cluster.plan import InstancePlan, ProcessPlan, Role, pd_urls, router_argv
from sglang_sbs.cluster.readiness import ROUTER_READINESS_PATHS, NotReadyError, wait_until_ready
from sglang_sbs.cluster.spawn import SpawnedProcess, last_words
from sglang_sbs.cluster.supervise import ClusterSupervisor, ProcessDiedError

ROUTER_TIMEOUT_S = 60.0
STOP_GRACE_S = 10.0


def policy_flags(name: str) -> list[str]:
    """Router flags of a policy or of ``sbs_paper``, without flow control: an overload run measures
    waiting, not refusing."""
    policy = ["sbs", "--sbs-trigger", "paper"] if name == "sbs_paper" else [name]
    return ["--policy", *policy, "--sbs-n-limit", "1000000"]


class RouterStartError(RuntimeError):
    """A router did not become ready; the message says why and has its last log lines."""

    def __init__(self, why: str, log: Path) -> None:
        super().__init__(f"the router did not start: {why}. {last_words(log)}")


@dataclass(frozen=True, slots=True)
class RouterPorts:
    """Where routers of this cluster listen, one at a time."""

    http: int
    endforward: int
    prometheus: int

    @classmethod
    def from_block(cls, first: int) -> RouterPorts:
        return cls(first, first + 1, first + 2)

    def environment_of_engines(self) -> dict[str, str]:
        return {**os.environ, "SGLANG_SBS_ROUTERS": f"tcp://127.0.0.1:{self.endforward}"}


@dataclass(slots=True)
class Run:
    label: str
    samples: list[Sample]
    engines: EngineRecord

    @property
    def completed(self) -> list[Sample]:
        return [s for s in self.samples if s.completed]

    @property
    def failed(self) -> int:
        return len(self.samples) - len(self.completed)

    @property
    def errors(self) -> list[str]:
        return sorted({s.error for s in self.samples if s.error})

    @property
    def ttft(self) -> Latency:
        return Latency.of([s.ttft_s for s in self.completed])

    def passes(self, window_s: tuple[float, float] = (-math.inf, math.inf)) -> PassStatistics:
        return pass_statistics(self.engines.passes, self.engines.chunk_tokens, window_s)


def instance_names(instances: Sequence[InstancePlan]) -> dict[str, str]:
    """Worker URL -> ``p0``, ``d0``, in the order of the plan."""
    pd = [instance for instance in instances if instance.role is not Role.UNIFIED]
    return {
        instance.url: f"{instance.role[0]}{instance.name.rpartition('-')[2]}" for instance in pd
    }


@asynccontextmanager
async def running_router(
    instances: Sequence[InstancePlan],
    ports: RouterPorts,
    flags: Sequence[str],
    log_dir: Path,
    name: str = "router",
) -> AsyncIterator[str]:
    """Start ``launch_router`` over the instances; its URL once it is ready. Stops it at the end.
    Raises: RouterStartError."""
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
    Raises: RouterStartError, it ended at its start, or did not become ready in time."""
    supervisor = ClusterSupervisor()
    try:
        process = await supervisor.start(plan)
        async with aiohttp.ClientSession() as session:
            ready = wait_until_ready(session, url, ready_paths, ROUTER_TIMEOUT_S)
            try:
                await supervisor.unless_one_dies(ready)
            except ProcessDiedError as error:
                raise RouterStartError("it ended at its start", plan.log_path) from error
            except NotReadyError as error:
                raise RouterStartError(str(error), plan.log_path) from error
        yield process
    finally:
        await supervisor.stop(stop_grace_s)
