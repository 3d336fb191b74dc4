"""Engines with SGLang's Rust server: an address per DP rank, or a clear word where that fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from router_harness import Cluster, cluster, options_for, until
from rust_mock_engine import RustMockEngine

from sglang_sbs.router.options.config import BreakerConfig
from sglang_sbs.router.processes.mirrored_registry import MirroredRegistry, state_of
from sglang_sbs.router.schedulers import OwnScheduler
from sglang_sbs.router.server import RouterServer
from sglang_sbs.router.signals.endforward_listener import EndForwardListener
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import (
    UnusableWorker,
    WorkerInfo,
    check_rank_server,
    parse_server_info,
    server_url,
)
from sglang_sbs.router.workers.worker import Worker, WorkerEvents
from sglang_sbs.scheduling.events import LoadPolled
from sglang_sbs.wire import EndForward, encode_endforward
from tools.stand_ins.mock_engine import Behaviour, MockEngine

RUST: dict[str, Any] = {"kind": RustMockEngine}


def ranks_of(system: Cluster) -> set[tuple[int, int]]:
    """The pairs of DP ranks that answered requests, by the addresses these came to."""
    (prefill,), (decode,) = system.prefill, system.decode
    assert isinstance(prefill, RustMockEngine)
    assert isinstance(decode, RustMockEngine)
    at_decode = {record.rid: decode.rank_of(record) for record in decode.requests}
    return {(prefill.rank_of(record), at_decode[record.rid]) for record in prefill.requests}


async def test_each_leg_goes_to_the_address_of_its_rank() -> None:
    async with cluster(**RUST, decode_dp=3) as system:
        async with asyncio.timeout(10):
            answers = await asyncio.gather(*(system.generate(text="x") for _ in range(6)))
        assert [status for status, _ in answers] == [200] * 6
        # The scheduler of this harness takes ranks in turn: all pairs of 2 x 3.
        assert ranks_of(system) == {(p, d) for p in range(2) for d in range(3)}
        system.check_books()


async def test_decode_is_sent_the_port_that_the_registry_is_on() -> None:
    """The command line of this harness says 9000; an engine with the Rust server has none there."""
    async with cluster(**RUST) as system:
        await system.generate(text="x")
        assert system.decode[0].requests[0].body["bootstrap_port"] == system.prefill[0].port
        (worker,) = system.server.registry.of_role("prefill")
        assert "not at 9000" in worker.problems["bootstrap"]


async def test_a_client_that_leaves_is_aborted_at_the_rank_that_has_its_request() -> None:
    async with cluster(**RUST) as system:
        system.prefill[0].gate.close()
        for _ in range(2):  # one of them at a rank other than 0, on each side
            task = asyncio.create_task(system.generate(text="x"))
            await asyncio.gather(*(e.received(1) for e in (system.prefill[0], system.decode[0])))
            task.cancel()
            for engine in (system.prefill[0], system.decode[0]):
                async with asyncio.timeout(10):
                    await engine.requests[-1].aborted.wait()
                engine.requests.clear()
        await system.settled()


async def test_a_request_that_somebody_aborts_on_an_engine_is_tried_again() -> None:
    """The Rust server answers 499 then; to this router's client that would be his own doing."""
    async with cluster(**RUST) as system:
        system.decode[0].behaviours.append(Behaviour(status=499, message="client disconnected"))
        status, _ = await system.generate(text="x")
        assert status == 200
        assert len(system.decode[0].requests) == 2


async def test_what_is_asked_of_an_instance_is_asked_of_every_rank() -> None:
    async with cluster(**RUST) as system:
        async with system.post("/flush_cache", {}) as response:
            answer = await response.json()
        assert answer["workers_flushed"] == 2
        assert [e.hits["/flush_cache"] for e in system.prefill + system.decode] == [2, 4]
        async with system.get("/v1/loads") as response:
            prefill, decode = (await response.json())["loads"]
        assert [row["num_running_reqs"] for row in prefill["details"]] == [0, 1]
        assert [row["num_running_reqs"] for row in decode["details"]] == [0, 1, 2, 3]
        async with system.get("/workers") as response:
            assert [w["rust_server"] for w in (await response.json())["workers"]] == [True, True]


