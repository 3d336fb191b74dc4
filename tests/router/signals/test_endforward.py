"""EndForward: whose message it is, and what happens to those that are nobody's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from router_harness import cluster, until

from sglang_sbs.router.signals import endforward_listener
from sglang_sbs.router.signals.endforward_listener import EndForwardListener, publisher_endpoints
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import SbsBlock, WorkerInfo
from sglang_sbs.router.workers.worker import WorkerEvents
from sglang_sbs.scheduling.events import Event, ForwardEnded, InstanceDown, InstanceUp, LoadPolled
from sglang_sbs.wire import TOPIC, EndForward, encode_endforward
from sglang_sbs.wire.curve import keys_of
from tools.stand_ins.mock_engine import MockEngine


class Setup:
    def __init__(self, prefill: str = "10.0.0.1", decode: str = "localhost") -> None:
        """``prefill`` and ``decode`` are hosts."""
        self.events: list[Event] = []
        self.owners: dict[tuple[str, str], str] = {}
        self.registry = Registry(WorkerEvents(self.events.append))
        self.prefill = self.registry.add(f"http://{prefill}:30000", "prefill")
        self.decode = self.registry.add(f"http://{decode}:30001", "decode")
        for worker in (self.prefill, self.decode):
            self.registry.described(worker, WorkerInfo(dp_size=2))
            self.registry.set_healthy(worker, True)
        self.events.clear()
        self.listener = EndForwardListener(
            self.registry, self.events.append, lambda rid, role: self.owners.get((rid, role))
        )

    def receive(self, engine: MockEngine, rank: int = 0, **fields: Any) -> None:
        self.listener.receive(encode_endforward(engine.report(rank, **fields)))

    def bound(self) -> list[str]:
        return [event.instance for event in self.events if isinstance(event, ForwardEnded)]


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


async def publish_until(engine: MockEngine, condition: Any, **fields: Any) -> None:
    """PUB drops what is sent before the subscription is known: send until it arrives."""
    async with asyncio.timeout(20):
        while not condition():
            for rank in range(engine.dp_size):
                engine.publish(engine.report(rank, **fields))
            await asyncio.sleep(0.01)


async def test_over_a_socket_that_engines_connect_to() -> None:
    async with cluster(sbs_block=True) as c:
        assert c.server.endforward_endpoint is not None
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
        engine.report(rank, **mine, running_requests=number, rids=[f"{number}-{rank}"])
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


# Engines that bind ------------------------------------------------------------------------------


class Bound:
    """An engine's socket: it knows whether a router is connected."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._sock = context.socket(zmq.XPUB)
        self._sock.setsockopt(zmq.LINGER, 0)
        port = self._sock.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.subscriptions: list[bytes] = []
        """As they came and went."""

    @property
    def listened_to(self) -> bool:
        with suppress(zmq.Again):
            while True:
                self.subscriptions.append(self._sock.recv(zmq.NOBLOCK))
        return self.subscriptions[-1:] == [b"\x01" + TOPIC]

    def send(self, frames: list[bytes]) -> None:
        self._sock.send_multipart(frames)

    def info(self, boot_id: str = "") -> WorkerInfo:
        """What an engine that binds there says of itself."""
        return WorkerInfo(sbs=SbsBlock(boot_id=boot_id, bind=self.endpoint))

    def close(self) -> None:
        self._sock.close(0)


