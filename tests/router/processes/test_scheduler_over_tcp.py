"""Scheduler and front ends as separate programs over tcp: who is let in."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import zmq
from harness.front_ends import complete
from router_harness import TIMEOUT_S, until
from router_processes import Group, Site, site, start_group

from sglang_sbs.router.processes import sockets as sockets_module
from sglang_sbs.router.processes.leading.scheduler_choice import SchedulerChoice
from sglang_sbs.router.processes.messages import (
    VERSION,
    Alive,
    FromScheduler,
    Hello,
    Look,
    Standing,
    ToScheduler,
    encode,
)
from sglang_sbs.router.processes.sockets import FrontEndSocket, SchedulerSocket
from sglang_sbs.wire.curve import CurveKeys, SecretError, keys_in, keys_of
from tools.stand_ins.ports import free_ports

HELLO = Hello(version=VERSION, front_end="me", name="a test")


@pytest.fixture
def keys() -> CurveKeys:
    return keys_of(secrets.token_hex(32))


class Door:
    """A scheduler's socket that notes who says what."""

    def __init__(self, keys: CurveKeys | None) -> None:
        self.taken: list[ToScheduler] = []
        self.socket = SchedulerSocket()
        self.endpoint = self.socket.open("tcp://127.0.0.1:*", keys, self._take)

    def _take(self, identity: bytes, message: ToScheduler) -> None:
        self.taken.append(message)
        answer = Standing(active=True, term=1) if isinstance(message, Look) else Alive()
        self.socket.send_message(identity, answer)

    async def knock(self, keys: CurveKeys | None, seconds: float = TIMEOUT_S) -> bool:
        """Whether a front end with these keys is answered."""
        received: asyncio.Future[FromScheduler] = asyncio.get_running_loop().create_future()
        line = FrontEndSocket(keys, self.endpoint, received.set_result)
        try:
            async with asyncio.timeout(seconds):
                while not line.send_message(HELLO):  # noqa: ASYNC110 - ZMQ connects without an event
                    await asyncio.sleep(0.01)
                await received
        except TimeoutError:
            return False
        finally:
            line.close()
        return True


@pytest.fixture
async def door(keys: CurveKeys) -> AsyncIterator[Door]:
    opened = Door(keys)
    yield opened
    opened.socket.close()


async def test_only_the_same_secret_is_let_in(door: Door, keys: CurveKeys) -> None:
    assert not await door.knock(None, 0.5)
    assert not await door.knock(keys_of(secrets.token_hex(32)), 0.5)
    assert not door.taken
    assert await door.knock(keys)
    assert door.taken == [HELLO]


async def test_knowing_the_servers_public_key_is_not_enough(door: Door, keys: CurveKeys) -> None:
    public, secret = zmq.curve_keypair()
    stranger = CurveKeys(keys.server_public, b"", public, secret)
    assert not await door.knock(stranger, 0.5)
    assert not door.taken
    assert door.socket.counts["refused"] >= 1


async def test_a_front_end_with_keys_speaks_to_no_other_scheduler(keys: CurveKeys) -> None:
    impostor = Door(keys_of(secrets.token_hex(32)))
    try:
        assert not await impostor.knock(keys, 0.5)
        assert not impostor.taken
    finally:
        impostor.socket.close()


async def test_a_socket_that_cannot_be_made_leaves_no_descriptor_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(zmq.ZMQError) as raised:
        FrontEndSocket(None, "tcp://without-a-port", lambda message: None)
    # While the error is still held, and with it all that was in scope. ZeroMQ closes in a thread.
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert raised.value


