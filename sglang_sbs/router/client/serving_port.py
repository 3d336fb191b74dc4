"""The serving port: plain inference requests are served here, every other one by aiohttp.

Owns the connections of the serving port until they are handed to aiohttp, and HTTP/1.1 as far as an
ordinary inference request needs it. A request in any way out of the ordinary is not judged here:
its connection, with every byte of it, goes to aiohttp for good. So this parser only has to know
what it may accept, and is never the one to interpret something doubtful. What this saves is most of
what a request costs in the web server: at its first byte that is a third of a millisecond. Must not
know what a request is about.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from typing import Protocol

from sglang_sbs.router.answer import Answer
from sglang_sbs.router.client.answer_stream import FINISH_S
from sglang_sbs.router.client.client import Client
from sglang_sbs.router.client.intake import MIN_BYTES_PER_S, Doorman, Leaving
from sglang_sbs.router.errors import reason_phrase

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 8000
"""Below the limits of aiohttp, which refuses what is larger."""
_LINGER_S = 2.0
"""For a client to read why its body was not wanted, before the connection is closed on it."""
_LARGE_PIECE_BYTES = 64 << 10
"""After a piece so large of a body or an answer, other connections get their turn."""
_MAX_EARLY_BYTES = 1 << 20
"""Of a next request that comes before the answer to this one."""

_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([ -~\t]*)")
_LENGTH = re.compile(r"[0-9]{1,12}")
_NOT_HERE = frozenset(
    {"transfer-encoding", "content-encoding", "expect", "upgrade", "proxy-connection", "trailer"}
)
"""Headers that make a request one for aiohttp."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """``POST`` to one of the paths served here, by HTTP/1.1, with a length."""

    path: str
    fields: Mapping[str, str]
    """By name in lower case; none comes twice."""
    content_length: int
    close: bool
    """The client wants the connection closed after the answer."""


def parse_plain_head(data: bytes, paths: Mapping[str, str]) -> RequestHead | None:
    """A request head without its final empty line; ``None``: not an ordinary one.

    Args:
        paths: the path of each request line that is served.
    """
    try:
        first, *lines = data.decode("ascii").split("\r\n")
    except UnicodeDecodeError:
        return None
    path = paths.get(first)
    if path is None:
        return None
    fields: dict[str, str] = {}
    for line in lines:
        match = _FIELD.fullmatch(line)
        if match is None:
            return None
        name = match[1].lower()
        if name in fields or name in _NOT_HERE:
            return None
        fields[name] = match[2].rstrip(" \t")
    connection = fields.get("connection", "keep-alive").lower()
    length = fields.get("content-length", "")
    if (
        "host" not in fields
        or connection not in ("keep-alive", "close")
        or _LENGTH.fullmatch(length) is None
    ):
        return None
    return RequestHead(path, fields, int(length), connection == "close")


class Service(Protocol):
    """What is behind the port."""

    def takes(self, head: RequestHead) -> bool:
        """Whether :meth:`serve` answers it; else aiohttp does, or refuses it."""

    def identify(self, head: RequestHead) -> str:
        """The request's id."""

    async def serve(self, head: RequestHead, identifier: str, client: Client) -> Answer | None:
        """The answer; ``None``: it was streamed to the client."""

    def head_lines(self, head: RequestHead, identifier: str) -> bytes:
        """Header lines of every answer to it, each ending in CRLF."""

    @property
    def draining(self) -> bool:
        """Every answer is the last on its connection."""


class DirectPort:
    """Makes the protocol of each new connection; ``close`` ends those that are left."""

    def __init__(
        self,
        service: Service,
        paths: tuple[str, ...],
        doorman: Doorman,
        web: Callable[[], asyncio.Protocol],
    ) -> None:
        """``web`` makes aiohttp's protocol for a connection that is handed over."""
        self.service = service
        self.paths = {f"POST {path} HTTP/1.1": path for path in paths}
        self.doorman = doorman
        self.web = web
        self.connections: set[_Connection] = set()
        self._date = (0, b"")
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> asyncio.Protocol:
        """A protocol for a new connection."""
        return _Connection(self, self._loop)

    def date(self) -> bytes:
        """The header line."""
        now = int(time.time())
        if self._date[0] != now:
            self._date = (now, f"Date: {formatdate(now, usegmt=True)}\r\n".encode())
        return self._date[1]

    async def close(self, patience_s: float) -> None:
        """Close every connection, after what was written to it has left, or after that time."""
        tasks = [c.task for c in self.connections if c.task is not None]
        for connection in list(self.connections):
            connection.close()
        if tasks:
            await asyncio.wait(tasks, timeout=patience_s)
        for connection in list(self.connections):
            if connection.transport is not None:
                connection.transport.abort()


