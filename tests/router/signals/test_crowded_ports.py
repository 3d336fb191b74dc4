"""Strangers that hold every place of a ZeroMQ port keep nobody out who has something to say."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import zmq
from endforward_setup import Setup
from router_harness import until

from sglang_sbs.engine.publish import Publisher
from sglang_sbs.router.processes.messages import VERSION, Alive, FromScheduler, Hello, ToScheduler
from sglang_sbs.router.processes.sockets import FrontEndSocket, SchedulerSocket
from sglang_sbs.router.signals import peer_limit
from sglang_sbs.router.signals.peer_limit import PeerLimit
from sglang_sbs.wire import encode_endforward
from sglang_sbs.wire.curve import CurveKeys, keys_of
from tools.stand_ins.mock_engine import MockEngine

PLACES = 300
HELLO = Hello(version=VERSION, front_end="me", name="a test")


@pytest.fixture(autouse=True)
def _few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_limit, "LEAST_PEERS", PLACES)
    monkeypatch.setattr(peer_limit, "MOST_PEERS", PLACES)
    # Silent strangers stay, however busy the host is.
    monkeypatch.setattr(peer_limit, "_HANDSHAKE_MS", 600_000)


@pytest.fixture(params=[None, "s" * 40], ids=["open", "key"])
def keys(request: pytest.FixtureRequest) -> CurveKeys | None:
    return None if request.param is None else keys_of(request.param)


@contextmanager
def strangers(endpoint: str, kind: int, keys: CurveKeys | None) -> Iterator[None]:
    """More than there are places: silent TCP connections, and where there is no key half of them
    ZeroMQ's, which are made again when they are closed."""
    context, port = zmq.Context(), int(endpoint.rpartition(":")[2])
    sock = context.socket(kind)
    sock.setsockopt(zmq.LINGER, 0)
    with ExitStack() as stack:
        stack.callback(context.term)
        stack.callback(sock.close, 0)
        for number in range(PLACES + 20):
            if keys is None and number % 2:
                sock.connect(endpoint)
            else:
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        yield


def is_full(peers: PeerLimit) -> bool:
    return peers.connections == PLACES and peers.refused > 0


async def test_a_new_engine_gets_through_and_one_that_was_connected_stays(
    keys: CurveKeys | None,
) -> None:
    setup, engine = Setup(), MockEngine("prefill")
    endpoint = setup.listener.open("tcp://127.0.0.1:*", keys)
    peers = setup.listener.peers
    assert endpoint is not None
    assert peers is not None

    def receives(publisher: Publisher) -> Callable[[], bool]:
        setup.events.clear()

        def received() -> bool:
            publisher.send(encode_endforward(engine.report(instance_id=setup.prefill.url)))
            return len(setup.bound()) >= 3

        return received

    with ExitStack() as stack:
        stack.callback(setup.listener.close)
        old = Publisher([endpoint], None, keys=keys)
        stack.callback(old.close)
        await until(receives(old))
        (its_place,) = peers._proved
        # An XPUB may connect to an endpoint several times.
        stack.enter_context(strangers(endpoint, zmq.XPUB, keys))
        await until(lambda: is_full(peers))
        new = Publisher([endpoint], None, keys=keys)
        stack.callback(new.close)
        await until(receives(new))
        await until(receives(old))
        assert its_place in peers._proved
        assert len(peers._proved) == 2
        assert peers.connections <= PLACES


async def test_with_every_place_proved_the_newest_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_limit, "LEAST_PEERS", 1)
    monkeypatch.setattr(peer_limit, "MOST_PEERS", 1)
    setup, engine = Setup(), MockEngine("prefill")
    endpoint = setup.listener.open("tcp://127.0.0.1:*")
    peers = setup.listener.peers
    assert endpoint is not None
    assert peers is not None
    engine.connect_publisher(endpoint)
    try:

        def received() -> bool:
            engine.publish(engine.report(instance_id=setup.prefill.url))
            return bool(peers._proved)

        await until(received)
        before = set(peers._proved)
        with socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2]))):
            await until(lambda: peers.refused == 1)
            assert peers._proved == before
    finally:
        setup.listener.close()
        await engine.stop()


async def test_a_new_front_end_is_answered(keys: CurveKeys | None) -> None:
    taken: list[ToScheduler] = []
    received: list[FromScheduler] = []

    def take(identity: bytes, message: ToScheduler) -> None:
        taken.append(message)
        scheduler.send_message(identity, Alive())

    scheduler = SchedulerSocket()
    endpoint = scheduler.open("tcp://127.0.0.1:*", keys, take)
    peers = scheduler.peers
    assert peers is not None
    with ExitStack() as stack:
        stack.callback(scheduler.close)
        # A DEALER connects to an endpoint only once; a REP is no peer of a ROUTER's, a ROUTER is.
        stack.enter_context(strangers(endpoint, zmq.ROUTER, keys))
        await until(lambda: peers.connections == PLACES)
        line = FrontEndSocket(keys, endpoint, received.append)
        stack.callback(line.close)

        def answered() -> bool:
            line.send_message(HELLO)
            return bool(received)

        await until(answered)
        assert taken[0] == HELLO
        await until(lambda: len(peers._proved) == 1)
        assert scheduler.counts["crowded_out"] > 0
