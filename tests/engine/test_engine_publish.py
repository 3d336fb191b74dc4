"""The socket: real ZeroMQ on loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from engine_fakes import Role, Scheduler, config

from sglang_sbs.engine.hooks import RankHook
from sglang_sbs.engine.publish import BindError, Publisher, resolve_endpoints
from sglang_sbs.wire import decode_endforward
from sglang_sbs.wire.curve import keys_of
from tools.stand_ins.ports import free_ports

DEADLINE_S = 60.0


class Router:
    """A SUB socket that binds, as the router does."""

    def __init__(self, port: int = 0, *, curve: bool = False) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        if curve:
            keys_of("s" * 40).serve(self.socket)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        if port:
            self.socket.bind(f"tcp://127.0.0.1:{port}")
            self.port = port
        else:
            self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()

    def receive_through(self, publisher: Publisher, payload: bytes) -> list[bytes]:
        """Send until the connection is up and one message came through."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            publisher.send([b"t", payload])
            if self.socket.poll(20):
                return self.socket.recv_multipart()
        raise AssertionError("nothing arrived")

    def drain(self) -> list[list[bytes]]:
        got = []
        while self.socket.poll(200):
            got.append(self.socket.recv_multipart())
        return got


@pytest.fixture
def routers() -> Iterator[list[Router]]:
    made = [Router(), Router()]
    yield made
    for router in made:
        router.close()


def test_every_router_gets_every_message(routers: list[Router]) -> None:
    publisher = Publisher([r.endpoint for r in routers], None)
    try:
        for router in routers:
            assert router.receive_through(publisher, b"x") == [b"t", b"x"]
        for router in routers:
            router.drain()
        publisher.send([b"t", b"last"])
        assert [r.drain() for r in routers] == [[[b"t", b"last"]], [[b"t", b"last"]]]
    finally:
        publisher.close()


def test_a_router_that_returns_gets_no_stale_messages() -> None:
    router = Router()
    publisher = Publisher([router.endpoint], None)
    publisher._socket.monitor("inproc://gone", zmq.EVENT_DISCONNECTED)
    events = publisher._context.socket(zmq.PAIR)
    events.connect("inproc://gone")
    try:
        router.receive_through(publisher, b"before")
        router.close()
        assert events.poll(DEADLINE_S * 1000)
        for _ in range(50):
            publisher.send([b"t", b"while away"])
        router = Router(router.port)
        assert router.receive_through(publisher, b"after") == [b"t", b"after"]
    finally:
        events.close(0)
        publisher.close()
        router.close()


def test_a_router_that_had_a_key_and_returns_without_is_found() -> None:
    keyed = Router(curve=True)
    publisher = Publisher([keyed.endpoint], None, revive_interval_s=0.1)
    given_up = publisher._monitor.poll(DEADLINE_S * 1000)
    keyed.close()
    router = Router(keyed.port)
    try:
        assert given_up
        assert router.receive_through(publisher, b"x") == [b"t", b"x"]
    finally:
        publisher.close()
        router.close()


def test_sending_without_a_listener_neither_blocks_nor_fails() -> None:
    """Nothing is kept for a listener that comes later."""
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    publisher = Publisher([endpoint], None)
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    try:
        for _ in range(1000):
            publisher.send([b"t", b"x" * 200])
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.bind(endpoint)
        deadline = time.monotonic() + DEADLINE_S
        while not subscriber.poll(20) and time.monotonic() < deadline:
            publisher.send([b"t", b"late"])
        assert subscriber.recv_multipart(zmq.NOBLOCK) == [b"t", b"late"]
    finally:
        publisher.close()
        subscriber.close(0)
        context.term()


