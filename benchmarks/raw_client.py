"""The client's side of relay measurements: many streams, probes of the first byte, short requests.

As the engines of :mod:`.raw_engine` it works on raw bytes: a full HTTP client would cost more than
what is measured.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

import orjson

_EVENT = b"data: "
_END = b"\r\n0\r\n\r\n"
ENDLESS = 1_000_000_000
CONNECT_AT_ONCE = 128
"""Connections that are being opened at the same time: less than any listener's backlog."""


_PROMPT = "How much does it cost to be passed on?"


def chat_request(max_tokens: int, *, stream: bool, prompt: str = _PROMPT) -> bytes:
    body = orjson.dumps(
        {
            "model": "raw",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "stream": stream,
        }
    )
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json"
        b"\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )


@dataclass(slots=True)
class Tally:
    events: int = 0
    complete: int = 0
    failures: Counter[str] = field(default_factory=Counter)


class Exchange(asyncio.Protocol):
    __slots__ = ("_head", "_left", "_tail", "_tally", "done", "first_s", "opened", "transport")
    transport: asyncio.Transport

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._head = b""
        self._left = 0
        self._tail = b""
        self.first_s = 0.0
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[bool] = loop.create_future()
        """The first event is here (True) or the request failed before."""
        self.done: asyncio.Future[bool] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert hasattr(transport, "write")
        self.transport = transport  # type: ignore[assignment]

    def send(self, request: bytes) -> None:
        """The next request; the one before must be done."""
        loop = asyncio.get_running_loop()
        self._head = self._tail = b""
        self._left = -1  # chunked, or its head is still to come
        self.first_s = 0.0
        self.opened, self.done = loop.create_future(), loop.create_future()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        if not self._tail:
            data = self._begin(data)
            if not data:
                return
        if self._left > 0:
            self._left -= len(data)
            if self._left <= 0:
                self._finish(True)
            return
        self._tally.events += data.count(_EVENT)
        if not self.first_s and _EVENT in data:
            self.first_s = time.perf_counter()
            self.opened.set_result(True)
        # A router may cut anywhere; the events' own text never contains this.
        if (self._tail + data).endswith(_END):
            self._finish(True)
        else:
            self._tail = data[-len(_END) :]

    def _begin(self, data: bytes) -> bytes:
        """Consume the head; returns what is behind it."""
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            return b""
        head, data = self._head[:end], self._head[end + 4 :]
        if not head.startswith(b"HTTP/1.1 200"):
            self._fail("status " + head[9:12].decode("latin-1"))
            return b""
        self._tail = b"\r\n"
        at = head.lower().find(b"content-length:")
        if at >= 0:
            self._left = int(head[at + 15 :].split(b"\r\n", 1)[0])
        return data

    def _finish(self, good: bool) -> None:
        if not self.opened.done():
            self.opened.set_result(good)
        if not self.done.done():
            self._tally.complete += good
            self.done.set_result(good)

    def _fail(self, what: str) -> None:
        if not self.done.done():
            self._tally.failures[what] += 1
        self._finish(False)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("connection lost")

    def close(self) -> None:
        """Hang up; what was under way is no failure."""
        self._finish(False)
        self.transport.abort()


async def connect(port: int, tally: Tally) -> Exchange:
    """Raises: OSError."""
    loop = asyncio.get_running_loop()
    _, exchange = await loop.create_connection(lambda: Exchange(tally), "127.0.0.1", port)
    return exchange


async def open_streams(port: int, count: int) -> tuple[list[Exchange], Tally]:
    """Streams that have all had their first event, but for those counted in ``failures``."""
    tally = Tally()
    gate = asyncio.Semaphore(CONNECT_AT_ONCE)
    request = chat_request(ENDLESS, stream=True)

    async def ask() -> Exchange | None:
        async with gate:
            try:
                exchange = await connect(port, tally)
            except OSError as error:
                tally.failures[f"connect: {error.strerror}"] += 1
                return None
            exchange.send(request)
            await exchange.opened
            return exchange

    opened = await asyncio.gather(*(ask() for _ in range(count)))
    return [exchange for exchange in opened if exchange is not None], tally


async def probe_first_byte(port: int, seconds: float, *, kept: bool) -> list[float]:
    """Short streams one after another; seconds from each request to its first event.

    On one connection that is ``kept``, or each on a new one (its connecting not counted). On a kept
    one Linux delays acknowledgements by 40 ms: a router that leaves Nagle's algorithm on and sends
    head and first event apart then waits for as long.

    Raises:
        RuntimeError: one failed.
    """
    request = chat_request(2, stream=True)
    tally = Tally()
    exchange = await connect(port, tally)
    taken: list[float] = []
    end_s = time.perf_counter() + seconds
    try:
        while time.perf_counter() < end_s:
            started_s = time.perf_counter()
            exchange.send(request)
            if not await exchange.done:
                raise RuntimeError(f"a probe failed: {dict(tally.failures)}")
            taken.append(exchange.first_s - started_s)
            if not kept:
                exchange.close()
                exchange = await connect(port, tally)
    finally:
        exchange.close()
    return taken


async def closed_loop(port: int, clients: int, seconds: float) -> Tally:
    """Each client sends its next short request, not streamed, when it has its answer."""
    request = chat_request(1, stream=False)
    tally = Tally()
    end_s = time.perf_counter() + seconds

    async def client() -> None:
        exchange = await connect(port, tally)
        while time.perf_counter() < end_s:
            exchange.send(request)
            if not await exchange.done:
                return
        exchange.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return tally