class _Connection(asyncio.Protocol):
    """A client's connection, and the :class:`~.client.Client` of the request being served."""

    __slots__ = (
        "_body_left",
        "_drained",
        "_early",
        "_ended",
        "_full",
        "_head",
        "_identifier",
        "_last",
        "_lingers",
        "_loop",
        "_more",
        "_pieces",
        "_port",
        "_unsent",
        "_writable",
        "task",
        "transport",
    )

    chunked = True

    def __init__(self, port: DirectPort, loop: asyncio.AbstractEventLoop) -> None:
        self._port = port
        self._loop = loop
        self.transport: asyncio.Transport | None = None
        self.task: asyncio.Task[None] | None = None
        self._head: RequestHead | None = None
        self._identifier = ""
        self._body_left = 0
        self._pieces: list[bytes] = []
        self._more: asyncio.Future[None] | None = None
        self._early = b""
        self._full = False
        """Nothing more is read until the pieces here are taken."""
        self._last = False
        self._lingers = False
        self._ended = False
        self._unsent: bytes | bytearray = b""
        """Of a large answer: it is written as the client takes it, a piece in a turn."""
        self._writable = True
        self._drained: asyncio.Future[None] | None = None

    # The connection ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._port.connections.add(self)
        self._port.doorman.watch(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        transport, self.transport = self.transport, None
        self._port.connections.discard(self)
        if transport is not None:
            self._port.doorman.heard(transport)
        if self.task is not None:
            self.task.cancel()
        self.resume_writing()

    def close(self) -> None:
        """After what was written has left."""
        if self.transport is not None:
            self.transport.close()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._lingers:
            return
        if self.task is None:
            self._begin(data)
        elif self._body_left:
            self._body_received(data)
        else:
            self._early += data
            if len(self._early) > _MAX_EARLY_BYTES and self.transport is not None:
                self.transport.pause_reading()

    def _begin(self, data: bytes) -> None:
        end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        head = parse_plain_head(data[:end], self._port.paths) if end > 0 else None
        if head is None or not self._port.service.takes(head):
            self._hand_over(data)
            return
        transport = self.transport
        assert transport is not None
        self._port.doorman.heard(transport)
        self._head = head
        self._identifier = self._port.service.identify(head)
        self._last = head.close
        self._ended = False
        self._body_left = head.content_length
        self.task = self._loop.create_task(self._serve(head))
        self._body_received(data[end + 4 :])

    def _body_received(self, data: bytes) -> None:
        left = self._body_left
        if len(data) > left:
            self._early = data[left:]
            data = data[:left]
        self._body_left = left - len(data)
        if data:
            self._pieces.append(data)
        if len(data) >= _LARGE_PIECE_BYTES and self._body_left and self.transport is not None:
            self._full = True
            self.transport.pause_reading()
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    def _read_on(self) -> None:
        if self._full and self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()
        self._full = False

    def _hand_over(self, data: bytes) -> None:
        """To aiohttp, for good; with the doorman its time goes on, until it is gone."""
        transport, self.transport = self.transport, None
        assert transport is not None
        self._port.connections.discard(self)
        web = self._port.web()
        transport.set_protocol(Leaving(web, partial(self._port.doorman.heard, transport)))
        web.connection_made(transport)
        web.data_received(data)

    # One request ------------------------------------------------------------------------------

    async def _serve(self, head: RequestHead) -> None:
        try:
            answer = await self._port.service.serve(head, self._identifier, self)
            if answer is not None:
                self._write(answer)
                await self._finish()
        except ConnectionError:
            self._last = True
        except BaseException:
            self._last = True
            raise
        finally:
            self.task = None
            self._done()

    def _write(self, answer: Answer) -> None:
        if self.transport is None:
            return
        lines = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
        status = f"HTTP/1.1 {answer.status} {reason_phrase(answer.status)}\r\n"
        rest = f"Content-Type: {answer.content_type}\r\nContent-Length: {len(answer.body)}\r\n"
        head = (status + rest + lines).encode("latin-1", "replace")
        head += self._common_lines()
        if len(answer.body) <= _LARGE_PIECE_BYTES:
            self.transport.write(b"".join((head, answer.body)))
            return
        self.transport.write(head)
        self._unsent = answer.body

    def _common_lines(self) -> bytes:
        """And the empty one at the end."""
        port = self._port
        assert self._head is not None
        # An answer before the body's end: what is left of it cannot be told from a next request.
        self._last = self._last or self._body_left > 0 or port.service.draining
        own = port.service.head_lines(self._head, self._identifier)
        close = b"Connection: close\r\n\r\n" if self._last else b"\r\n"
        return b"%b%b%b" % (port.date(), own, close)

    async def _finish(self) -> None:
        """Write what is left of a large answer, and wait until the client has taken nearly all."""
        if self._writable and not self._unsent:
            return
        unsent, self._unsent = self._unsent, b""
        try:
            due_s = self._loop.time() + FINISH_S
            async with asyncio.timeout_at(due_s) as deadline:
                for at in range(0, len(unsent), _LARGE_PIECE_BYTES):
                    if self.transport is None or self.transport.is_closing():
                        return
                    self.transport.write(unsent[at : at + _LARGE_PIECE_BYTES])
                    await (asyncio.sleep(0) if self._writable else self.drained())
                    # Each piece buys its time at the slowest pace, and nobody saves up more.
                    due_s += _LARGE_PIECE_BYTES / MIN_BYTES_PER_S
                    due_s = min(due_s, self._loop.time() + FINISH_S)
                    deadline.reschedule(due_s)
                await self.drained()
        except TimeoutError:
            if self.transport is not None:
                self.transport.abort()
            raise ConnectionResetError("the client stopped reading") from None

    def _close(self, transport: asyncio.Transport) -> None:
        """What is written already may still be taken, for a while."""
        transport.close()
        self._loop.call_later(FINISH_S, transport.abort)

    def _done(self) -> None:
        """The connection's next state."""
        transport = self.transport
        self._head = None
        self._pieces.clear()
        self._read_on()
        if transport is None or transport.is_closing():
            return
        if self._last and self._body_left:
            self._lingers = True
            self._loop.call_later(_LINGER_S, self._close, transport)
        elif self._last:
            self._close(transport)
        else:
            self._port.doorman.rests(transport)
            early, self._early = self._early, b""
            if len(early) > _MAX_EARLY_BYTES:
                transport.resume_reading()
            if early:
                self._begin(early)

    # The client of that request ---------------------------------------------------------------

    @property
    def content_length(self) -> int:
        """See :class:`~.client.Client`."""
        return self._head.content_length if self._head is not None else 0

    @property
    def content(self) -> _Connection:
        """This is the body, too."""
        return self

    def is_eof(self) -> bool:
        """See :class:`~.client.Body`."""
        return self._body_left == 0

    def read_nowait(self) -> bytes:
        """See :class:`~.client.Body`."""
        pieces, self._pieces = self._pieces, []
        self._read_on()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def readany(self) -> bytes:
        """See :class:`~.client.Body`."""
        if not self._pieces and self._body_left:
            self._more = self._loop.create_future()
            try:
                await self._more
            finally:
                self._more = None
        return self.read_nowait()

    def head(self, content_type: str) -> bytes:
        """See :class:`~.client.Client`."""
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n"
        return head.encode("latin-1", "replace") + self._common_lines()

    async def begin(self, content_type: str, first: bytes) -> None:
        """Never comes to it: the head is written with the first piece.

        Raises:
            ConnectionResetError: the connection was gone before.
        """
        raise ConnectionResetError("client connection is gone")

    async def end(self) -> None:
        """See :class:`~.client.Client`."""
        if not self._ended and self.transport is not None and not self.transport.is_closing():
            self.transport.write(b"0\r\n\r\n")
        self._ended = True
        await self.drained()

    async def drained(self) -> None:
        """Until the client has taken all but a little of what was written."""
        while not self._writable:
            self._drained = self._loop.create_future()
            try:
                await self._drained
            finally:
                self._drained = None
