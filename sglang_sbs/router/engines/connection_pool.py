"""A lean HTTP/1.1 client for the two legs: callbacks instead of streams.

Owns connections to engines: pooling, framing of responses, back pressure, cancellation. A received
piece of body reaches the :class:`Receiver` in the same event loop callback that read it, with no
task, future or buffer in between; that is what makes relaying a chunk cheap. Must not know SGLang,
PD or JSON.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol

from sglang_sbs.router.engines.control_requests import MAX_ANSWER_BYTES
from sglang_sbs.router.engines.response_framing import (
    MAX_HEAD_BYTES,
    ChunkedDecoder,
    MalformedResponse,
    parse_head,
)
from sglang_sbs.router.engines.urls import bracketed, split_worker_url

logger = logging.getLogger(__name__)

IDLE_LIMIT_S = 3.0
"""Idle connections older than this are not reused: SGLang (uvicorn) closes them after 5 s."""
REPLAY_WITHIN_S = 1.0
"""A reused connection that closes without a byte this soon after the request crossed with the
engine's idle close: the request was not read and is sent once more. Later than that the engine may
have been at work on it, and only a new attempt (new rid, new room) is safe."""
_DNS_TTL_S = 10.0

FailureKind = Literal["refused", "connect", "reset", "protocol", "local"]

_SLICE_BYTES = 256 << 10
"""Of a large request so much is written before others get their turn."""
_TAKEN_BYTES = 16 << 10
"""Of what an engine sent so much is looked at before others get theirs."""

_OUR_OWN_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS})


def is_our_own(error: BaseException) -> bool:
    """This machine has no descriptors or ports left: no connection anywhere would work."""
    return isinstance(error, OSError) and error.errno in _OUR_OWN_ERRORS


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


class Call:
    """One request on its way to one engine."""

    __slots__ = (
        "_connection",
        "_paused",
        "_pool",
        "_replayable",
        "_sent_s",
        "_task",
        "origin",
        "payload",
        "receiver",
        "sent",
    )

    def __init__(
        self, pool: Pool, origin: str, payload: Sequence[bytes], receiver: Receiver
    ) -> None:
        self._pool = pool
        self.origin = origin
        self.payload = payload
        self.receiver: Receiver | None = receiver
        self._connection: _Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._replayable = True
        self._sent_s = 0.0
        self._paused = False
        self.sent = False
        """The request was written to a connection: the engine may know it."""

    def start(self, *, fresh: bool = False) -> None:
        connection = None if fresh else self._pool.take_idle(self.origin)
        if connection is not None:
            self._send(connection)
        else:
            # A connection outlives the request it was made for: it must not log under its id.
            self._task = self._pool.loop.create_task(self._connect(), context=contextvars.Context())

    def cancel(self) -> None:
        """Stop now: the connection is closed and the receiver hears nothing more."""
        self.receiver = None
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def pause(self) -> None:
        """Read no further until :meth:`resume`; also before there is a connection."""
        self._paused = True
        self._apply_pause()

    def resume(self) -> None:
        self._paused = False
        self._apply_pause()

    def _apply_pause(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.set_paused(self._paused)

    async def _connect(self) -> None:
        try:
            connection = await self._pool.connect(self.origin)
        except ConnectionRefusedError as error:
            self._fail(UpstreamError("refused", f"connection refused ({error})"))
            return
        except TimeoutError:
            limit = self._pool.connect_timeout_s
            self._fail(UpstreamError("connect", f"no connection within {limit:g} s"))
            return
        except OSError as error:
            kind: FailureKind = "local" if is_our_own(error) else "connect"
            self._fail(UpstreamError(kind, f"cannot connect ({error})"))
            return
        except ValueError as error:  # a host name that cannot be one (IDNA)
            self._fail(UpstreamError("connect", f"cannot connect ({error})"))
            return
        finally:
            self._task = None
        self._replayable = False
        if self.receiver is None:
            connection.close()
        else:
            self._send(connection)

    def _send(self, connection: _Connection) -> None:
        self._connection = connection
        self.sent = True
        self._sent_s = time.monotonic()
        connection.call = self
        connection.send(self.payload)
        if not self._replayable:
            self.payload = ()  # it may be large, and the answer far away
        if self._paused:
            connection.set_paused(True)

    def _fail(self, error: UpstreamError) -> None:
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.failed(error)

    # Called by the connection.

    def completed(self) -> None:
        self._connection = None
        receiver, self.receiver = self.receiver, None
        if receiver is None:
            return
        try:
            receiver.message_complete()
        except Exception as error:
            logger.exception("an answer of %s could not be used", self.origin)
            receiver.failed(UpstreamError("protocol", f"unusable response: {error}"))

    def lost(self, error: UpstreamError, *, silent: bool) -> None:
        """The connection went away; an idle one the engine had just closed is replaced once."""
        self._connection = None
        fresh = time.monotonic() - self._sent_s < REPLAY_WITHIN_S
        if silent and fresh and self._replayable and self.receiver is not None:
            self._replayable = False
            self.start(fresh=True)
        else:
            self._fail(error)


class Pool:
    """Connections to engines: as many as there are calls, the idle ones kept for reuse."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        ssl_context: ssl.SSLContext | None = None,
        connect_timeout_s: float = 10.0,
    ) -> None:
        self.loop = loop
        self.connect_timeout_s = connect_timeout_s
        self._ssl = ssl_context
        self._idle: dict[str, deque[_Connection]] = {}
        self._all: set[_Connection] = set()
        self._addresses: dict[str, tuple[float, list[str]]] = {}

    def call(self, origin: str, payload: Sequence[bytes], receiver: Receiver) -> Call:
        """Send a request (``head`` plus body pieces) to ``origin``, a normalised worker URL."""
        call = Call(self, origin, payload, receiver)
        call.start()
        return call

    def close(self) -> None:
        for connection in list(self._all):
            connection.close()
        self._idle.clear()

    @property
    def open_connections(self) -> int:
        return len(self._all)

    def take_idle(self, origin: str) -> _Connection | None:
        idle = self._idle.get(origin)
        oldest = time.monotonic() - IDLE_LIMIT_S
        while idle:
            connection = idle.pop()
            if connection.idle_since >= oldest and not connection.transport.is_closing():
                return connection
            connection.close()
        return None

    def keep(self, connection: _Connection) -> None:
        connection.idle_since = time.monotonic()
        idle = self._idle.setdefault(connection.origin, deque())
        idle.append(connection)
        while idle[0].idle_since < connection.idle_since - IDLE_LIMIT_S:
            idle.popleft().close()

    def forget(self, connection: _Connection) -> None:
        self._all.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle and connection in idle:
            idle.remove(connection)

    async def connect(self, origin: str) -> _Connection:
        """To the first address of the host that takes it. Raises: OSError (also TimeoutError)."""
        scheme, host, port = split_worker_url(origin)
        tls = scheme == "https"
        async with asyncio.timeout(self.connect_timeout_s):
            addresses = await self._resolve(host, port)
            for left in range(len(addresses) - 1, -1, -1):
                try:
                    _, connection = await self.loop.create_connection(
                        lambda: _Connection(self, origin),
                        addresses[0],
                        port,
                        ssl=self._tls_context() if tls else None,
                        server_hostname=host if tls else None,
                    )
                    break
                except OSError:
                    addresses.append(addresses.pop(0))  # the next try begins with another one
                    if left == 0:
                        raise
        self._all.add(connection)
        return connection

    def _tls_context(self) -> ssl.SSLContext:
        """Made once: loading the system's CAs takes milliseconds of the event loop."""
        if self._ssl is None:
            self._ssl = ssl.create_default_context()
        return self._ssl

    async def _resolve(self, host: str, port: int) -> list[str]:
        known = self._addresses.get(host)
        now = time.monotonic()
        if known is not None and known[0] > now:
            return known[1]
        infos = await self.loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(info[4][0]) for info in infos))
        self._addresses[host] = (now + _DNS_TTL_S, addresses)
        return addresses