def test_bind_mode() -> None:
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    publisher = Publisher([], endpoint)
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    try:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.connect(endpoint)
        deadline = time.monotonic() + DEADLINE_S
        while not subscriber.poll(20) and time.monotonic() < deadline:
            publisher.send([b"t", b"x"])
        assert subscriber.recv_multipart(zmq.NOBLOCK) == [b"t", b"x"]
    finally:
        subscriber.close(0)
        context.term()
        publisher.close()


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield int(taken.getsockname()[1])


def test_a_bind_clash_says_what_to_change(taken_port: int) -> None:
    with pytest.raises(BindError, match=r"SGLANG_SBS_BIND: cannot bind .* its own base port"):
        Publisher([], f"tcp://127.0.0.1:{taken_port}")


def test_a_bind_clash_does_not_cost_the_routers(routers: list[Router], taken_port: int) -> None:
    publisher = Publisher([routers[0].endpoint], f"tcp://127.0.0.1:{taken_port}")
    try:
        assert routers[0].receive_through(publisher, b"x") == [b"t", b"x"]
    finally:
        publisher.close()


def test_a_bind_clash_turns_the_hook_off_and_the_engine_goes_on(taken_port: int) -> None:
    # Rank 1 wants the port behind the base port.
    hook = RankHook(config(routers=(), bind=f"tcp://127.0.0.1:{taken_port - 1}"))
    hook.before_on_idle(Scheduler(Role.PREFILL, time.monotonic, dp_rank=1))
    assert hook.off


def test_rank_messages_arrive_as_the_wire_says(routers: list[Router]) -> None:
    hook = RankHook(config(routers=(routers[0].endpoint,), heartbeat_s=0.05))
    scheduler = Scheduler(Role.PREFILL, time.monotonic, dp_rank=1)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not routers[0].socket.poll(20) and time.monotonic() < deadline:
            hook.before_on_idle(scheduler)
        message = decode_endforward(routers[0].socket.recv_multipart(zmq.NOBLOCK))
        assert (message.role, message.dp_rank, message.dp_size) == ("prefill", 1, 2)
        assert message.boot_id == "boot-1"
    finally:
        hook.close()


# Host names ---------------------------------------------------------------------------------------


class Names:
    """A name server whose answers a test changes."""

    def __init__(self, **answers: frozenset[str]) -> None:
        self.answers = answers
        self.asked = threading.Event()

    def __call__(self, host: str, port: int) -> frozenset[str]:
        self.asked.set()
        if host not in self.answers:
            raise OSError("no such host")
        return self.answers[host]


def test_a_host_name_is_followed_to_its_addresses(routers: list[Router]) -> None:
    old, new = routers
    names = Names(router=frozenset({old.endpoint}))
    publisher = Publisher(["tcp://router:7600"], None, resolve=names, resolve_interval_s=0.02)
    try:
        old.receive_through(publisher, b"x")
        names.answers["router"] = frozenset({old.endpoint, new.endpoint})
        new.receive_through(publisher, b"y")
        names.answers["router"] = frozenset({new.endpoint})
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            new.receive_through(publisher, b"z")
            old.drain()
            publisher.send([b"t", b"only new"])
            if not old.drain():
                break
        else:
            raise AssertionError("the address that is gone still gets messages")
    finally:
        publisher.close()


def test_a_name_that_resolves_later_is_connected_then(
    routers: list[Router], caplog: pytest.LogCaptureFixture
) -> None:
    names = Names()
    publisher = Publisher(["tcp://router:7600"], None, resolve=names, resolve_interval_s=0.02)
    try:
        assert names.asked.wait(DEADLINE_S)
        publisher.send([b"t", b"to nobody"])
        names.answers["router"] = frozenset({routers[0].endpoint})
        assert routers[0].receive_through(publisher, b"x") == [b"t", b"x"]
        warnings = [r for r in caplog.records if "does not resolve" in r.getMessage()]
        assert len(warnings) == 1
    finally:
        publisher.close()


