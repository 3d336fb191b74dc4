"""Resources that clients could keep for ever: decode slots, bodies that stall, connections,
dashboards."""

from __future__ import annotations

import asyncio
import gc
import heapq
import socket
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import orjson
import pytest
from aiohttp import HttpVersion11
from router_harness import cluster, until

from sglang_sbs.router.client import answer_stream
from sglang_sbs.router.client.answer_stream import Downstream
from sglang_sbs.router.client.intake import Doorman, Gate
from sglang_sbs.router.options.config import ClientPace
from sglang_sbs.router.telemetry.metrics_port import MAX_CONNECTIONS
from tools.stand_ins.mock_engine import Behaviour


class FakeLoop:
    """Time that only passes between timers."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls = 0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now_s + delay_s, self.calls, call))
        self.calls += 1

    def run(self) -> None:
        while self._timers and self.now_s < 10_000:
            self.now_s, _, call = heapq.heappop(self._timers)
            call()


class StuckClient:
    """A client, and its transport, that reads so many bytes per second."""

    version = HttpVersion11

    def __init__(self, loop: FakeLoop, bytes_per_s: int) -> None:
        self.transport = self
        self.aborted = False
        self.written = 0
        self._loop, self._bytes_per_s = loop, bytes_per_s

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True

    def write(self, data: bytes) -> None:
        self.written += len(data)

    def get_write_buffer_size(self) -> int:
        return max(0, self.written - round(self._loop.now_s * self._bytes_per_s))


class Source:
    paused = False

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


@pytest.mark.parametrize(
    ("bytes_per_s", "let_go"), [(0, True), (1000, True), (40_000, False), (10**7, False)]
)
@pytest.mark.parametrize("size", [2 << 20, 50 << 20])
def test_a_client_keeps_a_stream_paused_for_as_long_as_its_size_is_worth(
    size: int, bytes_per_s: int, let_go: bool, monkeypatch: Any
) -> None:
    loop = FakeLoop()
    monkeypatch.setattr(answer_stream.asyncio, "get_running_loop", lambda: loop)
    client, source = StuckClient(loop, bytes_per_s), Source()
    stream = Downstream(client, {0: source})  # type: ignore[arg-type,dict-item]
    stream._transport = client  # type: ignore[assignment]
    stream.push(bytes(size))
    assert source.paused
    loop.run()
    assert client.aborted is let_go
    assert source.paused is let_go
    if bytes_per_s == 0:
        assert loop.calls < 10 * loop.now_s  # not fifty times a second for each of hundreds


async def test_a_client_that_stops_reading_loses_its_place_on_decode() -> None:
    """Long before its request times out (1,800 s)."""
    pace = ClientPace(finish_s=0.2, min_bytes_per_s=1 << 30)
    async with cluster(relay={"pace": pace}) as c:
        c.decode[0].behaviour = Behaviour(tokens=8000)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", c.server.port))
        body = orjson.dumps({"text": "x", "stream": True})
        head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        await asyncio.get_running_loop().sock_sendall(sock, head + body)
        await until(lambda: len(c.decode[0].requests) == 1)
        await c.decode[0].aborted(c.decode[0].requests[0].rid)
        await c.settled()
        c.check_books()
        assert c.scheduler.ended() == ["aborted"]
        sock.close()


@pytest.mark.parametrize("method", ["POST /workers", "PUT /workers/%s", "POST /abort_request"])
async def test_the_body_of_a_control_request_must_come(method: str) -> None:
    async with cluster(relay={"pace": ClientPace(grace_s=0.05)}) as c:
        worker = next(iter(c.server.registry))
        line = (method % worker.id if "%" in method else method).encode() + b" HTTP/1.1\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", c.server.port)
        writer.write(line + b"Host: x\r\nContent-Length: 100\r\n\r\n{")
        async with asyncio.timeout(20):
            assert (await reader.readline()).split()[1] == b"408"
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", c.server.port)
        writer.write(line + b"Host: x\r\nContent-Length: 2000000\r\n\r\n" + b" " * 2_000_000)
        async with asyncio.timeout(20):
            assert (await reader.readline()).split()[1] == b"413"
        writer.close()


async def connect(port: int, count: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    return [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]


def closed(ends: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> int:
    return sum(reader.at_eof() or reader.exception() is not None for reader, _ in ends)


async def test_silent_connections_to_the_metrics_port_are_few_and_lock_nobody_out() -> None:
    """It shares descriptors with the serving port."""
    async with cluster() as c:
        port = c.server.prometheus_port
        silent = await connect(port, 3 * MAX_CONNECTIONS)
        await until(lambda: closed(silent) == 2 * MAX_CONNECTIONS)
        async with c.client.get(f"http://127.0.0.1:{port}/metrics") as response:
            assert response.status == 200
            assert b"sbs_prompts_total" in await response.read()
        await until(lambda: closed(silent) == 2 * MAX_CONNECTIONS + 1)
        for _, writer in silent:
            writer.close()


async def test_of_scrapers_that_spoke_the_longest_idle_go() -> None:
    """Probes ask this port, too: nobody keeps all its places."""
    async with cluster() as c:
        ends = await connect(c.server.prometheus_port, MAX_CONNECTIONS)
        for reader, writer in ends:
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
        assert closed(ends) == 0
        more = await connect(c.server.prometheus_port, 5)
        await until(lambda: closed(ends) == 5)
        assert closed(ends[:5]) == 5
        assert closed(more) == 0
        for _, writer in ends + more:
            writer.close()


@pytest.mark.parametrize("path", ["POST /generate", "GET /health"])
async def test_of_idle_connections_to_the_serving_port_the_longest_idle_go(path: str) -> None:
    asked = b'%b HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\n\r\n{"text":"x"}' % path.encode()
    async with cluster() as c:
        c.server.doorman._most = 20
        idle = []
        for _ in range(50):
            idle += await connect(c.server.port, 1)
            idle[-1][1].write(asked)
            head = await idle[-1][0].readuntil(b"\r\n\r\n")
            await idle[-1][0].readexactly(
                int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            )
        await until(lambda: closed(idle) >= 30)
        assert closed(idle[:30]) == closed(idle) == 30
        assert (await c.generate(text="x"))[0] == 200
        for _, writer in idle:
            writer.close()


async def test_of_silent_connections_to_the_serving_port_the_oldest_go() -> None:
    async with cluster() as c:
        c.server.doorman._most = 20
        silent = await connect(c.server.port, 50)
        await until(lambda: closed(silent) == 30)
        assert closed(silent[:30]) == 30
        assert (await c.generate(text="x"))[0] == 200
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize(
    "asked",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.0\r\n\r\n",
        b"\x16\x03\x01 no HTTP\r\n\r\n",
        b"GET /hea",
        b"",
    ],
    ids=["kept", "close", "1.0", "nonsense", "cut off", "silent"],
)
@pytest.mark.parametrize("metrics", [False, True], ids=["serving", "metrics"])
async def test_connections_that_are_gone_leave_the_books(asked: bytes, metrics: bool) -> None:
    """Whoever ends them: else they stand for places that nobody has."""
    async with cluster() as c:
        assert c.server._metrics_port is not None
        port = c.server.prometheus_port if metrics else c.server.port
        doorman = c.server._metrics_port._doorman if metrics else c.server.doorman
        waiting = doorman._waiting
        known = set(waiting)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: any(transport not in known for transport in waiting))
        writer.write(asked)
        if asked.endswith(b"\r\n\r\n"):
            await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await until(lambda: all(transport in known for transport in waiting))


async def test_what_is_closed_already_makes_no_room() -> None:
    doorman = Doorman()
    gone, there = Mock(), Mock()
    gone.is_closing.return_value, there.is_closing.return_value = True, False
    gone.get_write_buffer_size.return_value = there.get_write_buffer_size.return_value = 0
    doorman.watch(gone)
    doorman.watch(there)
    assert doorman.close_oldest()
    there.abort.assert_called_once()
    gone.abort.assert_not_called()


async def test_who_serves_a_connection_goes_with_it() -> None:
    """Not with the garbage collector's next turn: strangers may come and go by the thousand."""

    class Serves(asyncio.Protocol):
        """One that can be watched."""

    served: list[weakref.ref[Serves]] = []

    def serve() -> Serves:
        protocol = Serves()
        served.append(weakref.ref(protocol))
        return protocol

    doorman = Doorman()
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: Gate(doorman, serve), "127.0.0.1", 0) as server:
        gc.disable()
        try:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            await until(lambda: len(served) == 1)
            writer.close()
            await until(lambda: served[0]() is None)
        finally:
            gc.enable()
