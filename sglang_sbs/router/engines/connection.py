"""One connection to an engine: a request is written, its answer read, one at a time.

Owns the slices in which both happen, the framing of the answer, and back pressure. Must not know
where the connection comes from or what becomes of it, nor SGLang, PD or JSON.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol

from sglang_sbs.router.engines.response_framing import (
    MAX_HEAD_BYTES,
    ChunkedDecoder,
    MalformedResponse,
    parse_head,
)

logger = logging.getLogger(__name__)

_SLICE_BYTES = 256 << 10
"""Of a large request so much is written before others get their turn."""
_TAKEN_BYTES = 16 << 10
"""Of what an engine sent so much is looked at before others get theirs."""

FailureKind = Literal["refused", "connect", "reset", "protocol", "local"]


class UpstreamError(Exception):
    """The exchange broke off.

    ``refused``: nothing listens there. ``local``: this machine is out of descriptors or ports.
    """

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(detail)
        self.kind: FailureKind = kind


class Receiver(Protocol):
    """Where a response goes. After ``message_complete`` or ``failed`` nothing more comes."""

    def head_received(self, status: int, headers: Mapping[str, str]) -> None: ...
    def body_received(self, data: bytes) -> None: ...
    def message_complete(self) -> None: ...
    def failed(self, error: UpstreamError) -> None: ...


class CarriedCall(Protocol):
    """A call as its connection knows it."""

    origin: str
    """A worker's URL."""
    receiver: Receiver | None
    """``None``: nobody wants the answer any more."""

    def completed(self) -> None:
        """The answer is whole."""

    def lost(self, error: UpstreamError, *, silent: bool) -> None:
        """The connection is over before that; ``silent``: not a byte of an answer came."""


class ConnectionKeeper(Protocol):
    """Who made a connection."""

    loop: asyncio.AbstractEventLoop

    def keep(self, connection: Connection) -> None:
        """An exchange is over, and the connection can carry another."""

    def forget(self, connection: Connection) -> None:
        """It is closed, or lost."""