def test_a_name_server_that_fails_later_changes_nothing(routers: list[Router]) -> None:
    names = Names(router=frozenset({routers[0].endpoint}))
    publisher = Publisher(["tcp://router:7600"], None, resolve=names, resolve_interval_s=0.02)
    try:
        routers[0].receive_through(publisher, b"x")
        del names.answers["router"]
        for _ in range(3):
            names.asked.clear()
            assert names.asked.wait(DEADLINE_S)
        routers[0].drain()
        routers[0].receive_through(publisher, b"still there")
    finally:
        publisher.close()


def test_a_literal_address_stays_beside_a_host_name(routers: list[Router]) -> None:
    literal, named = routers
    names = Names(router=frozenset({named.endpoint}))
    publisher = Publisher([literal.endpoint, "tcp://router:7600"], None, resolve=names)
    try:
        named.receive_through(publisher, b"x")
        literal.drain()
        literal.receive_through(publisher, b"y")
    finally:
        publisher.close()


def test_localhost_is_one_endpoint() -> None:
    assert resolve_endpoints("localhost", 7600) == frozenset({"tcp://127.0.0.1:7600"})


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["10.0.0.1", "fd00::1", "10.0.0.2"], {"tcp://10.0.0.1:7", "tcp://10.0.0.2:7"}),
        (["fd00::1"], {"tcp://[fd00::1]:7"}),
    ],
)
def test_ipv6_addresses_only_where_there_are_no_others(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], expected: set[str]
) -> None:
    def lookup(_host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [
            (socket.AF_INET6 if ":" in a else socket.AF_INET, 1, 6, "", (a, port))
            for a in addresses
        ]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert resolve_endpoints("router", 7) == expected


def test_a_name_for_an_address_that_is_given_too_is_not_sent_to_twice(
    routers: list[Router],
) -> None:
    endpoint = routers[0].endpoint
    names = Names(router=frozenset({endpoint}))
    publisher = Publisher([endpoint, "tcp://router:7600"], None, resolve=names)
    try:
        assert names.asked.wait(DEADLINE_S)
        routers[0].receive_through(publisher, b"x")
        routers[0].drain()
        publisher.send([b"t", b"once"])
        assert routers[0].drain() == [[b"t", b"once"]]
    finally:
        publisher.close()


def test_a_node_speaks_from_the_address_it_was_given(routers: list[Router]) -> None:
    publisher = Publisher([routers[0].endpoint], None, source="127.0.0.2")
    try:
        routers[0].receive_through(publisher, b"x")
        publisher.send([b"t", b"y"])
        assert routers[0].socket.recv(copy=False).get("Peer-Address") == "127.0.0.2"
    finally:
        publisher.close()


def test_an_address_of_another_machine_is_logged_and_not_sent_from(
    routers: list[Router], caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher([routers[0].endpoint], None, source="192.0.2.1")
    try:
        assert routers[0].receive_through(publisher, b"x")
    finally:
        publisher.close()
    assert "SGLANG_SBS_NODE_HOST: 192.0.2.1 is not an address of this machine" in caplog.text


def test_a_name_without_an_answer_holds_up_no_other(
    routers: list[Router], monkeypatch: pytest.MonkeyPatch
) -> None:
    back, asked = threading.Event(), threading.Event()
    real = socket.getaddrinfo

    def names(host: str, *wanted: Any, **more: Any) -> Any:
        if host == "silent":
            asked.set()
            back.wait(DEADLINE_S)
            raise OSError("no answer")
        return real("127.0.0.1" if host == "router" else host, *wanted, **more)

    monkeypatch.setattr(socket, "getaddrinfo", names)
    named, literal = routers
    endpoints = ["tcp://silent:7600", f"tcp://router:{named.port}", literal.endpoint]
    publisher = Publisher(endpoints, None)
    try:
        assert asked.wait(DEADLINE_S)
        named.receive_through(publisher, b"x")
        literal.receive_through(publisher, b"x")
    finally:
        publisher.close()
        assert not back.is_set(), "it waited for the name"
        back.set()
