"""Compares how two parsers read the same bytes: h11, and aiohttp as it is on the router's serving
port.

Where both go on, they must read the same: a proxy in front of the router that believes one and a
router that believes the other would let a client smuggle requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import h11
from aiohttp import web

from sglang_sbs.router.client.intake import MAX_HEAD_LINE_BYTES, Doorman, Gate, ParserLog

PATIENCE_S = 20.0
_QUIET_TURNS = 30

Request = tuple[str, str, bytes]
"""Method, target, body."""


@dataclass
class Reading:
    """The requests that a parser read in the bytes."""

    requests: list[Request] = field(default_factory=list)
    ended: bool = False
    """It would read no further: an error, or the last request of the connection."""


def read_with_h11(data: bytes) -> Reading:
    """Everything to the end of the bytes, after which the sender is silent."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_LINE_BYTES * 4)
    connection.receive_data(data)
    reading = Reading()
    head: h11.Request | None = None
    body = b""
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            reading.ended = True
            return reading
        if isinstance(event, h11.Request):
            head, body = event, b""
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None
            method, target = head.method.decode(), head.target.decode("latin-1")
            reading.requests.append((method, target, body))
            connection.send(h11.Response(status_code=404, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is h11.MUST_CLOSE or connection.their_state is not h11.DONE:
                reading.ended = True
                return reading
            connection.start_next_cycle()
        elif event is h11.NEED_DATA:
            return reading
        elif event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
            reading.ended = True
            return reading


class Oracles:
    """A server that reads what a router would; :func:`oracles` starts it."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._port = 0

    async def _note(self, request: web.BaseRequest) -> web.Response:
        body = await request.read()
        self._requests.append((request.method, request.raw_path, body))
        return web.Response()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = web.Server(
            self._note,
            logger=ParserLog(lambda: None),
            access_log=None,
            handler_cancellation=True,
            auto_decompress=False,
            max_line_size=MAX_HEAD_LINE_BYTES,
            max_field_size=MAX_HEAD_LINE_BYTES,
        )
        gate = partial(Gate, Doorman(), server)
        listening = await asyncio.get_running_loop().create_server(gate, "127.0.0.1", 0)
        self._port = listening.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            listening.close()
            await server.shutdown(0.1)

    async def disagreement(self, data: bytes) -> str:
        """How they differ about these bytes; empty: they do not."""
        return difference("aiohttp", await self._read(data), "h11", read_with_h11(data))

    async def _read(self, data: bytes) -> Reading:
        reading = Reading()
        self._requests = reading.requests
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        answer = b""
        try:
            async with asyncio.timeout(PATIENCE_S):
                writer.write(data)
                await quiet(lambda: len(reading.requests))
                reading.ended = writer.transport.is_closing() or reader.at_eof()
                writer.write_eof()
                answer = await reader.read(-1)
        except OSError:
            reading.ended = True
        finally:
            writer.close()
        refused = b"HTTP/1.1 4" in answer or b"HTTP/1.0 4" in answer or b"HTTP/1.1 5" in answer
        reading.ended |= refused or b"onnection: close" in answer
        return reading


def difference(reader: str, by_one: Reading, other: str, by_other: Reading) -> str:
    """One may refuse where another reads on, but they may not read different things."""
    for name, mine, who, its in (
        (reader, by_one, other, by_other),
        (other, by_other, reader, by_one),
    ):
        common = len(its.requests)
        if mine.requests[:common] != its.requests[: len(mine.requests)]:
            return f"{name} reads {mine.requests!r:.300}, {who} {its.requests!r:.300}"
        if len(mine.requests) > common and not its.ended:
            return f"{who} waits for more after {common}, {name} reads {mine.requests!r:.300}"
    return ""


async def quiet(progress: Callable[[], object]) -> None:
    """Until nothing has happened for some turns of the loop, in which both ends run."""
    before, still = progress(), 0
    while still < _QUIET_TURNS:
        await asyncio.sleep(0)
        now = progress()
        still = still + 1 if now == before else 0
        before = now


@asynccontextmanager
async def oracles() -> AsyncIterator[Oracles]:
    found = Oracles()
    async with found.serving():
        yield found
