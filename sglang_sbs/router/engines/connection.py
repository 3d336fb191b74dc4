"""One HTTP connection to an engine. It writes a request and reads the response, one at a time, in
slices and with back pressure. The caller interprets responses, and :mod:`.connection_pool` opens
and reuses connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from sglang_sbs.router.engines.response_framing import MalformedResponse, ResponseReader

if TYPE_CHECKING:
    from sglang_sbs.router.engines.connection_pool import Call, Pool

logger = logging.getLogger(__name__)

_SLICE_BYTES = 256 << 10
"""Bytes of a large request written before other connections get a turn."""
_TAKEN_BYTES = 16 << 10
"""Bytes of a response handled before other connections get a turn."""

FailureKind = Literal["refused", "connect", "reset", "protocol", "local"]


class UpstreamError(Exception):
    """A request got no complete response. ``kind``: ``refused``, the address refuses connections;
    ``connect``, no connection otherwise; ``reset``, the connection was lost; ``protocol``, the
    response is unusable; ``local``, this machine has no descriptors or ports left."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(detail)
        self.kind: FailureKind = kind


class Receiver(Protocol):
    """Receives a response. No call follows ``message_complete`` or ``failed``."""

    def head_received(self, status: int, headers: Mapping[str, str]) -> None: ...
    def body_received(self, data: bytes) -> None: ...
    def message_complete(self) -> None: ...
    def failed(self, error: UpstreamError) -> None: ...


@dataclass(slots=True, eq=False, repr=False)
class Connection(asyncio.Protocol):
    """One TCP connection carrying one exchange at a time (no pipelining)."""

    _pool: Pool
    origin: str
    call: Call | None = None
    idle_since: float = 0.0
    transport: asyncio.Transport = field(init=False)
    _paused: bool = False
    _writable: bool = True
    _unsent: Iterator[bytes | bytearray] | None = None
    """Unsent parts of a large request."""
    _unread: bytes = b""
    """Received bytes that wait for a turn of the event loop; reading is paused meanwhile."""
    _reader: ResponseReader = field(default_factory=ResponseReader)
    _silent: bool = True
    """No byte of the present response has arrived."""

    def send(self, payload: Sequence[bytes | bytearray]) -> None:
        """Write a request; the later parts of a large one follow as the engine reads."""
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
        if self._writable:  # otherwise once the engine has read it
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
        if self._unread:  # reading stays paused until then
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
        self._reader.close()
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
            # A quarter of a megabyte may arrive at once: a thousand events that each need work.
            self._unread = data[_TAKEN_BYTES:]
            data = data[:_TAKEN_BYTES]
            self.transport.pause_reading()
            self._pool.loop.call_soon(self._go_on)
        self._take(data)

    def _go_on(self) -> None:
        """Handle the next ``_TAKEN_BYTES`` of the received bytes."""
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
        reader = self._reader
        begun = reader.status
        try:
            body = reader.feed(data)
            if reader.status and not begun:
                call.receiver.head_received(reader.status, reader.headers)
            if body and call.receiver is not None:
                call.receiver.body_received(body)
            if reader.done and self.call is call:
                reusable = reader.keep_alive and not reader.surplus and not self._unread
                self._complete(call, reusable=reusable)
        except MalformedResponse as error:
            self._give_up(call, f"malformed response: {error}")
        except Exception as error:
            logger.exception("a response of %s is unusable", self.origin)
            self._give_up(call, f"unusable response: {error}")

    def _give_up(self, call: Call, detail: str) -> None:
        self.close()
        call.lost("protocol", detail, silent=False)

    def _complete(self, call: Call, *, reusable: bool) -> None:
        self.call = None
        self._reader.begin()
        self._silent = True
        # If the response came before the whole request was written, the rest blocks the connection.
        if reusable and self._unsent is None and self.transport.get_write_buffer_size() == 0:
            self.set_paused(False)  # a slow client may have paused this exchange
            self._pool.keep(self)
        else:
            self.close()
        call.completed()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._unread and self.call is not None:
            data, self._unread = self._unread, b""
            self._take(data)
        self._reader.close()
        self._pool.forget(self)
        call, self.call = self.call, None
        if call is None:
            return
        if self._reader.until_eof and exc is None:
            call.completed()
            return
        detail = f"connection lost ({exc})" if exc else "connection closed before the end"
        call.lost("reset", detail, silent=self._silent)
