"""One fault under load: the cluster it happens to, and what clients and books say afterwards."""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.breakable import BreakableCluster
from benchmarks.chaos.endforward_relay import EndForwardRelay
from benchmarks.chaos.open_load import (
    Fate,
    OpenLoad,
    Outcome,
    Step,
    first_token_median_s,
    first_token_worst_s,
    recovery_s,
    steps,
)
from benchmarks.demo.load import Workload, run_load
from benchmarks.demo.runs import RouterPorts, running_router
from benchmarks.demo.virtual_cluster import rig_options
from sglang_sbs.cluster.local import Progress
from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE, plan_cluster
from sglang_sbs.cluster.ports import free_port_blocks

DP_SIZE = 2
QUIET_S = 4.0
"""Load before the fault: what is normal."""
SLACK = 1.5
"""TTFT is as before up to this times the longest before the fault."""
CLIENT_TIMEOUT_S = 60.0
"""A request that has no end by then is unanswered."""
PATIENCE_S = 60.0
"""Load goes on for so long after the fault if service is not back before."""
MAX_LOAD_S = 300.0
BOOTSTRAP_TIMEOUT_S = 15
"""SGLang's own default, 300 s, is how long requests wait on a prefill instance that restarted so
fast that decode ranks did not notice: they go on talking to its old ports."""
_DRAIN_S = 15.0
_SERVES = re.compile(r"(scheduler|front end \d+) serves \(pid (\d+)\)")


@dataclass(frozen=True, slots=True)
class Site:
    """Engines on this machine and what stands between them and a router."""

    cluster: BreakableCluster
    relay: EndForwardRelay
    ports: RouterPorts
    log_dir: Path


@dataclass(slots=True)
class Scene:
    site: Site
    url: str
    router_log: Path
    load: OpenLoad
    notes: list[str] = field(default_factory=list)
    """Remarks of the fault itself, for the report."""

    def router_pids(self) -> dict[str, int]:
        """Processes of a router with ``--frontends`` by name, the youngest of each."""
        return {m[1]: int(m[2]) for m in _SERVES.finditer(self.router_log.read_text())}


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that breaks. ``inject`` returns when it is over, as far as it ever is."""

    name: str
    summary: str
    inject: Callable[[Scene], Awaitable[None]]
    workers: int = 1
    breaks_connections: bool = False
    """Clients' connections end with the process that is killed: no router can answer those."""
    decode_flags: Sequence[str] = ()
    """The decode instance is started anew with these, and without them afterwards."""


class FaultResult(msgspec.Struct, frozen=True):
    """The effect of one fault on clients; times in seconds."""

    fault: str
    sent: int
    accepted: int
    answered: int
    errors: dict[str, int]
    cut_off: int
    unanswered: int
    streams: dict[str, int]
    """Streams that had begun when the fault came (``running``), and how they ended."""
    fault_s: float
    """How long it lasted, with the restart of what was killed."""
    recovery_s: float | None
    """From the fault until requests were served as before."""
    ttft_before_s: float
    ttft_worst_before_s: float
    ttft_during_s: float
    """Median of those sent between the fault and its end."""
    ttft_worst_s: float
    steps: list[Step]
    left_over: dict[str, int]
    """Counts that the router's books still held when all clients had gone."""
    notes: list[str]
    passed: bool
    """Nothing unanswered, nothing cut off that a router could have saved, nothing left over."""


async def run_fault(site: Site, fault: Fault, *, workload: Workload, tail_s: float) -> FaultResult:
    """Start a router, put load on it, let the fault happen, go on for at least ``tail_s``.

    Raises:
        RuntimeError: the router did not start.
        ClusterStartError: an engine did not come back.
    """
    if fault.decode_flags:
        await site.cluster.kill("decode-0")
        await site.cluster.start_instance("decode-0", fault.decode_flags)
    name = f"router-{fault.name}"
    flags = ["--policy", "sbs", "--frontends", str(fault.workers)]
    try:
        async with running_router(
            site.cluster.instances, site.ports, flags, site.log_dir, name
        ) as url:
            return await _under_load(site, fault, url, workload, tail_s)
    finally:
        if fault.decode_flags:
            await site.cluster.kill("decode-0")
            await site.cluster.start_instance("decode-0")


