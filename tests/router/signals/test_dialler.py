"""Engines that listen under a host name: libzmq is never given the name."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import zmq
from endforward_setup import Setup
from router_harness import until

from sglang_sbs.router.name_lookup import NameLookup, RouterLoop
from sglang_sbs.router.processes.messages import VERSION, Alive, FromScheduler, Hello
from sglang_sbs.router.processes.sockets import FrontEndSocket, SchedulerSocket
from sglang_sbs.router.signals.dialler import Dialler, host_name_of
from sglang_sbs.router.signals.kv_subscriber import KvEventSubscriber
from sglang_sbs.router.signals.kv_times import KvTimes
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import KvEventsBlock, SbsBlock, WorkerInfo
from sglang_sbs.router.workers.worker import WorkerEvents
from sglang_sbs.wire import TOPIC

HANGS = "hangs.invalid"
NAME = "engine.invalid"
"""No real name server has it."""
NOWHERE = "127.0.0.9"
LIMIT_S = 30
HELLO = Hello(version=VERSION, front_end="me", name="a test")


class Dns:
    def __init__(self) -> None:
        self.addresses = ["127.0.0.1"]
        self.asked: list[str] = []
        self.gate = threading.Event()

    def __call__(self, host: str, port: Any, *rest: Any) -> list[Any]:
        self.asked.append(host)
        if host == HANGS:
            self.gate.wait(LIMIT_S)
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in self.addresses
        ]


class Loop(RouterLoop):
    def __init__(self, dns: Dns) -> None:
        super().__init__()
        self._names = NameLookup(dns, fresh_s=0.0)


def on_loop(main: Callable[[Dns], Awaitable[None]]) -> None:
    dns = Dns()

    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main(dns)

    try:
        with asyncio.Runner(loop_factory=lambda: Loop(dns)) as runner:
            runner.run(limited())
    finally:
        dns.gate.set()


@contextmanager
def engine() -> Iterator[tuple[int, Callable[[bytes], bool]]]:
    """An engine's port, and whether a router subscribed there to a topic."""
    received: list[bytes] = []
    with zmq.Context() as context, context.socket(zmq.XPUB) as sock:
        port = sock.bind_to_random_port("tcp://127.0.0.1")

        def subscribed(topic: bytes) -> bool:
            while sock.poll(0):
                received.append(sock.recv())
            return b"\x01" + topic in received

        yield port, subscribed


def test_engines_are_reached_by_name_while_another_name_hangs() -> None:
    async def main(dns: Dns) -> None:
        setup = Setup(HANGS, NAME)
        setup.listener.open(None)
        try:
            with engine() as (port, subscribed):
                for worker in (setup.prefill, setup.decode):
                    info = WorkerInfo(sbs=SbsBlock(boot_id=worker.url, bind=f"tcp://*:{port}"))
                    setup.listener.described(worker, info)
                await until(lambda: subscribed(TOPIC))
                assert HANGS in dns.asked
        finally:
            setup.listener.close()

    on_loop(main)


def test_kv_events_are_followed_by_name_and_an_address_without_an_engine_is_left() -> None:
    async def main(dns: Dns) -> None:
        dns.addresses = [NOWHERE, "127.0.0.1"]
        registry = Registry(WorkerEvents(lambda event: None), prefix_source="events")
        subscriber = KvEventSubscriber(registry, lambda event: None, KvTimes(follow_s=0.3))
        try:
            with engine() as (port, subscribed):
                block = KvEventsBlock(port=port, replay_port=None, topic="kv", block_tokens=16)
                for host in (HANGS, NAME):
                    worker = registry.add(f"http://{host}:1", "prefill")
                    registry.described(worker, WorkerInfo(kv_events=block, radix_cache=True))
                    subscriber.up(worker)
                await until(lambda: subscribed(b"kv"))
                assert HANGS in dns.asked
        finally:
            await subscriber.close()

    on_loop(main)


class Recorder:
    """Stands in for a socket, and records where it is connected to."""

    def __init__(self) -> None:
        self.connected: list[str] = []

    def connect(self, endpoint: str) -> None:
        self.connected.append(endpoint)

    def disconnect(self, endpoint: str) -> None:
        self.connected.remove(endpoint)


def test_an_engine_that_moved_is_found_at_its_new_address() -> None:
    async def main(dns: Dns) -> None:
        sock: Any = Recorder()
        dialler = Dialler(sock, "messages", follow_s=0.01)
        dialler.dial({f"tcp://{NAME}:1", f"tcp://{NAME}:2", "tcp://[::1]:3", "ipc:///tmp/x"})
        assert sorted(sock.connected) == ["ipc:///tmp/x", "tcp://[::1]:3"]
        await until(lambda: len(sock.connected) == 4)
        dns.addresses = ["::2", "127.0.0.2"]
        await until(lambda: "tcp://127.0.0.2:1" in sock.connected)
        dialler.dial({f"tcp://{NAME}:2", "tcp://[::1]:3"})
        assert sorted(sock.connected) == ["tcp://127.0.0.2:2", "tcp://[::1]:3"]
        dns.addresses = ["127.0.0.2", "127.0.0.1"]
        asked = len(dns.asked)
        await until(lambda: len(dns.asked) > asked + 3)
        assert sorted(sock.connected) == ["tcp://127.0.0.2:2", "tcp://[::1]:3"], "kept"
        dialler.dial(())
        assert not sock.connected
        dialler.close()

    on_loop(main)


def test_endpoints_with_names() -> None:
    assert host_name_of("tcp://a.b:1") == "a.b"
    assert not any(map(host_name_of, ("tcp://1.2.3.4:5", "tcp://[::1]:5", "ipc:///tmp/a:1")))


def test_a_scheduler_is_dialled_by_address_and_followed_when_it_moves() -> None:
    """libzmq is never given the name, however it is answered."""

    async def main(dns: Dns) -> None:
        received: list[FromScheduler] = []
        scheduler = SchedulerSocket()
        endpoint = scheduler.open(
            "tcp://127.0.0.1:*", None, lambda identity, _: scheduler.send_message(identity, Alive())
        )
        port = endpoint.rpartition(":")[2]
        quick = partial(FrontEndSocket, None, silent_s=0.0, follow_s=0.01)
        hanging = quick(f"tcp://{HANGS}:{port}", received.append)
        line = quick(f"tcp://{NAME}:{port}", received.append)

        def answered() -> bool:
            line.send_message(HELLO)
            return bool(received)

        try:
            await until(answered)
            assert {HANGS, NAME} <= set(dns.asked)
            assert not hanging.send_message(HELLO)
            dns.addresses = [NOWHERE]
            await until(lambda: not line.send_message(HELLO))
            dns.addresses = [NOWHERE, "127.0.0.1"]
            received.clear()
            await until(answered)
        finally:
            hanging.close()  # returns, though its name hangs
            line.close()
            scheduler.close()

    on_loop(main)