async def test_loads_are_polled_of_every_rank() -> None:
    async with cluster(**RUST, real=False) as system:
        system.prefill[0].gate.close()
        task = asyncio.create_task(system.generate(text="x"))
        await until(lambda: len(system.scheduler.of(LoadPolled)) > 1)
        polled = {event.instance: event for event in system.scheduler.of(LoadPolled)}
        assert polled[system.decode[0].url].running_requests == [0, 1, 2, 3]
        system.prefill[0].gate.open()
        assert (await task)[0] == 200


async def test_a_rank_that_dies_alone_takes_its_instance_out() -> None:
    monitor = {"health_interval_s": 0.05, "failure_threshold": 1}
    async with cluster(**RUST, monitor=monitor) as system:
        engine, (worker,) = system.prefill[0], system.server.registry.of_role("prefill")
        assert isinstance(engine, RustMockEngine)
        engine.lost_ranks.add(1)
        await until(lambda: not worker.usable)
        assert f"http://127.0.0.1:{engine.port + 1}" in worker.problems["unhealthy"]


class TwoNodes(RustMockEngine):
    """One DP rank on each."""

    nodes = 2


def heartbeat(worker: Worker, boot_id: str, rank: int = 1) -> list[bytes]:
    place = {"role": worker.role, "dp_rank": rank, "dp_size": 2, "seq": 0, "kind": "heartbeat"}
    return encode_endforward(EndForward(instance_id=worker.url, boot_id=boot_id, **place))


def listener(system: Cluster) -> EndForwardListener:
    schedulers = system.server.scheduler
    assert isinstance(schedulers, OwnScheduler)
    return schedulers._watch._listener


def key_file(folder: Path) -> str:
    path = folder / "key"
    path.write_text("0123456789abcdef" * 4)
    return str(path)


async def test_ranks_on_other_nodes_are_where_their_endforward_comes_from(tmp_path: Path) -> None:
    flags = ("--sbs-endforward-key-file", key_file(tmp_path))
    async with cluster(*flags, kind=TwoNodes, decode_dp=2, wait=False) as system:
        await until(lambda: all(w.problems.get("unusable") for w in system.server.registry))
        for worker in system.server.registry:
            assert "SGLANG_SBS_ENDFORWARD_KEY_FILE" in worker.problems["unusable"]
            assert not worker.usable
            listener(system).receive(heartbeat(worker, f"node-1 {worker.role}"), "::ffff:127.0.0.2")
        await until(lambda: all(w.usable for w in system.server.registry))
        answers = await asyncio.gather(*(system.generate(text="x") for _ in range(8)))
        assert [status for status, _ in answers] == [200] * 8
        # The scheduler of this harness takes pairs (d, d + 1) in turn.
        assert ranks_of(system) == {(0, 1), (1, 0)}
        (worker,) = system.server.registry.of_role("prefill")
        port = system.prefill[0].port
        assert worker.server_urls == [f"http://127.0.0.1:{port}", f"http://127.0.0.2:{port}"]
        system.check_books()


async def test_without_a_key_nobody_can_have_requests_sent_to_himself() -> None:
    async with cluster(kind=TwoNodes, decode_dp=2, wait=False) as system:
        (worker,) = system.server.registry.of_role("prefill")
        await until(lambda: worker.problems.get("unusable"))
        listener(system).receive(heartbeat(worker, "node-1"), "127.0.0.2")
        assert worker.boot.by_rank == {1: "node-1"}, "its report is booked"
        assert worker.reports_from == {}


