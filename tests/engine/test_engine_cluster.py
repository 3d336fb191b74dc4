"""The hook inside real SGLang engines: one prefill and one decode instance, two DP ranks each.

The engines run on the virtual GPU: no model is computed, everything else is SGLang's own. What a
listening router would get is collected and compared with what was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from sglang_sbs.cluster.local import LocalCluster
from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE, ClusterOptions, plan_cluster
from sglang_sbs.cluster.ports import free_port_blocks
from sglang_sbs.wire import EndForward, decode_endforward
from tools.cpu_engine.engines import CpuEngines
from tools.cpu_engine.tiny_model import VOCAB_SIZE, cached_tiny_model
from tools.cpu_engine.virtual_gpu import VirtualGpuCost

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session")]

CHUNK_TOKENS = 512
"""Per rank: half of --chunked-prefill-size."""
DECODE_INTERVAL_MS = 400
"""Many decode steps of 20 ms, also on a slow machine."""
STARTUP_TIMEOUT_S = 600
ARRIVAL_TIMEOUT_S = 30


@dataclass
class Rig:
    cluster: LocalCluster
    http: aiohttp.ClientSession
    messages: list[EndForward] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def of(self, role: str, rank: int, kind: str | None = None) -> list[EndForward]:
        return [
            m
            for m in self.messages
            if (m.role, m.dp_rank) == (role, rank) and kind in (None, m.kind)
        ]

    def last(self, role: str, rank: int) -> EndForward:
        return self.of(role, rank)[-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(ARRIVAL_TIMEOUT_S):
            while not condition():
                self.arrived.clear()
                await self.arrived.wait()

    async def quiet(self) -> None:
        """Both instances idle, and they said so."""

        def all_idle() -> bool:
            return all(
                bool(self.of(role, rank))
                and self.last(role, rank).idle
                and self.last(role, rank).kv_transfer_requests == 0
                for role in ("prefill", "decode")
                for rank in range(2)
            )

        await self.until(all_idle)

    async def send(self, rank: int, prompt_tokens: int, new_tokens: int = 2) -> str:
        """One request through both legs on ``rank`` of each; its rid."""
        prefill, decode = self.cluster.instances
        rid = uuid.uuid4().hex
        body = {
            "rid": rid,
            "input_ids": [random.randrange(3, VOCAB_SIZE) for _ in range(prompt_tokens)],
            "sampling_params": {"max_new_tokens": new_tokens, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": random.getrandbits(60) * 2 + rank,
            "disagg_prefill_dp_rank": rank,
            "routed_dp_rank": rank,
        }

        async def leg(url: str) -> None:
            async with self.http.post(f"{url}/generate", json=body) as response:
                assert response.status == 200, await response.text()

        await asyncio.gather(leg(prefill.url), leg(decode.url))
        return rid


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    context = zmq.asyncio.Context()
    router = context.socket(zmq.SUB)
    router.setsockopt(zmq.SUBSCRIBE, b"")
    port = router.bind_to_random_port("tcp://127.0.0.1")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_SBS_")}
    options = ClusterOptions(
        model_path=str(cached_tiny_model()),
        engine_flags=(
            *("--tp", "2", "--dp", "2", "--enable-dp-attention"),
            *("--chunked-prefill-size", str(2 * CHUNK_TOKENS), "--disable-radix-cache"),
        ),
        cpu=CpuEngines(VirtualGpuCost()),
        log_dir=tmp_path_factory.mktemp("hook-cluster"),
        environment=environment
        | {
            "SGLANG_SBS_ROUTERS": f"tcp://localhost:{port}",
            "SGLANG_SBS_DECODE_INTERVAL_MS": str(DECODE_INTERVAL_MS),
        },
        with_router=False,
    )
    plan = plan_cluster(options, free_port_blocks(PORTS_PER_INSTANCE))
    try:
        async with (
            LocalCluster(plan, STARTUP_TIMEOUT_S) as cluster,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http,
        ):
            running = Rig(cluster, http)

            async def collect() -> None:
                while True:
                    running.messages.append(decode_endforward(await router.recv_multipart()))
                    running.arrived.set()

            collector = asyncio.create_task(collect())
            await running.send(0, 8)
            await running.quiet()
            yield running
            collector.cancel()
    finally:
        router.close(0)
        context.term()


async def test_every_rank_reports_every_prefill_pass(rig: Rig) -> None:
    start = [len(rig.of("prefill", rank, "forward")) for rank in range(2)]
    await asyncio.gather(*(rig.send(i % 2, 300 + 20 * i) for i in range(8)))
    await rig.quiet()
    forwards = [rig.of("prefill", rank, "forward")[start[rank] :] for rank in range(2)]
    ids = [[m.forward_id for m in messages] for messages in forwards]
    assert ids[0] == ids[1] == list(range(ids[0][0], ids[0][0] + len(ids[0])))
    for here, there in zip(*forwards, strict=True):
        assert here.tokens_per_rank == [here.extend_tokens, there.extend_tokens]
        assert here.tokens_per_rank == there.tokens_per_rank
    launched = [m.forward_id for m in rig.of("prefill", 0, "launch")]
    assert [i for i in launched if i >= ids[0][0]] == ids[0]


async def test_all_tokens_of_a_chunked_prompt_are_accounted_for(rig: Rig) -> None:
    before = rig.last("prefill", 1)
    start = len(rig.messages)
    await asyncio.gather(rig.send(1, 1300), rig.send(1, 200))
    await rig.quiet()
    news = [m for m in rig.messages[start:] if (m.role, m.dp_rank) == ("prefill", 1)]
    forwards = [m for m in news if m.kind == "forward" and m.extend_tokens]
    assert sum(m.extend_tokens for m in forwards) == 1500
    assert max(m.extend_tokens for m in forwards) == CHUNK_TOKENS
    assert any(m.chunk_remainder_tokens for m in news)
    # At every end of a pass: accepted = computed + launched + queued, nothing twice.
    for m in forwards:
        assert m.accepted_tokens == m.computed_tokens + m.inflight_tokens + m.queued_tokens
    last = rig.last("prefill", 1)
    assert last.accepted_requests - before.accepted_requests == 2
    assert last.computed_tokens - before.computed_tokens == 1500


async def test_rids_are_named_by_the_rank_that_serves_them(rig: Rig) -> None:
    sent = [await rig.send(rank, 50) for rank in (0, 1, 1)]
    await rig.quiet()
    for role in ("prefill", "decode"):
        named = [{rid for m in rig.of(role, rank) for rid in m.rids} for rank in range(2)]
        assert sent[0] in named[0] - named[1]
        assert {sent[1], sent[2]} <= named[1] - named[0]


async def test_health_checks_are_not_accepted_requests(rig: Rig) -> None:
    prefill = rig.cluster.instances[0]
    before = rig.last("prefill", 0)
    async with rig.http.get(f"{prefill.url}/health_generate") as response:
        assert response.status == 200
    await rig.until(lambda: rig.last("prefill", 0).computed_tokens > before.computed_tokens)
    await rig.quiet()
    assert rig.last("prefill", 0).accepted_requests == before.accepted_requests


async def test_decode_reports_requests_and_kv_tokens_without_a_message_per_step(rig: Rig) -> None:
    start = len(rig.messages)
    await asyncio.gather(*(rig.send(0, 100, new_tokens=60) for _ in range(3)))
    await rig.quiet()
    news = [m for m in rig.messages[start:] if (m.role, m.dp_rank) == ("decode", 0)]
    busy = [m for m in news if m.running_requests == 3]
    assert busy
    assert all(300 < m.kv_tokens <= 480 for m in busy)
    assert all(m.extend_tokens == 0 for m in news)
    forwards = [m for m in news if m.kind == "forward"]
    passes = forwards[-1].forward_id - forwards[0].forward_id
    assert len(forwards) < 0.5 * passes


async def test_aborted_requests_are_counted(rig: Rig) -> None:
    prefill, decode = rig.cluster.instances
    before = [rig.last(role, 0).aborted_requests for role in ("prefill", "decode")]
    sending = asyncio.create_task(rig.send(0, 100, new_tokens=500))
    await rig.until(lambda: rig.last("decode", 0).running_requests == 1)
    async with rig.http.post(f"{decode.url}/abort_request", json={"abort_all": True}) as response:
        assert response.status == 200
    await sending
    await rig.quiet()
    after = [rig.last(role, 0).aborted_requests for role in ("prefill", "decode")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 1]
    assert prefill.url != decode.url


async def test_an_idle_engine_beats_and_reports_no_errors(rig: Rig) -> None:
    start = len(rig.messages)
    await rig.until(lambda: len(rig.messages) >= start + 8)
    for message in rig.messages:
        assert message.hook_errors == 0
        assert message.sglang_version
    for role in ("prefill", "decode"):
        for rank in range(2):
            seqs = [m.seq for m in rig.of(role, rank)]
            assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))


async def test_server_info_names_the_boot_of_the_messages(rig: Rig) -> None:
    boots = []
    for instance in rig.cluster.instances:
        async with rig.http.get(f"{instance.url}/server_info") as response:
            sbs = (await response.json())["sbs"]
        role = str(instance.role)
        assert {m.boot_id for rank in range(2) for m in rig.of(role, rank)} == {sbs["boot_id"]}
        assert sbs["wire_version"] == 1
        boots.append(sbs["boot_id"])
    # Two starts, two ids.
    assert len(set(boots)) == 2


def gloo_threads(process_groups: set[int]) -> list[int]:
    """The number of Gloo threads in each scheduler process of these process groups."""
    counts = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if os.getpgid(int(process.name)) not in process_groups:
                continue
            if (process / "cmdline").read_text().startswith("sglang::scheduler"):
                names = [(task / "comm").read_text() for task in process.glob("task/*")]
                counts.append(names.count("gloo_tcp_loop\n"))
    return counts


async def test_gloo_groups_of_a_scheduler_share_one_thread(rig: Rig) -> None:
    assert gloo_threads({process.pid for process in rig.cluster.processes}) == [1] * 4