async def test_garbage_is_counted_and_dropped(door: Door, keys: CurveKeys) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    keys.connect(peer)
    peer.connect(door.endpoint)
    try:
        good = encode(HELLO)
        for frames in (
            [b"x"],
            [b"", b""],
            [good[0], b"\xc1"],
            [b"other", good[1]],
            [*good, b"more"],
            [good[0], b"\x81\xa4type\xa8NoSuchOne"],
            [good[0], b"\x80\x04\x95pickle"],
        ):
            peer.send_multipart(frames)
        peer.send_multipart(good)
        await until(lambda: door.taken)
        assert door.taken == [HELLO]
        assert door.socket.counts["malformed"] == 7
    finally:
        peer.close(0)
        context.term()


async def test_a_scheduler_with_another_secret_is_passed_over(keys: CurveKeys) -> None:
    stranger, friend = Door(keys_of(secrets.token_hex(32))), Door(keys)

    def dial(endpoint: str, receive: Callable[[FromScheduler], None]) -> FrontEndSocket:
        return FrontEndSocket(keys, endpoint, receive)

    choice = SchedulerChoice([stranger.endpoint, friend.endpoint], dial, "a test")
    line = choice.connect(lambda message: None)
    try:
        assert choice.target == stranger.endpoint
        async with asyncio.timeout(TIMEOUT_S):
            while not choice.look(served=False):  # noqa: ASYNC110 - ZMQ connects without an event
                await asyncio.sleep(0.01)
        assert choice.target == friend.endpoint
        assert {type(message) for message in friend.taken} == {Look}
        assert not stranger.taken
    finally:
        line.close()
        choice.close()
        stranger.socket.close()
        friend.socket.close()


class Swallower:
    """Passes bytes on to an endpoint until it swallows them, and breaks no connection."""

    def __init__(self) -> None:
        self.swallows = False
        self.accepted = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, endpoint: str) -> str:
        self._to = int(endpoint.rpartition(":")[2])
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _accepted(self, near: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        far, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers += [writer, far_writer]
        for source, sink in ((near, far_writer), (far, writer)):
            task = asyncio.create_task(self._pass_on(source, sink, swallowed=self.swallows))
            self._tasks.add(task)

    async def _pass_on(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, swallowed: bool
    ) -> None:
        while piece := await source.read(65536):
            swallowed = swallowed or self.swallows  # for good: as a firewall that forgot it
            if not swallowed:
                sink.write(piece)

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.close()


async def test_a_connection_that_is_swallowed_for_good_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, keys: CurveKeys
) -> None:
    monkeypatch.setattr(sockets_module, "_HEARTBEAT_MS", 50)
    monkeypatch.setattr(sockets_module, "_SILENCE_MS", 200)
    door, network = Door(keys), Swallower()
    received: list[FromScheduler] = []
    line = FrontEndSocket(keys, await network.open(door.endpoint), received.append)

    async def answered() -> None:
        before = len(received)
        async with asyncio.timeout(TIMEOUT_S):
            while len(received) == before:
                line.send_message(HELLO)
                await asyncio.sleep(0.02)

    try:
        await answered()
        connections = network.accepted
        network.swallows = True
        await until(lambda: network.accepted > connections)
        network.swallows = False
        await answered()
    finally:
        line.close()
        await network.close()
        door.socket.close()


def test_a_secret_must_be_long_and_readable(tmp_path: Path) -> None:
    with pytest.raises(SecretError, match="openssl rand"):
        keys_of("short")
    with pytest.raises(SecretError, match="cannot read"):
        keys_in(tmp_path / "none")
    path = tmp_path / "secret"
    path.write_text(secrets.token_hex(32) + "\n")
    assert keys_in(path) == keys_of(path.read_text().strip())