async def test_an_address_that_means_another_machine_elsewhere_is_not_learned(
    tmp_path: Path,
) -> None:
    """An engine that speaks to a scheduler beside it is elsewhere for front ends."""
    flags = ("--sbs-endforward-key-file", key_file(tmp_path))
    async with cluster(*flags, wait=False) as system:
        (worker,) = system.server.registry.of_role("prefill")
        worker.url = "http://10.0.0.1:30000"
        receiver = listener(system)
        receiver._bind = lambda report: worker  # type: ignore[method-assign,assignment]
        receiver.receive(heartbeat(worker, "b"), "127.0.0.1")
        assert worker.reports_from == {}
        receiver.receive(heartbeat(worker, "b"), "::ffff:10.0.0.2")
        assert worker.reports_from == {1: "10.0.0.2"}


async def test_an_engine_whose_ranks_moved_to_a_second_node_is_unusable_and_says_why() -> None:
    """Without the plugin no boot id tells of the restart, and nothing of where the rank is now."""
    at_once = {"nodes_report_s": 0.0}
    async with cluster(kind=TwoNodes, decode_dp=2, wait=False, monitor=at_once) as system:
        (worker,) = system.server.registry.of_role("prefill")
        await until(lambda: worker.problems.get("unusable"))
        worker.problems.clear()
        worker.info = WorkerInfo(dp_size=2)  # as it was reported on one node
        await until(lambda: "DP rank 1" in worker.problems.get("unusable", ""))


async def test_where_a_rank_was_is_forgotten_with_its_boot(tmp_path: Path) -> None:
    flags = ("--sbs-endforward-key-file", key_file(tmp_path))
    async with cluster(*flags, kind=TwoNodes, decode_dp=2, wait=False) as system:
        (worker,) = system.server.registry.of_role("prefill")
        await until(lambda: worker.problems.get("unusable"))
        for rank in (0, 1):
            listener(system).receive(heartbeat(worker, "old", rank), f"127.0.0.{1 + rank}")
        await until(lambda: worker.usable)
        worker.last_report_s.clear()  # it has been quiet for long
        listener(system).receive(heartbeat(worker, "new"), "127.0.0.3")
        assert (worker.reports_from, worker.usable) == ({1: "127.0.0.3"}, False)


async def test_an_engine_that_comes_back_on_other_nodes_is_followed_there(tmp_path: Path) -> None:
    flags = ("--sbs-endforward-key-file", key_file(tmp_path))
    often: dict[str, Any] = {"kind": TwoNodes, "monitor": {"health_interval_s": 0.05}}
    async with cluster(*flags, **often, decode=0, sbs_block=True, wait=False) as system:
        (worker,), engine = system.server.registry, system.prefill[0]
        await until(lambda: worker.problems.get("unusable"))
        listener(system).receive(heartbeat(worker, engine.boot_id), "127.0.0.9")
        await until(lambda: "http://127.0.0.9" in worker.problems["unusable"])
        listener(system).receive(heartbeat(worker, engine.boot_id), "127.0.0.2")
        await until(lambda: worker.usable)
        engine.boot_id = "new"
        listener(system).receive(heartbeat(worker, "new"), "127.0.0.3")  # not believed as yet
        await until(lambda: worker.info is None)
        listener(system).receive(heartbeat(worker, "new"), "127.0.0.2")
        await until(lambda: worker.usable)


@pytest.mark.parametrize(
    ("ranks", "nodes", "places"),
    [
        (4, 2, ["p:30", "p:31", "n1:30", "n1:31"]),
        (2, 4, ["p:30", "n2:30"]),
        (3, 2, ["p:30", "p:31", "n1:30"]),
    ],
)
def test_each_node_counts_its_ports_from_the_first(
    ranks: int, nodes: int, places: list[str]
) -> None:
    """``RustServer.launch`` counts the same way (``srt/rust_server/server.py``)."""
    hosts = tuple(f"n{node}" for node in range(1, nodes))
    info = WorkerInfo(dp_size=ranks, nodes=nodes, rust_server=True, node_hosts=hosts)
    found = [server_url("http://p:30", info, rank) for rank in range(ranks)]
    assert found == [f"http://{place}" for place in places]


