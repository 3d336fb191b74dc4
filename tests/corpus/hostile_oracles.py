"""What three parsers read in the same bytes: h11, aiohttp alone, and the router's serving port.

The port serves plain requests itself and hands all others to aiohttp: it must read exactly what
aiohttp reads. Where h11 and aiohttp both go on, they must read the same: a proxy in front of the
router that believes one and a router that believes the other would let a client smuggle requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import h11
from aiohttp import web

from sglang_sbs.router.answer import Answer
from sglang_sbs.router.client.client import Client
from sglang_sbs.router.client.intake import MAX_HEAD_LINE_BYTES, Doorman, ParserLog
from sglang_sbs.router.client.serving_port import DirectPort, RequestHead

PATIENCE_S = 20.0
_MAX_BODY_BYTES = 8 << 20
_QUIET_TURNS = 30
PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")

Request = tuple[str, str, bytes]
"""Method, target, body."""


@dataclass
class Reading:
    """What a parser took of the bytes."""

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


class _Recorder:
    """A web server, and the service of a serving port, that notes what it is asked."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.draining = False

    async def through_web(self, request: web.BaseRequest) -> web.Response:
        body = await request.read()
        self.requests.append((request.method, request.raw_path, body))
        return web.Response()

    def takes(self, head: RequestHead) -> bool:
        return head.content_length <= _MAX_BODY_BYTES

    def identify(self, head: RequestHead) -> str:
        return "x"

    def head_lines(self, head: RequestHead, identifier: str) -> bytes:
        return b""

    async def serve(self, head: RequestHead, identifier: str, client: Client) -> Answer | None:
        body = b""
        while len(body) < head.content_length:
            piece = await client.content.readany()
            if not piece:
                break
            body += piece
        self.requests.append(("POST", head.path, body))
        return Answer(200, b"", "text/plain")


class Oracles:
    """Servers that read what a router would; :func:`oracles` starts them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._web = _Recorder()
        self._port = _Recorder()
        self._ports = (0, 0)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        plain, behind = (
            web.Server(
                recorder.through_web,
                logger=ParserLog(lambda: None),
                access_log=None,
                handler_cancellation=True,
                auto_decompress=False,
                max_line_size=MAX_HEAD_LINE_BYTES,
                max_field_size=MAX_HEAD_LINE_BYTES,
            )
            for recorder in (self._web, self._port)
        )
        direct = DirectPort(self._port, PATHS, Doorman(), behind)
        self._stack.push_async_callback(direct.close, 1.0)
        ports = []
        for factory in (plain, direct):
            listening = await loop.create_server(factory, "127.0.0.1", 0)
            self._stack.callback(listening.close)
            ports.append(listening.sockets[0].getsockname()[1])
        self._ports = (ports[0], ports[1])
        for served in (plain, behind):
            self._stack.push_async_callback(served.shutdown, 0.1)

    async def disagreement(self, data: bytes) -> str:
        """How they differ about these bytes; empty: they do not."""
        by_web = await self._read(self._web, self._ports[0], data)
        by_port = await self._read(self._port, self._ports[1], data)
        by_h11 = read_with_h11(data)
        return (
            difference("aiohttp", by_web, "the serving port", by_port)
            or difference("aiohttp", by_web, "h11", by_h11)
            or difference("the serving port", by_port, "h11", by_h11)
        )

    async def _read(self, recorder: _Recorder, port: int, data: bytes) -> Reading:
        reading = Reading()
        recorder.requests = reading.requests
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
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


def difference(one: str, by_one: Reading, other: str, by_other: Reading) -> str:
    """One may refuse where another reads on, but they may not read different things."""
    for name, mine, who, its in ((one, by_one, other, by_other), (other, by_other, one, by_one)):
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
    async with AsyncExitStack() as stack:
        found = Oracles(stack)
        await found.start()
        yield found
