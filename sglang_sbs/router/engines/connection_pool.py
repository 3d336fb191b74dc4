"""A lean HTTP/1.1 client for prefill and decode requests. It decides which connection carries a
call: a kept one, a new one, or a replacement if the engine just closed a kept one. Body pieces
reach the :class:`~.connection.Receiver` in the callback that read them, which makes relaying
cheap."""

from __future__ import annotations

import asyncio
import contextvars
import errno
import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from sglang_sbs.router.engines.connection import Connection, FailureKind, Receiver, UpstreamError
from sglang_sbs.router.engines.control_requests import MAX_ANSWER_BYTES
from sglang_sbs.router.engines.response_framing import MalformedResponse
from sglang_sbs.router.engines.urls import bracketed, split_worker_url

logger = logging.getLogger(__name__)

IDLE_LIMIT_S = 3.0
"""Age at which idle connections are no longer reused: SGLang (uvicorn) closes them after 5 s."""
_DNS_TTL_S = 10.0

_OUR_OWN_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS})


def is_our_own(error: BaseException) -> bool:
    """Return whether this machine has no descriptors or ports left, so that no connection is
    possible."""
    return isinstance(error, OSError) and error.errno in _OUR_OWN_ERRORS


@dataclass(slots=True, eq=False, repr=False)
class Call:
    _pool: Pool
    origin: str
    """Normalised URL of the worker."""
    payload: Sequence[bytes | bytearray]
    receiver: Receiver | None
    """Object that gets the response; ``None`` once the call is over."""
    sent: bool = False
    """The request was written to a connection, so the engine may know it."""
    _connection: Connection | None = None
    _task: asyncio.Task[None] | None = None
    _replayable: bool = True
    _sent_s: float = 0.0
    _paused: bool = False
    _held: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        """Show no payload, which contains the client's key."""
        states = {"over": self.over, "held": self._held is not None, "sent": self.sent}
        state = next((name for name, holds in states.items() if holds), "connecting")
        return f"<Call to {self.origin}: {state}{', paused' * self._paused}>"

    def hold(self, for_s: float) -> None:
        """Start after ``for_s`` seconds, or at :meth:`let_go`."""
        self._held = self._pool.loop.call_later(for_s, self.let_go)

    def let_go(self) -> None:
        """Start now if the call was held."""
        if self._held is not None:
            self._held.cancel()
            self._held = None
            self.start()

    def start(self, *, fresh: bool = False) -> None:
        connection = None if fresh else self._pool.take_idle(self.origin)
        if connection is not None:
            self._send(connection)
        else:
            # A connection outlives its first request, so it must not log under that request's id.
            self._task = self._pool.loop.create_task(self._connect(), context=contextvars.Context())

    def cancel(self) -> None:
        """Stop now: the connection is closed and the receiver is not called again."""
        self.receiver = None
        if self._held is not None:
            self._held.cancel()
            self._held = None
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def forget_payload(self) -> None:
        """Drop the payload, which may be large; the request cannot be sent again."""
        self.payload = ()
        self._replayable = False

    @property
    def over(self) -> bool:
        """Whether the response is complete, lost or cancelled, so that no further callback will
        come."""
        return self.receiver is None

    def set_paused(self, paused: bool) -> None:
        """Pause or resume reading, even before there is a connection."""
        self._paused = paused
        if self._connection is not None:
            self._connection.set_paused(paused)

    async def _connect(self) -> None:
        try:
            connection = await self._pool.connect(self.origin)
        except ConnectionRefusedError as error:
            self._fail("refused", f"connection refused ({error})")
            return
        except TimeoutError:
            self._fail("connect", f"no connection within {self._pool.connect_timeout_s:g} s")
            return
        except (OSError, ValueError) as error:  # ValueError: an invalid host name (IDNA)
            self._fail("local" if is_our_own(error) else "connect", f"cannot connect ({error})")
            return
        finally:
            self._task = None
        self._replayable = False
        if self.receiver is None:
            connection.close()
        else:
            self._send(connection)

    def _send(self, connection: Connection) -> None:
        self._connection = connection
        self.sent = True
        self._sent_s = time.monotonic()
        connection.call = self
        connection.send(self.payload)
        if not self._replayable:
            self.payload = ()  # it may be large, and the response may take long
        if self._paused:
            connection.set_paused(True)

    def _fail(self, kind: FailureKind, detail: str) -> None:
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.failed(UpstreamError(kind, detail))

    # Called by the connection.

    def completed(self) -> None:
        """Report the end of the response to the receiver."""
        self._connection = None
        receiver, self.receiver = self.receiver, None
        if receiver is None:
            return
        try:
            receiver.message_complete()
        except Exception as error:
            logger.exception("a response of %s is unusable", self.origin)
            receiver.failed(UpstreamError("protocol", f"unusable response: {error}"))

    def lost(self, kind: FailureKind, detail: str, *, silent: bool) -> None:
        """Handle the loss of the connection. If it was a reused one, and was lost soon after
        sending and without a byte of the response (``silent``), the engine had just closed it as
        idle: send once more on a new one."""
        self._connection = None
        fresh = time.monotonic() - self._sent_s < self._pool.replay_within_s
        if silent and fresh and self._replayable and self.receiver is not None:
            self._replayable = False
            self.start(fresh=True)
        else:
            self._fail(kind, detail)


