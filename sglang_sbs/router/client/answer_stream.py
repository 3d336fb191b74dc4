"""Streams a response to a client: head, pieces, back pressure and end. Pieces are written in the
callback that receives them, because a task switch would dominate the cost of relaying."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from aiohttp import HttpVersion11, web

from sglang_sbs.router.options.config import USUAL_PACE, ClientPace

logger = logging.getLogger(__name__)

HIGH_WATER_BYTES = 1 << 20
LOW_WATER_BYTES = 1 << 18
LARGE_PIECE_BYTES = 64 << 10
"""Size of the pieces in which a whole response is sent; after each, other connections get a
turn."""
_JOINED_BYTES = 512 << 10
"""Bytes of a response copied in one turn of the event loop."""
_RECHECK_S = 0.02
_RECHECK_AT_MOST_S = 0.5
"""Longest interval between checks of a client that reads nothing."""


class Source(Protocol):
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Downstream:
    """A response that is streamed to a client. Every request has one, so attributes that only a
    started stream needs are class attributes until then."""

    response: web.StreamResponse | None = None
    """Set once the head is being sent; from then on errors can only be events in the stream."""
    _transport: asyncio.WriteTransport | None = None
    _chunked = True
    _pending_bytes = 0
    _paused = False
    _paused_s = 0.0
    _recheck_s = _RECHECK_S
    _unsent = _most_unsent = 0
    _ended = False

    def __init__(
        self,
        request: web.Request,
        sources: Mapping[int, Source],
        pace: ClientPace = USUAL_PACE,
    ) -> None:
        """Create the stream. The ``sources`` of its data are paused while the client reads too
        slowly; sources may be added later."""
        self._request = request
        self._sources = sources
        self._pace = pace
        self._pending: list[bytes | memoryview] = []

    def push(self, data: bytes | memoryview) -> None:
        """Send a piece, or keep it until the head is sent. A memoryview (for long data) is not
        copied."""
        transport = self._transport
        if transport is None:
            self._pending.append(data)
            self._pending_bytes += len(data)
            if self._pending_bytes > HIGH_WATER_BYTES:
                self._pause()
            return
        if self._ended or transport.is_closing():
            return
        if not self._chunked:
            transport.write(data)
        elif isinstance(data, memoryview):
            transport.writelines((b"%x\r\n" % len(data), data, b"\r\n"))
        else:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        if transport.get_write_buffer_size() > HIGH_WATER_BYTES:
            self._pause()

    def _pause(self) -> None:
        for source in self._sources.values():  # sources may have been added
            source.pause()
        if not self._paused:
            loop = asyncio.get_running_loop()
            self._paused = True
            self._paused_s = loop.time()
            self._recheck_s = _RECHECK_S
            self._unsent = self._most_unsent = 0
            loop.call_later(_RECHECK_S, self._recheck)

    def _recheck(self) -> None:
        transport = self._transport
        if transport is not None and transport.is_closing():
            return
        if transport is not None:
            unsent = transport.get_write_buffer_size()
            if unsent <= LOW_WATER_BYTES:
                self._paused = False
                for source in self._sources.values():
                    source.resume()
                return
            self._most_unsent = max(self._most_unsent, unsent)
            idle = self._unsent == unsent
            self._recheck_s = min(2 * self._recheck_s, _RECHECK_AT_MOST_S) if idle else _RECHECK_S
            self._unsent = unsent
        loop = asyncio.get_running_loop()
        patience_s = self._pace.finish_s + self._most_unsent / self._pace.min_bytes_per_s
        if transport is not None and loop.time() > self._paused_s + patience_s:
            logger.info("a client read too slowly for %.0f s and is disconnected", patience_s)
            transport.abort()
        elif self._request.transport is not None:
            loop.call_later(self._recheck_s, self._recheck)

    async def open(self, content_type: str, more: Mapping[str, str] | None = None) -> None:
        """Send the head and all pieces pushed so far; further calls do nothing. ``more``:
        additional headers. Raises: ConnectionResetError, the client is gone or does not read."""
        if self.response is not None:
            return
        self.response = response = web.StreamResponse(
            headers={"Content-Type": content_type, **(more or {})}
        )
        self._chunked = self._request.version >= HttpVersion11
        if self._chunked:
            response.enable_chunked_encoding()
        pending, self._pending = self._pending, []
        try:
            async with asyncio.timeout(self._pace.finish_s):
                await response.prepare(self._request)
                await response.write(b"".join(pending))
        except TimeoutError:
            raise _hung_up(self._request) from None
        self._transport = self._request.transport
        if self._transport is None:
            raise ConnectionResetError("client connection is gone")
        pending, self._pending = self._pending, []
        for data in pending:  # pieces pushed meanwhile
            self.push(data)

    async def finish(self) -> web.StreamResponse:
        """End the body and return the response. Raises: ConnectionResetError, the client does not
        read; its connection is closed."""
        assert self.response is not None
        self._ended = True
        transport = self._transport
        waits = transport is None or transport.get_write_buffer_size() > 0
        try:
            async with asyncio.timeout(self._pace.finish_s if waits else None):
                await self.response.write_eof()
        except TimeoutError:
            raise _hung_up(self._request) from None
        return self.response


async def joined(pieces: Sequence[bytes | bytearray | memoryview]) -> bytes | bytearray:
    """Return the joined pieces. They are copied in slices, because copying a large response at once
    would block the event loop."""
    if sum(map(len, pieces)) <= _JOINED_BYTES:
        return b"".join(pieces)
    whole = bytearray()
    due = _JOINED_BYTES
    for piece in pieces:
        view = memoryview(piece)
        for at in range(0, len(view), _JOINED_BYTES):
            whole += view[at : at + _JOINED_BYTES]
            if len(whole) >= due:
                due = len(whole) + _JOINED_BYTES
                await asyncio.sleep(0)
    return whole


async def send(
    request: web.Request,
    answer: web.Response,
    pace: ClientPace = USUAL_PACE,
) -> web.StreamResponse:
    """Send a whole response and return it. A large one is sent in pieces, no faster than the client
    reads. Raises: ConnectionResetError, the client is gone, or was too slow and is disconnected."""
    body = answer.body
    if not isinstance(body, (bytes, bytearray)) or len(body) <= LARGE_PIECE_BYTES:
        return answer
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    response.content_length = len(body)
    loop = asyncio.get_running_loop()
    due_s = loop.time() + pace.finish_s
    try:
        async with asyncio.timeout_at(due_s) as deadline:
            await response.prepare(request)
            for at in range(0, len(body), LARGE_PIECE_BYTES):
                await response.write(body[at : at + LARGE_PIECE_BYTES])
                await asyncio.sleep(0)
                # Each piece extends the deadline by its time at the slowest pace, up to finish_s
                # ahead.
                due_s += LARGE_PIECE_BYTES / pace.min_bytes_per_s
                due_s = min(due_s, loop.time() + pace.finish_s)
                deadline.reschedule(due_s)
            await response.write_eof()
    except TimeoutError:
        raise _hung_up(request) from None
    return response


def _hung_up(request: web.Request) -> ConnectionResetError:
    """Abort the connection of a client that does not read, and return the error to raise."""
    if request.transport is not None:
        request.transport.abort()
    return ConnectionResetError("the client stopped reading")