async def test_an_old_engine_and_one_with_the_rust_server_serve_together() -> None:
    async with cluster(kind=RustMockEngine, decode=0, wait=False) as system:
        old = MockEngine("decode", rooms=system.prefill[0]._rooms)
        await old.start()
        try:
            await system.server.scheduler.add_worker(old.url, "decode", None)
            await until(lambda: sum(w.usable for w in system.server.registry) == 2)
            answers = await asyncio.gather(*(system.generate(text="x") for _ in range(4)))
            assert [status for status, _ in answers] == [200] * 4
            assert {r.body["routed_dp_rank"] for r in old.requests} == {0, 1}
        finally:
            await old.stop()


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        (lambda: RustMockEngine("prefill", lost_ranks=[1]), "DP rank 1 does not serve at"),
        (
            lambda: RustMockEngine("prefill", server_info={"attn_dp_size": 4096}),
            "DP rank 2 does not serve at",
        ),
        (lambda: TwoNodes("prefill"), "DP rank 1 serves HTTP on node 1"),
        (
            lambda: RustMockEngine("prefill", server_info={"deployment_info": {}}),
            "does not report its number of DP ranks",
        ),
    ],
)
async def test_a_form_that_cannot_work_is_named_and_gets_nothing(engine: Any, problem: str) -> None:
    prefill, decode = engine(), RustMockEngine("decode")
    await prefill.start()
    await decode.start()
    server = RouterServer(options_for([prefill], [decode]), None)
    await server.start()
    try:
        registry = server.registry
        (worker,) = registry.of_role("prefill")
        await until(lambda: registry.usable("decode") and worker.problems.get("unusable"))
        assert problem in worker.problems["unusable"]
        assert "SGLANG_RUST_SERVER" in worker.problems["unusable"]
        assert not worker.usable
        url = f"http://127.0.0.1:{server.port}/generate"
        async with (
            aiohttp.ClientSession() as client,
            client.post(url, json={"text": "x"}) as answer,
        ):
            assert answer.status == 503
            assert answer.headers["X-SMG-Error-Code"] == "no_prefill_servers"
    finally:
        await server.stop(grace_s=0.0)
        await prefill.stop()
        await decode.stop()
    assert prefill.requests == []


def info_of(rank: int, **fields: Any) -> dict[str, Any]:
    deployment = {"dp_rank": rank, "dp_size": 2, "nnodes": 1, **fields}
    return {"version": "0.5.23", "attn_dp_size": 2, "deployment_info": deployment}


def test_the_rust_server_is_not_asked_for_cached_details() -> None:
    assert not parse_server_info(info_of(0), "prefill").cached_details


def test_the_address_of_another_rank_is_no_worker() -> None:
    with pytest.raises(UnusableWorker, match="DP rank 1 of an instance serves here"):
        parse_server_info(info_of(1), "prefill")


def test_a_rank_over_several_nodes_has_one_address() -> None:
    assert parse_server_info(info_of(0, dp_size=1, nnodes=2), "prefill").rust_server


@pytest.mark.parametrize("data", [{"attn_dp_size": 2}, info_of(0), info_of(1) | {"sbs": {}}])
def test_what_is_not_the_rank_asked_for_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(UnusableWorker):
        check_rank_server(data, 1, "boot")


def test_the_rank_asked_for_is_recognised() -> None:
    check_rank_server(info_of(1) | {"sbs": {"boot_id": "boot"}}, 1, "boot")
    check_rank_server(info_of(1), 1, "")


def test_the_old_mode_is_recognised_without_the_plugin() -> None:
    assert not parse_server_info({"version": "0.5.23", "attn_dp_size": 2}, "prefill").rust_server


def test_a_front_end_knows_the_addresses_too() -> None:
    own = Registry()
    worker = own.add("http://p:30000", "prefill", 30000)
    own.described(worker, parse_server_info(info_of(0), "prefill"))
    mirror = MirroredRegistry(WorkerEvents(), BreakerConfig())
    mirror.follow([state_of(worker, 0.0)])
    (copy,) = mirror
    assert copy.server_urls == ["http://p:30000", "http://p:30001"]