@dataclass(eq=False, repr=False)
class Pool:
    """Connections to engines: one per running call, and idle ones kept for reuse."""

    loop: asyncio.AbstractEventLoop
    ssl_context: ssl.SSLContext | None = None
    connect_timeout_s: float = 10.0
    idle_limit_s: float = IDLE_LIMIT_S
    replay_within_s: float = 1.0
    """Time within which a silent close of a reused connection means that the engine closed it as
    idle: the request was not read and is sent once more. After a later close the engine may have
    worked on the request, so only a new attempt (new rid, new room) is safe."""
    _idle: dict[str, deque[Connection]] = field(default_factory=dict)
    _all: set[Connection] = field(default_factory=set)
    _addresses: dict[str, tuple[float, list[str]]] = field(default_factory=dict)

    def call(
        self,
        origin: str,
        payload: Sequence[bytes | bytearray],
        receiver: Receiver,
        *,
        after_s: float = 0.0,
    ) -> Call:
        """Send a request (head and body pieces) to ``origin``, a normalised worker URL, after
        ``after_s`` seconds."""
        call = Call(self, origin, payload, receiver)
        if after_s > 0:
            call.hold(after_s)
        else:
            call.start()
        return call

    def close(self) -> None:
        for connection in list(self._all):
            connection.close()
        self._idle.clear()

    @property
    def open_connections(self) -> int:
        return len(self._all)

    def take_idle(self, origin: str) -> Connection | None:
        idle = self._idle.get(origin)
        oldest = time.monotonic() - self.idle_limit_s
        while idle:
            connection = idle.pop()
            if connection.idle_since >= oldest and not connection.transport.is_closing():
                return connection
            connection.close()
        return None

    def keep(self, connection: Connection) -> None:
        """Keep a connection for reuse after an exchange."""
        connection.idle_since = time.monotonic()
        idle = self._idle.setdefault(connection.origin, deque())
        idle.append(connection)
        while idle[0].idle_since < connection.idle_since - self.idle_limit_s:
            idle.popleft().close()

    def forget(self, connection: Connection) -> None:
        """Drop a closed or lost connection."""
        self._all.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle and connection in idle:
            idle.remove(connection)

    async def connect(self, origin: str) -> Connection:
        """Return a connection to the first address of the host that accepts one. Raises: OSError
        (also TimeoutError), no address accepted in time."""
        scheme, host, port = split_worker_url(origin)
        tls = (self._tls, host) if scheme == "https" else (None, None)
        async with asyncio.timeout(self.connect_timeout_s):
            addresses = await self._resolve(host, port)
            for left in range(len(addresses) - 1, -1, -1):
                try:
                    _, connection = await self.loop.create_connection(
                        lambda: Connection(self, origin),
                        addresses[0],
                        port,
                        ssl=tls[0],
                        server_hostname=tls[1],
                    )
                    break
                except OSError:
                    addresses.append(addresses.pop(0))  # start with another one next time
                    if left == 0:
                        raise
        self._all.add(connection)
        return connection

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """TLS context for ``https`` workers, created once because loading the system's CAs takes
        milliseconds."""
        return self.ssl_context or ssl.create_default_context()

    async def _resolve(self, host: str, port: int) -> list[str]:
        until_s, addresses = self._addresses.get(host, (0.0, []))
        now_s = time.monotonic()
        if until_s <= now_s:
            infos = await self.loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(info[4][0]) for info in infos))
            self._addresses[host] = (now_s + _DNS_TTL_S, addresses)
        return addresses


async def fetch(
    pool: Pool, origin: str, path: str, headers: bytes, limit_s: float, *, body: bytes | None = None
) -> tuple[int, bytes]:
    """Send a request and return status and body of its small response. The method is ``POST`` with
    a ``body``, else ``GET``. Raises: UpstreamError, there was no response, or it exceeds
    ``MAX_ANSWER_BYTES``; TimeoutError, it took over ``limit_s``."""
    answer = _Whole(pool.loop.create_future())
    head = request_head("POST" if body else "GET", origin, path, headers, len(body or b""))
    # Omit an empty piece: asyncio of Python 3.12 would loop forever on it.
    call = pool.call(origin, (head, body) if body else (head,), answer)
    try:
        async with asyncio.timeout(limit_s):
            return await answer.future
    finally:
        call.cancel()


@dataclass(slots=True, eq=False, repr=False)
class _Whole:
    future: asyncio.Future[tuple[int, bytes]]
    _status: int = 0
    _body: bytearray = field(default_factory=bytearray)

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
    """Return the request line and headers with the final empty line; ``headers`` are complete
    lines, each ending in CRLF."""
    return request_lines(method, origin, path, content_length) + headers + b"\r\n"


def request_lines(method: str, origin: str, path: str, content_length: int) -> bytes:
    """Return the request line and the headers common to all requests, without the final empty
    line."""
    return b"%bcontent-length: %d\r\n" % (_same_lines(method, origin, path), content_length)


@lru_cache(maxsize=1024)
def _same_lines(method: str, origin: str, path: str) -> bytes:
    """Return the request line and headers that all requests to one endpoint of a worker share
    (cached)."""
    _, host, port = split_worker_url(origin)
    return (
        f"{method} {path} HTTP/1.1\r\nhost: {bracketed(host)}:{port}\r\n"
        f"content-type: application/json\r\naccept-encoding: identity\r\n"
    ).encode("latin-1")