async def test_front_ends_of_another_machine_need_no_workers_but_the_secret(
    tmp_path: Path,
) -> None:
    """And they serve on while the scheduler's machine is away."""
    path = tmp_path / "secret"
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    key = ("--sbs-scheduler-key-file", str(path))
    async with site() as engines:

        async def schedule(endpoint: str) -> Group:
            role = (*key, "--sbs-role", "scheduler", "--sbs-scheduler", endpoint)
            return await start_group(*engines.flags, *role, ready="scheduler: policy")

        scheduler = await schedule("tcp://127.0.0.1:*")
        endpoint = scheduler.find("scheduler: policy")[0].split(" at ")[1].split(",")[0]
        role = (*key, "--sbs-role", "front-end", "--sbs-scheduler", endpoint)
        front_ends = await start_group(*role, "--port", "0", "--workers", "2")

        async def all_served() -> bool:
            asked = (engines.generate(front_ends.url) for _ in range(12))
            return all(map(complete, await asyncio.gather(*asked)))

        try:
            assert sorted(front_ends.pids) == ["front end 0", "front end 1"]
            assert await all_served()
            scheduler.process.kill()
            await front_ends.says("lost the scheduler", times=2)
            assert await all_served()
            await scheduler.end()
            scheduler = await schedule(endpoint)
            await front_ends.says("connected to the restarted scheduler", times=2)
            assert await all_served()
        finally:
            await front_ends.end()
            await scheduler.end()
        assert scheduler.process.returncode == front_ends.process.returncode == 0


async def test_a_standby_takes_over_from_a_scheduler_that_was_killed() -> None:
    """The commands themselves: no request fails, and it is said who schedules."""
    *ports, metrics = free_ports(3)  # the one after it must be free, too: none of outgoing ones
    both = ",".join(f"tcp://127.0.0.1:{port}" for port in ports)
    async with site(prefill=1) as engines:
        listen = ("--sbs-role", "scheduler", "--sbs-scheduler", both, "--sbs-listen")
        schedulers = [
            await start_group(
                *(*engines.flags, *listen, f"tcp://127.0.0.1:{port}", *own),
                ready="scheduler: policy",
            )
            for port, own in zip(ports, (("--prometheus-port", str(metrics)), ()), strict=True)
        ]
        # With the very flag of a scheduler: on one machine it must find its port free again.
        theirs = ("--prometheus-port", str(schedulers[0].metrics_port))
        front_end = await start_group("--sbs-scheduler", both, "--port", "0", *theirs)
        try:
            assert front_end.metrics_port == schedulers[0].metrics_port + 1
            await front_end.says(f"connected to the scheduler .*:{ports[0]}, term 1")
            # A front end far from its scheduler has a page of its own.
            served = [
                f'sbs_front_ends_served{{scheduler="{address}"}}' for address in both.split(",")
            ]
            await engines.shows(front_end, served[0], 1)
            assert await _standing(engines, schedulers[1]) == "standby"
            schedulers[0].process.kill()
            await front_end.says("lost the scheduler")
            asked = (engines.generate(front_end.url) for _ in range(12))
            assert all(map(complete, await asyncio.gather(*asked)))
            await front_end.says(f"connected to the other scheduler .*:{ports[1]}, term 2")
            assert complete(await engines.generate(front_end.url))
            assert await _standing(engines, schedulers[1]) == "active"
            async with engines.client.get(front_end.url + "/workers") as got:
                shown = (await got.json())["scheduler"]
            assert (shown["address"], shown["term"]) == (both.split(",")[1], 2)
            assert (shown["connected"], shown["changes"], shown["losses"]) == (True, 1, 1)
            await engines.shows(front_end, served[1], 1)
            await engines.shows(front_end, "sbs_scheduler_losses_total", 1)
            await engines.shows(front_end, "smg_pd_ttft_seconds_count", 13)
        finally:
            for group in (front_end, *schedulers):
                await group.end()


async def _standing(engines: Site, scheduler: Group) -> str:
    url = f"http://127.0.0.1:{scheduler.metrics_port}"
    async with engines.client.get(url + "/readiness") as got:
        assert got.status == 200
        standing = str((await got.json())["scheduler"])
    async with engines.client.get(url + "/active") as got:
        assert (got.status == 200) == (standing == "active")
    return standing