async def _under_load(
    site: Site, fault: Fault, url: str, workload: Workload, tail_s: float
) -> FaultResult:
    warm_up = msgspec.structs.replace(workload, requests=20, content="warm-up", max_new_tokens=4)
    await run_load(url, warm_up.arrivals(), timeout_s=CLIENT_TIMEOUT_S)
    workload = msgspec.structs.replace(
        workload, requests=int(MAX_LOAD_S * workload.qps), content=fault.name
    )
    async with OpenLoad(url, timeout_s=CLIENT_TIMEOUT_S) as load:
        scene = Scene(site, url, site.log_dir / f"router-{fault.name}.log", load)
        load.send(workload.arrivals())
        await asyncio.sleep(QUIET_S)
        begin_s = load.elapsed_s
        await fault.inject(scene)
        end_s = load.elapsed_s
        await asyncio.sleep(tail_s)
        for _ in range(int(PATIENCE_S)):
            limit_s = _limit_s(load.outcomes, begin_s)
            if recovery_s(load.outcomes, begin_s, limit_s) is not None:
                break
            await asyncio.sleep(1.0)
        outcomes = await load.finish()
    left = await left_over(url)
    before = _before(outcomes, begin_s)
    limit_s = _limit_s(outcomes, begin_s)
    fates = Counter(o.fate for o in outcomes)
    running = Counter(o.fate for o in outcomes if o.running_at(begin_s))
    during = [o for o in outcomes if begin_s <= o.sent_s <= end_s]
    return FaultResult(
        fault=fault.name,
        sent=len(outcomes),
        accepted=len(outcomes) - fates[Fate.NOT_ACCEPTED],
        answered=fates[Fate.ANSWERED],
        errors=dict(Counter(o.label for o in outcomes if o.fate is Fate.ERROR)),
        cut_off=fates[Fate.CUT_OFF],
        unanswered=fates[Fate.UNANSWERED],
        streams={
            "running": running.total(),
            "answered": running[Fate.ANSWERED],
            "error": running[Fate.ERROR],
            "cut_off": running[Fate.CUT_OFF],
            "unanswered": running[Fate.UNANSWERED],
        },
        fault_s=end_s - begin_s,
        recovery_s=recovery_s(outcomes, begin_s, limit_s),
        ttft_before_s=first_token_median_s(before),
        ttft_worst_before_s=first_token_worst_s(before),
        ttft_during_s=first_token_median_s(during),
        ttft_worst_s=first_token_worst_s([o for o in outcomes if o.ended_s >= begin_s]),
        steps=steps(outcomes, begin_s),
        left_over=left,
        notes=[*scene.notes, *_examples(outcomes)],
        passed=(
            fates[Fate.UNANSWERED] == 0
            and (fates[Fate.CUT_OFF] == 0 or fault.breaks_connections)
            and not left
        ),
    )


def _before(outcomes: Sequence[Outcome], begin_s: float) -> list[Outcome]:
    """Normal is what had its first token by then; whom the fault met waiting says nothing of it."""
    return [o for o in outcomes if o.first_token_s < begin_s]


def _limit_s(outcomes: Sequence[Outcome], begin_s: float) -> float:
    return SLACK * first_token_worst_s(_before(outcomes, begin_s))


def _examples(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the errors of clients that were cut off or left alone, once each."""
    return sorted(
        {o.sample.error[:120] for o in outcomes if o.fate in (Fate.CUT_OFF, Fate.UNANSWERED)}
    )


async def left_over(url: str) -> dict[str, int]:
    """Return the counts that the scheduler's books still hold after a time; empty is as it should
    be."""
    left: dict[str, int] = {}
    async with aiohttp.ClientSession() as session:
        for _ in range(int(_DRAIN_S / 0.5)):
            async with session.get(f"{url}/server_info") as response:
                if response.status == 200:
                    left = books((await response.json())["sbs"])
                    if not left:
                        return {}
                else:
                    left = {f"/server_info answers {response.status}": 1}
            await asyncio.sleep(0.5)
    return left


def books(state: dict[str, Any]) -> dict[str, int]:
    """Everything in the scheduler's state that belongs to requests and is not zero."""
    prefill = [rank for instance in state["prefill"] for rank in instance["ranks"]]
    decode = [rank for instance in state["decode"] for rank in instance["ranks"]]
    counts = {
        "queued": state["queue_requests"],
        "in flight": state["in_flight_requests"],
        "prefill outstanding": sum(rank["outstanding_requests"] for rank in prefill),
        "prefill flight tokens": sum(rank["flight_tokens"] for rank in prefill),
        "decode running": sum(rank["running"] for rank in decode),
    }
    return {name: int(count) for name, count in counts.items() if count}


def environment_reporting_to(*routers: str) -> dict[str, str]:
    """The engines' environment; ``routers``: EndForward endpoints."""
    return {
        **os.environ,
        "SGLANG_SBS_ROUTERS": ",".join(routers),
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(BOOTSTRAP_TIMEOUT_S),
    }


@asynccontextmanager
async def running_site(
    prefill: int, log_dir: Path, on_progress: Callable[[Progress], None]
) -> AsyncIterator[Site]:
    """Start one decode and so many prefill instances, all reporting through a relay.

    Raises:
        ClusterStartError: an engine did not come up.
    """
    blocks = free_port_blocks(PORTS_PER_INSTANCE)
    first = next(blocks)
    ports = RouterPorts(http=first, endforward=first + 1, prometheus=first + 2)
    listen = f"tcp://127.0.0.1:{first + 3}"
    environment = environment_reporting_to(listen)
    options = rig_options(prefill, 1, DP_SIZE, log_dir, environment)
    relay = EndForwardRelay(listen, f"tcp://127.0.0.1:{ports.endforward}")
    relay.start()
    try:
        plan = plan_cluster(options, blocks)
        async with BreakableCluster(plan, on_progress=on_progress) as cluster:
            yield Site(cluster, relay, ports, log_dir)
    finally:
        await relay.close()