class _Connection(asyncio.Protocol):
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

    def __init__(self, pool: Pool, origin: str) -> None:
        self._pool = pool
        self.origin = origin
        self.call: Call | None = None
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

    def _give_up(self, call: Call, detail: str) -> None:
        self.close()
        call.lost(UpstreamError("protocol", detail), silent=False)

    def _body(self, data: bytes, call: Call) -> None:
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

    def _complete(self, call: Call, *, reusable: bool) -> None:
        self.call = None
        self._reset()
        # An answer that came before the whole request was written leaves the rest in the way.
        if reusable and self._unsent is None and self.transport.get_write_buffer_size() == 0:
            self.set_paused(False)  # a slow client may have paused the exchange that ended
            self._pool.keep(self)
        else:
            self.close()
        call.completed()

    def _head(self, data: bytes, call: Call) -> bytes:
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


async def fetch(
    pool: Pool, origin: str, path: str, headers: bytes, limit_s: float
) -> tuple[int, bytes]:
    """``GET`` for whoever wants a small answer as a whole: its status and body.

    Raises:
        UpstreamError: there was none, or it is over ``MAX_ANSWER_BYTES``.
        TimeoutError: not within ``limit_s``.
    """
    answer = _Whole(pool.loop.create_future())
    call = pool.call(origin, (request_head("GET", origin, path, headers, 0),), answer)
    try:
        async with asyncio.timeout(limit_s):
            return await answer.future
    finally:
        call.cancel()


class _Whole:
    """Collects an answer."""

    __slots__ = ("_body", "_status", "future")

    def __init__(self, future: asyncio.Future[tuple[int, bytes]]) -> None:
        self.future = future
        self._status = 0
        self._body = bytearray()

    def head_received(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status

    def body_received(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > MAX_ANSWER_BYTES:
            raise MalformedResponse(f"its answer is over {MAX_ANSWER_BYTES >> 20} MiB")

    def message_complete(self) -> None:
        if not self.future.done():
            self.future.set_result((self._status, bytes(self._body)))

    def failed(self, error: UpstreamError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


def request_head(method: str, origin: str, path: str, headers: bytes, content_length: int) -> bytes:
    """The request line and headers; ``headers`` are ready-made lines, each ending in CRLF."""
    _, host, port = split_worker_url(origin)
    return (
        (
            f"{method} {path} HTTP/1.1\r\nhost: {bracketed(host)}:{port}\r\n"
            f"content-type: application/json\r\naccept-encoding: identity\r\n"
            f"content-length: {content_length}\r\n"
        ).encode("latin-1")
        + headers
        + b"\r\n"
    )