class Connection(asyncio.Protocol):
    """One TCP connection carrying one exchange at a time (no pipelining)."""

    __slots__ = (
        "_body_left",
        "_buffer",
        "_chunked",
        "_in_body",
        "_keep_alive",
        "_paused",
        "_pool",
        "_silent",
        "_unread",
        "_unsent",
        "_until_eof",
        "_writable",
        "call",
        "idle_since",
        "origin",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, pool: ConnectionKeeper, origin: str) -> None:
        self._pool = pool
        self.origin = origin
        self.call: CarriedCall | None = None
        self.idle_since = 0.0
        self._paused = False
        self._writable = True
        self._unsent: Iterator[bytes] | None = None
        """What is left of a large request."""
        self._unread = b""
        """What came and waits for its turn; nothing is read meanwhile."""
        self._reset()

    def _reset(self) -> None:
        self._buffer = b""
        self._in_body = False
        self._chunked: ChunkedDecoder | None = None
        self._body_left = 0
        self._until_eof = False
        self._keep_alive = True
        self._silent = True  # not a byte of an answer so far

    def send(self, payload: Sequence[bytes]) -> None:
        """Write a request: now, or the later parts of a large one as the engine takes it."""
        if sum(map(len, payload)) <= _SLICE_BYTES:
            self.transport.writelines(payload)
            return
        self._unsent = (
            piece[at : at + _SLICE_BYTES]
            for piece in payload
            for at in range(0, len(piece), _SLICE_BYTES)
        )
        self._send_more()

    def _send_more(self) -> None:
        if self._unsent is None or not self._writable or self.transport.is_closing():
            return
        piece = next(self._unsent, None)
        if piece is None:
            self._unsent = None
            return
        self.transport.write(piece)
        if self._writable:  # else when the engine has taken that
            self._pool.loop.call_soon(self._send_more)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._send_more()

    def set_paused(self, paused: bool) -> None:
        if paused == self._paused or self.transport.is_closing():
            return
        self._paused = paused
        if self._unread:  # nothing is read until that is through
            if not paused:
                self._pool.loop.call_soon(self._go_on)
        elif paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def close(self) -> None:
        self.call = None
        self._unsent = None
        self._unread = b""
        self._pool.forget(self)
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "writelines")
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._unread:
            self._unread += data
            return
        if len(data) > _TAKEN_BYTES:
            # A quarter of a megabyte may come at once: a thousand events, each some work.
            self._unread = data[_TAKEN_BYTES:]
            data = data[:_TAKEN_BYTES]
            self.transport.pause_reading()
            self._pool.loop.call_soon(self._go_on)
        self._take(data)

    def _go_on(self) -> None:
        """Take the next part of what came."""
        if not self._unread or self._paused:
            return
        data = self._unread[:_TAKEN_BYTES]
        self._unread = self._unread[_TAKEN_BYTES:]
        if self._unread:
            self._pool.loop.call_soon(self._go_on)
        elif not self.transport.is_closing():
            self.transport.resume_reading()
        self._take(data)

    def _take(self, data: bytes) -> None:
        call = self.call
        if call is None or call.receiver is None:
            self.close()
            return
        self._silent = False
        try:
            if not self._in_body:
                data = self._head(data, call)
                if not self._in_body:
                    return
            self._body(data, call)
        except MalformedResponse as error:
            self._give_up(call, f"malformed response: {error}")
        except Exception as error:
            logger.exception("an answer of %s could not be used", self.origin)
            self._give_up(call, f"unusable response: {error}")

    def _give_up(self, call: CarriedCall, detail: str) -> None:
        self.close()
        call.lost(UpstreamError("protocol", detail), silent=False)

    def _body(self, data: bytes, call: CarriedCall) -> None:
        chunked = self._chunked
        if chunked is not None:
            payload = chunked.feed(data)
            done, surplus = chunked.done, chunked.surplus
        elif self._until_eof:
            payload, done, surplus = data, False, False
        else:
            payload = data[: self._body_left]
            surplus = len(data) > self._body_left
            self._body_left -= len(payload)
            done = self._body_left == 0
        if payload and call.receiver is not None:
            call.receiver.body_received(payload)
        if done and self.call is call:
            reusable = self._keep_alive and not surplus and not self._unread
            self._complete(call, reusable=reusable)

    def _complete(self, call: CarriedCall, *, reusable: bool) -> None:
        self.call = None
        self._reset()
        # An answer that came before the whole request was written leaves the rest in the way.
        if reusable and self._unsent is None and self.transport.get_write_buffer_size() == 0:
            self.set_paused(False)  # a slow client may have paused the exchange that ended
            self._pool.keep(self)
        else:
            self.close()
        call.completed()

    def _head(self, data: bytes, call: CarriedCall) -> bytes:
        """Consume the response head; returns the body bytes behind it."""
        data = self._buffer + data
        while True:
            end = data.find(b"\r\n\r\n")
            if end > MAX_HEAD_BYTES or (end < 0 and len(data) > MAX_HEAD_BYTES):
                raise MalformedResponse("response head over 64 KiB")
            if end < 0:
                self._buffer = data
                return b""
            head = parse_head(data[:end])
            data = data[end + 4 :]
            if not head.interim:
                break
        self._buffer = b""
        self._in_body = True
        self._keep_alive = head.keep_alive
        if head.chunked:
            self._chunked = ChunkedDecoder()
        elif head.content_length is not None:
            self._body_left = head.content_length
        else:
            self._until_eof = True
        if call.receiver is not None:
            call.receiver.head_received(head.status, head.headers)
        return data

    def connection_lost(self, exc: Exception | None) -> None:
        if self._unread and self.call is not None:
            data, self._unread = self._unread, b""
            self._take(data)
        self._pool.forget(self)
        call, self.call = self.call, None
        if call is None:
            return
        if self._until_eof and exc is None:
            call.completed()
            return
        detail = f"connection lost ({exc})" if exc else "connection closed before the end"
        call.lost(UpstreamError("reset", detail), silent=self._silent)
