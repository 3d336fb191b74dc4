"""A prefill instance over two nodes: both ranks report, their caches are known exactly, and a gang
with parts on both starts in one pass.

Node 1 is this machine at 127.0.0.2, where its rank publishes KV events and nothing of the first
node listens.
"""

from __future__ import annotations

import asyncio
import time
import uuid

import aiohttp
import pytest
from cluster_hits import (
    NEW_TOKENS,
    PAGE_TOKENS,
    RANKS,
    SYSTEM_PROMPT_TOKENS,
    Conversation,
    Outcome,
    Site,
    environment,
    stored_on_all_ranks,
)
from cluster_requests import ENGINE_FLAGS, random_prompt, send_legs, start

from benchmarks.demo.runs import RouterPorts, running_router
from sglang_sbs.cluster.local import LocalCluster
from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE, ClusterOptions
from sglang_sbs.cluster.ports import free_port_blocks
from sglang_sbs.engine.config import GANG_GATE_MS, split_tcp
from sglang_sbs.scheduling.events import ForwardEnded, InstanceUp
from sglang_sbs.wire.gangs import SIZED_RID_PREFIX, GangPart, gang_room
from tools.cpu_engine.engines import CpuEngines
from tools.cpu_engine.tiny_model import cached_tiny_model
from tools.cpu_engine.virtual_gpu import VirtualGpuCost

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session")]

CONVERSATIONS = 8
TURNS = 3
GANGS = 8
MEMBERS = 2
"""Number of a gang's requests per DP rank."""
GATE_MS = 200
"""The most there is, as a busy host may take its time."""
LATE_S = 0.06
"""So much later comes the last request of a gang: two passes, which start without it if free to."""


async def test_both_nodes_report_and_hits_are_those_predicted_also_by_a_router_that_restarts(
    tmp_path_factory: pytest.TempPathFactory, http: aiohttp.ClientSession
) -> None:
    folder = tmp_path_factory.mktemp("several-nodes")
    first = next(free_port_blocks(PORTS_PER_INSTANCE))
    flags = ["--policy", "sbs", "--sbs-event-log"]
    options = ClusterOptions(
        model_path=str(cached_tiny_model()),
        prefill_nodes=2,
        engine_flags=[*ENGINE_FLAGS, "--page-size", str(PAGE_TOKENS)],
        cpu=CpuEngines(VirtualGpuCost(prefill_base_s=0.03, prefill_per_max_token_s=2e-5)),
        log_dir=folder,
        environment=environment() | {GANG_GATE_MS: str(GATE_MS)},
        router_flags=[*flags, str(folder / "first"), "--prometheus-port", str(first)],
    )
    async with start(options) as cluster:
        assert cluster.router is not None
        site = Site(cluster, cluster.router.url, folder / "first")
        # With nothing in common: what they share would keep them at one rank.
        seeds = range(CONVERSATIONS)
        conversations = [Conversation(seed, own_system_prompt=True) for seed in seeds]
        await asyncio.gather(*(conversation.turn(http, site.url) for conversation in conversations))
        since_s = time.monotonic()
        await asyncio.gather(
            *(conversation.turns(http, site.url, TURNS) for conversation in conversations)
        )
        exactly(await site.outcomes(CONVERSATIONS * TURNS, since_s))
        records = site.records()
        received = [r.event.report for r in records if isinstance(r.event, ForwardEnded)]
        prefill = {
            (message.dp_rank, message.boot_id): message
            for message in received
            if message.role == "prefill"
        }
        assert {rank for rank, _ in prefill} == set(range(RANKS))
        assert len(prefill) == RANKS  # each node is a boot of its own
        assert [
            message.kv_address and message.kv_address.host for message in prefill.values()
        ].count(None) == 1
        assert stored_on_all_ranks(records)
        up = [r.event for r in records if isinstance(r.event, InstanceUp)]
        assert {e.prefix_source for e in up if e.role == "prefill"} == {"events"}

        await cluster.kill("router")
        _, port = split_tcp(cluster.instances[0].environment["SGLANG_SBS_ROUTERS"])
        ports = RouterPorts(http=first + 1, endforward=port, prometheus=first + 2)
        log = folder / "second"
        flags = [*flags, str(log), "--tokenizer-path", str(cached_tiny_model())]
        async with running_router(cluster.instances, ports, flags, folder, "again") as url:
            second = Site(cluster, url, log)
            await second.until(stored_on_all_ranks, 0.0)
            since_s = time.monotonic()
            await asyncio.gather(*(conversation.turn(http, url) for conversation in conversations))
            exactly(await second.outcomes(CONVERSATIONS, since_s))
            passes = [
                await second.until_started(await send_gang(http, cluster, tag))
                for tag in range(GANGS)
            ]
            whole = [a_pass for a_pass in passes if len(set(a_pass.values())) == 1]
            # Without the gate none is; on a busy host a handshake may take longer than the gate.
            assert len(whole) >= GANGS / 2, f"batches were split: {passes}"


async def send_gang(http: aiohttp.ClientSession, cluster: LocalCluster, tag: int) -> set[str]:
    """Request ids of a gang with parts on both nodes, the last of which is sent late."""
    prefill, decode = cluster.instances
    gang = GangPart(tag, MEMBERS, RANKS)
    rids = {
        SIZED_RID_PREFIX + uuid.uuid4().hex: number % RANKS for number in range(MEMBERS * RANKS)
    }

    async def send(number: int, rid: str, rank: int) -> None:
        if number == len(rids) - 1:
            await asyncio.sleep(LATE_S)
        await send_legs(
            *(http, prefill, decode, random_prompt(number, 40), NEW_TOKENS, rank, number // RANKS),
            rid=rid,
            bootstrap_room=gang_room(gang, RANKS, rank),
        )

    await asyncio.gather(
        *(send(number, rid, rank) for number, (rid, rank) in enumerate(rids.items()))
    )
    return set(rids)


def exactly(outcomes: list[Outcome]) -> None:
    assert {outcome.rank for outcome in outcomes} == set(range(RANKS))
    assert [outcome for outcome in outcomes if not outcome.exact] == []
    # Not of nothing.
    assert all(
        outcome.reported >= SYSTEM_PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS
        for outcome in outcomes
    )
