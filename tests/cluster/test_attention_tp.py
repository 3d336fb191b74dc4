"""DP ranks of two processes each (attention TP 2), as the paper has four: 1P1D --tp 4 --dp 2."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio
from cluster_requests import cluster_options, generate, random_prompt, send_legs, start

from benchmarks.demo.virtual_cluster import parallel_flags
from sglang_sbs.cluster.local import LocalCluster
from sglang_sbs.wire import EndForward, decode_endforward
from sglang_sbs.wire.gangs import SIZED_RID_PREFIX, GangPart, gang_room
from tools.cpu_engine.engines import CpuEngines

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

DP_SIZE = 2
MEMBERS = 2
"""Number of a gang's requests per DP rank."""
GATE_MS = 200
"""Long, as a busy host may take its time."""
NEW_TOKENS = 4
ARRIVAL_TIMEOUT_S = 30


@dataclass
class Rig:
    """Engines that compute the model, and what their hooks say."""

    cluster: LocalCluster
    http: aiohttp.ClientSession
    messages: list[EndForward] = field(default_factory=list)

    async def send(self, gang: GangPart, rank: int, decode_rank: int, prompt: list[int]) -> Any:
        """Request id and tokens of one member, sent as a router does."""
        prefill, decode, _ = self.cluster.instances
        rid = SIZED_RID_PREFIX + uuid.uuid4().hex
        room = gang_room(gang, DP_SIZE, rank)
        _, reply = await send_legs(
            *(self.http, prefill, decode, prompt, NEW_TOKENS, rank, decode_rank),
            rid=rid,
            bootstrap_room=room,
        )
        return rid, reply["output_ids"]

    async def started(self, rids: set[str]) -> dict[str, int]:
        """The pass that each was in first."""
        async with asyncio.timeout(ARRIVAL_TIMEOUT_S):
            while True:
                passes = {
                    request.rid: message.forward_id
                    for message in self.messages
                    for request in message.started
                }
                if rids <= passes.keys():
                    return {rid: passes[rid] for rid in rids}
                await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    context = zmq.asyncio.Context()
    router = context.socket(zmq.SUB)
    router.setsockopt(zmq.SUBSCRIBE, b"")
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        options = cluster_options(
            tmp_path_factory,
            "attention-tp",
            cpu=CpuEngines(),
            unified_instances=1,
            engine_flags=[*parallel_flags(DP_SIZE, 2), "--chunked-prefill-size", "1024"],
            environment={
                **os.environ,
                "SGLANG_SBS_ROUTERS": f"tcp://127.0.0.1:{port}",
                "SGLANG_SBS_GANG_GATE_MS": str(GATE_MS),
            },
        )
        async with (
            start(options) as cluster,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http,
        ):
            running = Rig(cluster, http)

            async def collect() -> None:
                while True:
                    running.messages.append(decode_endforward(await router.recv_multipart()))

            collector = asyncio.create_task(collect())
            yield running
            collector.cancel()
    finally:
        router.close(0)
        context.term()


async def test_gangs_start_whole_and_their_tokens_are_those_of_one_engine(rig: Rig) -> None:
    """Every pair of a prefill and a decode DP rank has its share."""
    unified = rig.cluster.instances[-1]
    for tag in range(3):
        part = GangPart(tag, MEMBERS, DP_SIZE)
        prompts = [random_prompt(100 * tag + number, 60 + 40 * number) for number in range(4)]
        answers = await asyncio.gather(
            *(
                rig.send(part, number % DP_SIZE, number // DP_SIZE, prompt)
                for number, prompt in enumerate(prompts)
            )
        )
        expected = [await generate(rig.http, unified.url, prompt, NEW_TOKENS) for prompt in prompts]
        assert [tokens for _, tokens in answers] == [answer["output_ids"] for answer in expected]
        passes = await rig.started({rid for rid, _ in answers})
        assert len(passes) == MEMBERS * DP_SIZE
        assert len(set(passes.values())) == 1, f"a batch was split: {passes}"


async def test_one_process_of_each_dp_rank_sends_endforward(rig: Rig) -> None:
    """Two that speak for a rank would number their messages each on its own."""
    numbers: dict[tuple[str, int], list[int]] = defaultdict(list)
    for message in rig.messages:
        numbers[message.role, message.dp_rank].append(message.seq)
        assert message.hook_errors == 0
    roles = ("prefill", "decode", "null")
    assert numbers.keys() == {(role, rank) for role in roles for rank in range(DP_SIZE)}
    for seen in numbers.values():
        assert seen == list(range(seen[0], seen[0] + len(seen)))
