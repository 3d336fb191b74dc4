"""Engines of each release get ranks as that release takes them (mock engines that insist on it)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_harness import TIMEOUT_S, options_for, until
from versioned_engine import RankedRooms, VersionedEngine

from sglang_sbs.router.server import RouterServer
from sglang_sbs.router.workers.rank_contract import (
    decode_members,
    is_coupled,
    pick_bootstrap_room,
    prefill_members,
)
from sglang_sbs.router.workers.server_info import parse_server_info
from sglang_sbs.scheduling import Scheduler
from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.wire.gangs import GangPart, part_of_room
from tools.stand_ins.mock_engine import MockEngine

REQUESTS = 48


@dataclass
class OldCluster:
    server: RouterServer
    scheduler: Scheduler
    prefill: VersionedEngine
    decode: VersionedEngine
    client: aiohttp.ClientSession
    url: str

    async def generate(self, stream: bool = False) -> int:
        body = {"text": "hello", "stream": stream}
        async with self.client.post(self.url + "/generate", json=body) as response:
            await response.read()
            return response.status

    def warnings(self) -> str:
        return " ".join(
            text for worker in self.server.registry for text in worker.problems.values()
        )


@asynccontextmanager
async def old_cluster(
    version: str,
    *,
    prefill_dp: int = 2,
    decode_dp: int = 4,
    method: str | None = None,
    policy: str = "round_robin",
) -> AsyncIterator[OldCluster]:
    rooms = RankedRooms(prefill_dp)
    prefill = VersionedEngine("prefill", version, rooms, dp_size=prefill_dp)
    decode = VersionedEngine(
        "decode", version, rooms, dp_size=decode_dp, load_balance_method=method
    )
    engines: list[MockEngine] = [prefill, decode]
    for engine in engines:
        await engine.start()
    scheduler = Scheduler(SchedulerConfig(policy=policy))
    server = RouterServer(options_for([prefill], [decode], "--disable-retries"), scheduler)
    await server.start()
    client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
    try:
        await until(lambda: server.registry.ready)
        url = f"http://127.0.0.1:{server.port}"
        yield OldCluster(server, scheduler, prefill, decode, client, url)
    finally:
        await client.close()
        await server.stop(grace_s=0.0)
        for engine in engines:
            await engine.stop()


@pytest.mark.parametrize(
    ("version", "method"),
    [
        ("0.5.6.post2", None),
        ("0.5.6.post2", "shortest_queue"),
        ("0.5.8.post1", None),
        ("0.5.8.post1", "follow_bootstrap_room"),
        ("0.5.9", None),
        ("0.5.9", "follow_bootstrap_room"),
        ("0.5.9", "total_tokens"),
        ("0.5.10.post1", None),
        ("0.5.16", None),
        ("0.5.23", None),
    ],
)
@pytest.mark.parametrize(("prefill_dp", "decode_dp"), [(2, 4), (4, 2), (2, 3)])
async def test_no_release_is_asked_for_ranks_it_cannot_serve(
    version: str, method: str | None, prefill_dp: int, decode_dp: int
) -> None:
    async with old_cluster(version, prefill_dp=prefill_dp, decode_dp=decode_dp, method=method) as c:
        statuses = await asyncio.gather(*(c.generate(i % 2 == 0) for i in range(REQUESTS)))
        assert (c.prefill.faults, c.decode.faults) == ([], [])
        assert set(statuses) == {200}
        assert set(c.prefill.ranks) == set(range(prefill_dp))
        assert set(c.decode.ranks) == set(range(decode_dp))


@pytest.mark.parametrize("method", [None, "follow_bootstrap_room"])
@pytest.mark.parametrize(("prefill_dp", "decode_dp"), [(1, 4), (2, 1)])
async def test_a_single_rank_on_one_side_is_no_special_case(
    method: str, prefill_dp: int, decode_dp: int
) -> None:
    async with old_cluster("0.5.9", prefill_dp=prefill_dp, decode_dp=decode_dp, method=method) as c:
        assert [await c.generate() for _ in range(8)] == 8 * [200]
        assert (c.prefill.faults, c.decode.faults) == ([], [])


@pytest.mark.parametrize("version", ["0.5.10", "0.5.23"])
async def test_where_ranks_can_be_chosen_requests_run_where_the_scheduler_put_them(
    version: str,
) -> None:
    async with old_cluster(version) as c:
        c.decode.gate.close()
        work = [asyncio.create_task(c.generate()) for _ in range(REQUESTS)]
        await c.decode.gate.arrived(REQUESTS)
        books = c.scheduler.decode[c.decode.url]
        believed = {rid: rank for rank, state in enumerate(books.ranks) for rid in state.requests}
        assert believed == c.decode.rank_of
        assert len(believed) == REQUESTS
        c.decode.gate.open()
        assert set(await asyncio.gather(*work)) == {200}


async def test_an_engine_that_chooses_is_reported_and_its_requests_leave_the_books() -> None:
    async with old_cluster("0.5.9") as c:
        assert "chooses decode DP ranks itself" in c.warnings()
        c.decode.gate.close()
        work = [asyncio.create_task(c.generate()) for _ in range(8)]
        await c.decode.gate.arrived(8)
        books = c.scheduler.decode[c.decode.url]
        assert sum(len(state.requests) for state in books.ranks) == 8
        c.decode.connect_publisher(c.server.endforward_endpoint)
        for rank in range(4):
            rids = [r.body["rid"] for r in c.decode.requests[rank::4]]
            report = c.decode.report(rank, kind="heartbeat", rids=rids, instance_id=c.decode.url)

            def received(rank: int = rank, report=report) -> bool:
                c.decode.publish(report)
                return books.ranks[rank].source.reports

            await until(received)
        c.decode.gate.open()
        assert set(await asyncio.gather(*work)) == {200}
        assert all(not state.requests for state in books.ranks)


async def test_bodies_have_the_fields_of_their_release() -> None:
    async with old_cluster("0.5.9") as c:
        assert await c.generate() == 200
        prefill, decode = c.prefill.requests[0].body, c.decode.requests[0].body
        assert prefill["data_parallel_rank"] == prefill["bootstrap_room"] % 2
        for body in (prefill, decode):
            assert not {"routed_dp_rank", "disagg_prefill_dp_rank"} & set(body)
        assert "data_parallel_rank" not in decode


def test_a_named_decode_rank_would_break_a_coupled_pair() -> None:
    """The mock engines exist to show this: the fields of 0.5.10 under the old name fail."""
    rooms = RankedRooms(2)
    decode = VersionedEngine("decode", "0.5.9", rooms, dp_size=4)
    rooms.prefill_rank[6] = 0
    record = type("Record", (), {"body": {"bootstrap_room": 6, "data_parallel_rank": 3}})
    assert "rank 3; rank 0 has the request" in decode._take(record)  # type: ignore[arg-type]


@given(st.integers(1, 64), st.data())
def test_a_room_says_prefills_rank_and_the_gang_beside_it(p: int, data: st.DataObject) -> None:
    prefill_rank = data.draw(st.integers(0, p - 1))
    part = GangPart(tag=77, members=data.draw(st.integers(1, 100)), ranks=3)
    for gang in (None, part):
        room = pick_bootstrap_room(prefill_rank, p, gang)
        assert 0 <= room < 2**63
        assert room % p == prefill_rank
    assert part_of_room(room) == part


def test_what_can_be_chosen_follows_from_release_and_method() -> None:
    assert not any(map(is_coupled, (None, (0, 0, 0), (0, 5, 10))))
    assert is_coupled((0, 5, 9))
    info = parse_server_info({"version": "0.5.9", "load_balance_method": "round_robin"}, "prefill")
    assert (info.coupled, info.warnings) == (True, ())


def test_rank_fields() -> None:
    assert prefill_members(1, coupled=True) == {"data_parallel_rank": 1}
    assert prefill_members(1, coupled=False) == {"disagg_prefill_dp_rank": 1, "routed_dp_rank": 1}
    assert decode_members(1, 3, coupled=True) == {}
    assert decode_members(1, 3, coupled=False) == {"disagg_prefill_dp_rank": 1, "routed_dp_rank": 3}
