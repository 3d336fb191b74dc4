"""``sglang-sbs observe`` on real engines behind ``sglang_router`` with ``round_robin``.

1P1D on the virtual GPU, whose DP ranks share passes of 0.3 s and longer, so that most requests
arrive during one.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from cluster_requests import cluster_options, generate, random_prompt, start
from harness.until import until

from benchmarks.demo.runs import router_process
from benchmarks.router_processes import Contender
from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE, ProcessPlan, Role, pd_urls
from sglang_sbs.cluster.ports import free_port_blocks
from sglang_sbs.observe.cli import Observer
from sglang_sbs.scheduling import Dispatch, ForwardEnded, PrefillDone, RequestArrived
from sglang_sbs.scheduling.eventlog import read_event_log
from sglang_sbs.simulator.workloads.arrivals import read_trace
from tools.cpu_engine.engines import CpuEngines
from tools.cpu_engine.virtual_gpu import VirtualGpuCost

pytestmark = pytest.mark.cluster

WAIT_S = 60
# Two chunks of a rank (512 tokens), and less than one; no length twice.
LENGTHS = [90 + 37 * number for number in range(24)]
TOLERANCE_S = 0.05
"""The engine's processes convert each other's clocks."""


async def test_arrivals_lengths_and_placement_are_what_was_sent(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    blocks = free_port_blocks(PORTS_PER_INSTANCE)
    first = next(blocks)
    endpoint = f"tcp://127.0.0.1:{first + 1}"
    out = tmp_path / "traffic.events"
    options = cluster_options(
        tmp_path_factory,
        "observed",
        cpu=CpuEngines(VirtualGpuCost(prefill_base_s=0.3)),
        environment={**os.environ, "SGLANG_SBS_ROUTERS": endpoint},
    )
    stock = Contender("rust", "sglang_router.launch_router", ("--policy", "round_robin"))
    observation = Observer(out)
    sent: dict[int, tuple[float, float]] = {}
    async with start(options) as cluster, aiohttp.ClientSession() as http:
        observing = asyncio.create_task(observation.run(endpoint, [], None, 3600))
        await until(lambda: len(observation.recorder.instances) == 2)
        argv = stock.command(*pd_urls(cluster.instances), first, first + 2)
        plan = ProcessPlan("router", tuple(argv), dict(os.environ), tmp_path / "router.log")
        url = f"http://127.0.0.1:{first}"
        async with router_process(plan, url, (stock.ready_path,), 10):

            async def ask(number: int) -> None:
                await asyncio.sleep(0.1 * number)
                began_s = time.monotonic()
                await generate(http, url, random_prompt(number, LENGTHS[number]), 2)
                sent[LENGTHS[number]] = began_s, time.monotonic()

            await asyncio.gather(*map(ask, range(len(LENGTHS))))
        await until(lambda: len(observation.traffic.prefills_s) == len(LENGTHS))
        observation.stop.set()
        await observing
        (prefill,) = cluster.plan.of_role(Role.PREFILL)
        (decode,) = cluster.plan.of_role(Role.DECODE)
    records = list(read_event_log(out))
    arrived = {r.event.rid: r for r in records if isinstance(r.event, RequestArrived)}
    assert sorted(r.event.prompt_tokens for r in arrived.values()) == LENGTHS
    assert sorted(arrival.prompt_tokens for arrival in read_trace(out)) == LENGTHS
    assert observation.recorder.counts["accepted"] == len(LENGTHS)
    assert observation.lost == 0
    done_s = {r.event.rid: r.now_s for r in records if isinstance(r.event, PrefillDone)}
    for rid, record in arrived.items():
        began_s, answered_s = sent[record.event.prompt_tokens]
        assert began_s - TOLERANCE_S <= record.now_s <= answered_s
        assert record.now_s < done_s[rid] <= answered_s + TOLERANCE_S
        assert record.event.max_new_tokens == 2
    placed = [command for record in arrived.values() for command in record.commands]
    assert all(isinstance(placement, Dispatch) for placement in placed)
    names = Counter((placement.prefill, placement.decode) for placement in placed)
    boots = {up.role: up.instance for up in observation.recorder.instances.values()}
    assert names == {(boots["prefill"], boots["decode"]): len(LENGTHS)}
    assert {placement.prefill_rank for placement in placed} == {0, 1}
    assert {prefill.ranks, decode.ranks} == {2}
    # The arrival is the server's: the scheduler takes in what came during a pass after it.
    reports = [r.event.report for r in records if isinstance(r.event, ForwardEnded)]
    queued_s = {
        request.rid: request.queued_s
        for r in reports
        for request in r.started
        if r.role == "prefill"
    }
    arrived_s = {
        request.rid: request.arrived_s
        for r in reports
        for request in r.accepted
        if r.role == "prefill"
    }
    waited_outside_s = [queued_s[rid] - arrived_s[rid] for rid in arrived_s]
    assert max(waited_outside_s) > 0.1
    tokens = sum(r.extend_tokens for r in reports if r.kind == "forward" and r.role == "prefill")
    # A health check of the router is a token in a pass, and no request.
    assert 0 <= tokens - sum(LENGTHS) < min(LENGTHS)