@contextmanager
def engines_bind(count: int) -> Iterator[list[Bound]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    bound = [Bound(context) for _ in range(count)]
    try:
        yield bound
    finally:
        for one in bound:
            one.close()
        context.term()


@contextmanager
def listening() -> Iterator[Setup]:
    setup = Setup("127.0.0.1", "127.0.0.1")
    setup.listener.open(None)
    try:
        yield setup
    finally:
        setup.listener.close()


async def test_the_endpoint_of_an_old_boot_is_left_and_so_is_that_of_a_removed_worker() -> None:
    with engines_bind(2) as (old, new), listening() as setup:
        setup.listener.described(setup.prefill, old.info("first"))
        await until(lambda: old.listened_to)
        setup.listener.described(setup.prefill, new.info("second"))
        await until(lambda: new.listened_to and not old.listened_to)
        setup.listener.described(setup.prefill, new.info("third"))
        setup.listener.removed(setup.prefill.url)
        await until(lambda: not new.listened_to)
        assert new.subscriptions == [b"\x01" + TOPIC, b"\x00" + TOPIC]
        # It comes back, first with the plugin, then without.
        setup.listener.described(setup.prefill, new.info("fourth"))
        await until(lambda: new.listened_to)
        setup.listener.described(setup.prefill, WorkerInfo())
        await until(lambda: not new.listened_to)


async def test_what_two_workers_share_stays_connected_as_long_as_one_of_them_is_there() -> None:
    with engines_bind(2) as (shared, other), listening() as setup:
        engine = MockEngine("decode")
        setup.listener.described(setup.prefill, shared.info())
        setup.listener.described(setup.decode, shared.info(engine.boot_id))
        await until(lambda: shared.listened_to)
        setup.listener.described(setup.prefill, other.info())
        await until(lambda: other.listened_to)
        setup.listener.described(setup.prefill, shared.info())
        await until(lambda: not other.listened_to)
        setup.listener.removed(setup.prefill.url)

        def heard() -> bool:
            shared.send(encode_endforward(engine.report()))
            return bool(setup.bound())

        await until(heard)
        assert shared.listened_to and len(shared.subscriptions) == 1
        setup.listener.removed(setup.decode.url)
        await until(lambda: not shared.listened_to)


async def test_the_boots_of_a_removed_worker_are_forgotten() -> None:
    setup = Setup()
    engine = MockEngine("prefill")
    info = WorkerInfo(dp_size=2, sbs=SbsBlock(boot_id=engine.boot_id))
    setup.listener.described(setup.prefill, info)
    setup.registry.remove(setup.prefill)
    setup.listener.removed(setup.prefill.url)
    again = setup.registry.add(setup.prefill.url, "prefill")
    setup.receive(engine)
    assert setup.listener.counts == {"unbound": 1}
    setup.listener.described(setup.prefill, info)  # of the one that was removed
    setup.receive(engine)
    assert setup.listener.counts == {"unbound": 2}
    setup.listener.described(again, info)
    setup.receive(engine)
    assert setup.listener.counts == {"unbound": 2, "bound": 1}


async def test_engines_that_bind_are_connected_to_also_if_the_router_listens_later() -> None:
    """As when it takes over from another one."""
    setup = Setup("127.0.0.1")
    with engines_bind(1) as (engine,):
        setup.listener.described(setup.prefill, engine.info())
        setup.listener.open(None)
        try:
            await until(lambda: engine.listened_to)
        finally:
            setup.listener.close()
        setup.listener.removed(setup.prefill.url)


async def test_an_endpoint_that_cannot_be_one_is_told_and_the_others_are_heard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with engines_bind(1) as (engine,), listening() as setup:
        impossible = SbsBlock(bind="tcp://bad host:7700")
        setup.listener.described(setup.decode, WorkerInfo(sbs=impossible))
        assert "it binds 'tcp://bad host:7700'" in caplog.text
        assert "SGLANG_SBS_BIND=tcp://*:PORT" in caplog.text
        setup.listener.described(setup.prefill, engine.info())
        await until(lambda: engine.listened_to)
        setup.listener.removed(setup.decode.url)


async def test_a_removed_worker_that_binds_is_not_connected_to_any_more() -> None:
    engine = MockEngine("prefill", dp_size=1)
    await engine.start()
    try:
        with engines_bind(1) as (bound,):
            engine._server_info = {"sbs": {"boot_id": engine.boot_id, "bind": bound.endpoint}}
            async with cluster() as c:
                body = {"url": engine.url, "worker_type": "prefill"}
                for _ in range(2):
                    async with c.post("/workers", body) as answer:
                        assert answer.status == 202
                        worker_id = (await answer.json())["worker_id"]
                    await until(lambda: bound.listened_to)
                    async with c.client.delete(f"{c.url}/workers/{worker_id}") as answer:
                        assert answer.status == 202
                    await until(lambda: not bound.listened_to)
    finally:
        await engine.stop()


class Wire:
    """Between router and engine: what goes through here may stop to, and nobody is told."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server
        self._ends: list[asyncio.StreamWriter] = []
        self._pumps: list[asyncio.Task[None]] = []

    async def open(self) -> str:
        """Returns the router's end."""
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._ends += [writer, far_writer]
        self._pumps += [
            asyncio.create_task(self._pump(reader, far_writer)),
            asyncio.create_task(self._pump(far_reader, writer)),
        ]

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)

    def vanish(self) -> None:
        """Nothing comes any more through the connections there are."""
        for pump in self._pumps:
            pump.cancel()

    def close(self) -> None:
        self.vanish()
        self._server.close()
        for end in self._ends:
            end.close()


async def test_an_engine_that_binds_is_heard_again_after_its_host_vanished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(endforward_listener._OF_SUBSCRIBERS, zmq.HEARTBEAT_IVL, 50)
    monkeypatch.setitem(endforward_listener._OF_SUBSCRIBERS, zmq.HEARTBEAT_TIMEOUT, 200)
    engine = MockEngine("prefill")
    wire = Wire(int(engine.bind_publisher().rpartition(":")[2]))
    try:
        sbs = SbsBlock(boot_id=engine.boot_id, bind=await wire.open())
        with listening() as setup:
            setup.listener.described(setup.prefill, WorkerInfo(sbs=sbs))
            await publish_until(engine, setup.bound)
            wire.vanish()

            def heard() -> bool:
                later = (e for e in setup.events if isinstance(e, ForwardEnded))
                return any(event.report.extend_tokens == 777 for event in later)

            await publish_until(engine, heard, extend_tokens=777)
    finally:
        wire.close()
        await engine.stop()


@pytest.mark.parametrize("keys", [None, keys_of("s" * 40)])
async def test_who_is_away_is_noticed_and_is_tried_less_often_but_never_seldom(keys: Any) -> None:
    setup = Setup()
    setup.listener.open(None, keys)
    try:
        for sock in setup.listener._sockets.values():
            assert 0 < sock.getsockopt(zmq.HEARTBEAT_IVL) < sock.getsockopt(zmq.HEARTBEAT_TIMEOUT)
            assert 100 < sock.getsockopt(zmq.RECONNECT_IVL_MAX) <= 5000
            assert 0 < sock.getsockopt(zmq.CONNECT_TIMEOUT) <= 10_000
    finally:
        setup.listener.close()
