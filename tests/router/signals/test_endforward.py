"""EndForward: whose message it is, and what happens to those that are nobody's."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from typing import Any

import msgspec
import pytest
import zmq
from endforward_setup import Setup, publish_until
from hypothesis import given
from hypothesis import strategies as st
from router_harness import cluster, until

from sglang_sbs.router.signals import endforward_listener, peer_limit
from sglang_sbs.router.signals.endforward_listener import publisher_endpoints
from sglang_sbs.router.workers.server_info import SbsBlock, WorkerInfo
from sglang_sbs.scheduling.events import ForwardEnded, InstanceDown, InstanceUp, LoadPolled
from sglang_sbs.wire import TOPIC, EndForward, encode_endforward
from sglang_sbs.wire.endforward import Accepted
from tools.stand_ins.mock_engine import MockEngine


def test_by_instance_id_also_under_another_name_of_the_host() -> None:
    setup = Setup()
    setup.receive(MockEngine("prefill"), instance_id="http://10.0.0.1:30000/")
    setup.receive(MockEngine("decode"), instance_id="127.0.0.1:30001")
    assert setup.bound() == [setup.prefill.url, setup.decode.url]


def test_by_echoed_rids_then_by_boot_id() -> None:
    setup = Setup()
    engine = MockEngine("prefill")
    setup.receive(engine, 0)
    assert setup.bound() == []
    setup.owners["r1", "prefill"] = setup.prefill.url
    setup.owners["r1", "decode"] = setup.decode.url
    setup.receive(engine, 1, rids=["unknown", "r1"])
    setup.receive(engine, 0)
    assert setup.bound() == [setup.prefill.url] * 2
    assert setup.listener.counts == {"unbound": 1, "bound": 2}


def test_by_the_boot_id_of_server_info() -> None:
    setup = Setup()
    engine = MockEngine("decode")
    setup.listener.described(setup.decode, WorkerInfo(sbs=SbsBlock(boot_id=engine.boot_id)))
    setup.receive(engine, 0)
    assert setup.bound() == [setup.decode.url]


def test_a_strangers_words_are_a_short_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup()
    report = msgspec.to_builtins(MockEngine("prefill").report())
    report[2] = "a role\n" * 10_000
    setup.listener.receive([TOPIC, bytes(8), msgspec.msgpack.encode(report)])
    (record,) = caplog.records
    assert "a role" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 500


def test_garbage_is_counted_never_raised() -> None:
    setup = Setup()
    good = encode_endforward(MockEngine("prefill").report())
    for frames in ([], [b"x"], [good[0], good[1], b"\xff\xff"], [b"load", good[1], good[2]]):
        setup.listener.receive(frames)
    bad_rank = MockEngine("prefill").report(0, dp_rank=5)
    setup.listener.receive(encode_endforward(bad_rank))
    setup.receive(MockEngine("prefill"), instance_id="not a url ://")
    assert setup.listener.counts == {"malformed": 5, "unbound": 1}
    assert setup.events == []


@pytest.mark.parametrize(
    "fields",
    [
        {"waiting_tokens": -5},
        {"kv_tokens": 2**62},
        {"accepted_tokens": -1},
        {"forward_s": float("nan")},
        {"forward_s": 1e300},
        {"age_s": float("-inf")},
        {"age_s": 1e9},
        {"launch_s": -1.0},
        {"tokens_per_rank": [1, -1]},
        {"tokens_per_rank": [0] * 10_000},
        {"rids": ["r"] * 2000},
        {"dp_size": 10**6},
        {"boot_id": ""},
        {"boot_id": "b" * 1000},
        {"instance_id": "x" * 1000},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_no_engine_can_mean_is_dropped_and_counted(fields: dict[str, Any]) -> None:
    setup = Setup()
    setup.receive(MockEngine("prefill"), **{"instance_id": setup.prefill.url} | fields)
    assert setup.listener.counts == {"implausible": 1}
    assert setup.events == []


def test_reports_of_an_engine_without_a_pass_for_a_week_are_received() -> None:
    setup = Setup()
    for rank, kind in enumerate(("heartbeat", "idle")):
        fields = {"instance_id": setup.prefill.url, "kind": kind, "age_s": 7 * 86_400.0}
        setup.receive(MockEngine("prefill"), rank, **fields)
    assert setup.bound() == [setup.prefill.url] * 2


@given(data=st.binary(max_size=200))
def test_any_bytes_behind_the_topic_are_survived(data: bytes) -> None:
    setup = Setup()
    setup.listener.receive([TOPIC, b"12345678", data])
    assert setup.events == []


@given(data=st.data())
def test_flipped_bytes_in_a_good_message_are_survived(data: Any) -> None:
    setup = Setup()
    report = MockEngine("prefill").report(0, instance_id=setup.prefill.url, rids=["a", "b"])
    frames = encode_endforward(report)
    body = bytearray(frames[2])
    for position in data.draw(st.lists(st.integers(0, len(body) - 1), min_size=1, max_size=4)):
        body[position] = data.draw(st.integers(0, 255))
    setup.listener.receive([frames[0], frames[1], bytes(body)])
    assert sum(setup.listener.counts.values()) == 1


def test_deeply_nested_surplus_fields_are_survived() -> None:
    setup = Setup()
    setup.listener.receive([TOPIC, b"12345678", b"\xdc\x00\x40" + b"\x91" * 100_000])
    assert setup.listener.counts == {"malformed": 1}


def test_senders_nobody_knows_fill_neither_log_nor_memory(caplog: Any) -> None:
    setup = Setup()
    for _ in range(500):
        setup.receive(MockEngine("prefill"), instance_id="http://elsewhere:1")
    assert setup.listener.counts == {"unbound": 500}
    assert len([r for r in caplog.records if "elsewhere" in r.getMessage()]) <= 64


def test_where_binding_publishers_are_found() -> None:
    url = "http://10.0.0.7:30000"
    assert publisher_endpoints(url, "tcp://*:7700", 2) == [
        "tcp://10.0.0.7:7700",
        "tcp://10.0.0.7:7701",
    ]
    assert publisher_endpoints("http://[::1]:3", "tcp://0.0.0.0:7700", 1) == ["tcp://[::1]:7700"]
    for elsewhere in ("tcp://192.168.0.1:7700", "tcp://metadata.internal:7700", "tcp://[::2]:7700"):
        assert publisher_endpoints(url, elsewhere, 1) == publisher_endpoints(url, "tcp://*:7700", 1)
    nonsense = ("ipc:///tmp/x", "tcp://*:0", "tcp://*:65536", "tcp://*:²", "tcp://*:" + "7" * 5000)
    for bind in nonsense:
        assert publisher_endpoints(url, bind, 1) == []
    assert publisher_endpoints(url, "tcp://*:65535", 2) == []


async def test_over_a_socket_that_engines_connect_to() -> None:
    async with cluster(sbs_block=True) as c:
        assert c.server.endforward_endpoint is not None
        assert re.fullmatch(r"tcp://127\.0\.0\.1:[0-9]+", c.server.endforward_endpoint)
        engine = c.prefill[0]
        engine.connect_publisher(c.server.endforward_endpoint)
        worker = c.server.registry.get(engine.url)
        assert worker is not None
        await publish_until(engine, lambda: len(worker.last_report_s) == 2, extend_tokens=512)
        assert {e.report.dp_rank for e in c.scheduler.of(ForwardEnded)} == {0, 1}
        async with c.get("/workers") as response:
            prefill = (await response.json())["workers"][0]
        assert prefill["signal"] == "endforward"
        assert prefill["plugin"] is True


async def test_over_a_socket_that_the_engine_binds() -> None:
    engine = MockEngine("prefill", dp_size=1)
    endpoint = engine.bind_publisher()
    engine._server_info = {"sbs": {"boot_id": engine.boot_id, "bind": endpoint}}
    await engine.start()
    try:
        async with cluster() as c:
            async with c.post("/workers", {"url": engine.url, "worker_type": "prefill"}) as answer:
                assert answer.status == 202
            await until(lambda: c.server.registry.get(engine.url).usable)  # type: ignore[union-attr]
            await publish_until(engine, lambda: c.scheduler.of(ForwardEnded))
            assert c.scheduler.of(ForwardEnded)[0].instance == engine.url
    finally:
        await engine.stop()


async def test_an_engine_that_restarts_is_down_then_up_with_its_new_limits() -> None:
    async with cluster(sbs_block=True) as c:
        engine = c.prefill[0]
        engine.connect_publisher(str(c.server.endforward_endpoint))
        await publish_until(engine, lambda: c.scheduler.of(ForwardEnded))
        before = len(c.scheduler.of(InstanceUp))
        await engine.restart()
        engine._server_info = {"chunked_prefill_size": 4096}
        engine.connect_publisher(str(c.server.endforward_endpoint))
        await publish_until(
            engine, lambda: len(c.scheduler.of(InstanceUp)) > before, instance_id=engine.url
        )
        assert c.scheduler.of(InstanceDown)[0].instance == engine.url
        assert c.scheduler.of(InstanceUp)[-1].chunk_tokens == 4096


async def test_loads_are_polled_while_an_instance_works_without_endforward() -> None:
    async with cluster() as c:
        c.decode[0].gate.close()
        task = asyncio.create_task(c.generate(text="x"))
        await until(lambda: len({e.instance for e in c.scheduler.of(LoadPolled)}) >= 1)
        polled = c.scheduler.of(LoadPolled)[0]
        assert len(polled.queued_tokens) == len(polled.running_requests) == len(polled.kv_tokens)
        assert polled.queued_tokens[1] == 10
        assert polled.running_requests[1] == 1
        assert polled.kv_tokens[1] == 100
        c.decode[0].gate.open()
        assert (await task)[0] == 200


async def storm(setup: Setup, reports: list[EndForward], *odd: list[bytes]) -> None:
    """The messages come while the router is busy elsewhere: all are there when it looks."""
    endpoint = setup.listener.open("tcp://127.0.0.1:*")
    context = zmq.Context()
    sock = context.socket(zmq.PUB)
    try:
        sock.connect(endpoint)
        first = setup.listener.counts.total()
        while setup.listener.counts.total() == first:  # a subscription takes a while
            sock.send_multipart([TOPIC, b"12345678", b"hello"])
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        setup.events.clear()
        setup.listener.counts.clear()
        for frames in [*odd, *map(encode_endforward, reports)]:
            sock.send_multipart(frames)
        time.sleep(0.3)  # noqa: ASYNC251 - the event loop is what is kept busy
        wanted = len(reports) + len(odd)
        await until(lambda: setup.listener.counts.total() >= wanted)
    finally:
        sock.close(0)
        context.term()
        setup.listener.close()


async def test_in_a_storm_the_newest_state_of_a_rank_counts_and_no_request_id_is_lost() -> None:
    setup = Setup()
    engine = MockEngine("decode")
    mine = {"instance_id": setup.decode.url}
    reports = [
        engine.report(
            rank,
            **mine,
            running_requests=number,
            rids=[f"{number}-{rank}"],
            accepted=[Accepted(f"{number}-{rank}", number)],
        )
        for number in range(20)
        for rank in (0, 1)
    ]
    await storm(setup, reports)
    seen = [event.report for event in setup.events if isinstance(event, ForwardEnded)]
    assert len(seen) + setup.listener.counts["superseded"] == 40
    assert setup.listener.counts["superseded"] > 0
    for rank in (0, 1):
        last = [report for report in seen if report.dp_rank == rank]
        assert last[-1].running_requests == 19
        assert [rid for report in last for rid in report.rids] == [f"{n}-{rank}" for n in range(20)]
        accepted = [request for report in last for request in report.accepted]
        assert accepted == [Accepted(f"{n}-{rank}", n) for n in range(20)]


async def test_in_a_storm_every_pass_of_a_prefill_rank_counts() -> None:
    setup = Setup()
    engine = MockEngine("prefill")
    mine = {"instance_id": setup.prefill.url}
    kinds = ["heartbeat", "heartbeat", "launch", "heartbeat", "forward", "launch", "forward"]
    await storm(setup, [engine.report(0, **mine, kind=kind) for kind in kinds])
    seen = [event.report.kind for event in setup.events if isinstance(event, ForwardEnded)]
    assert [kind for kind in seen if kind != "heartbeat"] == [
        "launch",
        "forward",
        "launch",
        "forward",
    ]


async def test_messages_of_another_length_cost_one_of_their_neighbours_at_most() -> None:
    setup = Setup()
    engine = MockEngine("prefill")
    reports = [
        engine.report(0, instance_id=setup.prefill.url, kind="forward", forward_id=number)
        for number in range(5)
    ]
    short, long = [TOPIC, b"12345678"], [TOPIC, b"12345678", b"x", b"y", b"z"]
    endpoint = setup.listener.open("tcp://127.0.0.1:*")
    context = zmq.Context()
    sock = context.socket(zmq.PUB)
    try:
        sock.connect(endpoint)
        while not setup.listener.counts["malformed"]:
            sock.send_multipart([TOPIC, b"12345678", b"hello"])
            await asyncio.sleep(0.01)
        for frames in (long, short, *map(encode_endforward, reports)):
            sock.send_multipart(frames)
        await until(lambda: len(setup.bound()) >= 4)
    finally:
        sock.close(0)
        context.term()
        setup.listener.close()
    ids = [event.report.forward_id for event in setup.events if isinstance(event, ForwardEnded)]
    assert ids[-4:] == [1, 2, 3, 4]


async def test_connections_beyond_the_limit_are_closed_and_engines_still_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_limit, "LEAST_PEERS", 20)
    monkeypatch.setattr(peer_limit, "MOST_PEERS", 20)
    setup, engine = Setup(), MockEngine("prefill")
    endpoint = setup.listener.open("tcp://127.0.0.1:*")
    assert endpoint is not None and setup.listener.peers is not None
    engine.connect_publisher(endpoint)
    try:
        await publish_until(engine, setup.bound, instance_id=setup.prefill.url)
        before = len(os.listdir("/proc/self/fd"))
        port = int(endpoint.rpartition(":")[2])
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        await until(lambda: setup.listener.peers.refused >= 80)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before + len(silent) + 20)
        setup.events.clear()
        await publish_until(engine, setup.bound, instance_id=setup.prefill.url)
        for worker in silent:
            worker.close()
    finally:
        setup.listener.close()
        await engine.stop()


def test_invented_boots_neither_fill_the_log_nor_push_out_the_engines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(endforward_listener, "_MAX_BOOTS", 50)
    setup, engine = Setup(), MockEngine("prefill")
    with caplog.at_level("INFO", logger=endforward_listener.logger.name):
        for number in range(500):
            setup.receive(engine, instance_id=setup.prefill.url)
            engine_boot, engine.boot_id = engine.boot_id, f"invented-{number}"
            setup.receive(engine, instance_id=setup.prefill.url, seq=number)
            engine.boot_id = engine_boot
    assert len(caplog.records) < 10
    assert engine.boot_id in setup.listener._boots
    assert len(setup.listener._boots) == 50
