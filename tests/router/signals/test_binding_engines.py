"""Engines that listen themselves: whom the router connects to, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import zmq
from endforward_setup import Setup, publish_until
from router_harness import cluster, until

from sglang_sbs.router.signals import endforward_socket
from sglang_sbs.router.workers.server_info import SbsBlock, WorkerInfo
from sglang_sbs.scheduling.events import ForwardEnded
from sglang_sbs.wire import TOPIC, encode_endforward
from sglang_sbs.wire.curve import keys_of
from tools.stand_ins.mock_engine import MockEngine


class Bound:
    """An engine's socket: it knows whether a router is connected."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._sock = context.socket(zmq.XPUB)
        self._sock.setsockopt(zmq.LINGER, 0)
        port = self._sock.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.subscriptions: list[bytes] = []
        """Subscriptions and their ends, in the order of arrival."""

    @property
    def listened_to(self) -> bool:
        with suppress(zmq.Again):
            while True:
                self.subscriptions.append(self._sock.recv(zmq.NOBLOCK))
        return self.subscriptions[-1:] == [b"\x01" + TOPIC]

    def send(self, frames: list[bytes]) -> None:
        self._sock.send_multipart(frames)

    def info(self, boot_id: str = "") -> WorkerInfo:
        """Return the description of an engine that binds there."""
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
        for listener in bound:
            listener.close()
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

        def received() -> bool:
            shared.send(encode_endforward(engine.report()))
            return bool(setup.bound())

        await until(received)
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
    """A router that takes over from another one does the same."""
    setup = Setup("127.0.0.1")
    with engines_bind(1) as (engine,):
        setup.listener.described(setup.prefill, engine.info())
        setup.listener.open(None)
        try:
            await until(lambda: engine.listened_to)
        finally:
            setup.listener.close()
        setup.listener.removed(setup.prefill.url)


async def test_an_impossible_endpoint_is_logged_and_the_others_are_connected_to(
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
    """Between router and engine: what goes through here may stop, without an error."""

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


async def test_reports_of_an_engine_that_binds_arrive_again_after_its_host_vanished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(endforward_socket._OF_SUBSCRIBERS, zmq.HEARTBEAT_IVL, 50)
    monkeypatch.setitem(endforward_socket._OF_SUBSCRIBERS, zmq.HEARTBEAT_TIMEOUT, 200)
    engine = MockEngine("prefill")
    wire = Wire(int(engine.bind_publisher().rpartition(":")[2]))
    try:
        sbs = SbsBlock(boot_id=engine.boot_id, bind=await wire.open())
        with listening() as setup:
            setup.listener.described(setup.prefill, WorkerInfo(sbs=sbs))
            await publish_until(engine, setup.bound)
            wire.vanish()

            def received() -> bool:
                later = (e for e in setup.events if isinstance(e, ForwardEnded))
                return any(event.report.extend_tokens == 777 for event in later)

            await publish_until(engine, received, extend_tokens=777)
    finally:
        wire.close()
        await engine.stop()


@pytest.mark.parametrize("keys", [None, keys_of("s" * 40)])
async def test_dialling_an_absent_engine_backs_off_within_a_bound(keys: Any) -> None:
    setup = Setup()
    setup.listener.open(None, keys)
    try:
        for sock in setup.listener._sockets.values():
            assert 0 < sock.getsockopt(zmq.HEARTBEAT_IVL) < sock.getsockopt(zmq.HEARTBEAT_TIMEOUT)
            assert 100 < sock.getsockopt(zmq.RECONNECT_IVL_MAX) <= 5000
            assert 0 < sock.getsockopt(zmq.CONNECT_TIMEOUT) <= 10_000
    finally:
        setup.listener.close()
