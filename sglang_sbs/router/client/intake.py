"""Limits how requests arrive: their minimum pace, their size, and the memory of all bodies. Without
these limits a client sending a byte a minute would hold a descriptor and memory forever."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from sglang_sbs.router.client.dense_input import DenseInput, Slices
from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.lanes import LoopTurns
from sglang_sbs.router.options.config import MAX_BODIES_BYTES, USUAL_PACE, ClientPace
from sglang_sbs.router.shared_timer import SharedTimer

KEEP_ALIVE_S = 75.0
MAX_HEAD_LINE_BYTES = 32 * 1024
"""Limit on a request line or header; tokens and baggage of gateways exceed aiohttp's 8,190."""
READ_BYTES = 64 << 10
"""Reading from a connection pauses when twice this much of a body is unread. aiohttp's own limit is
four times as high, and twenty large bodies would then block all other clients."""
_SMALL_BYTES = 64 << 10
_LARGE_AT_ONCE = 1
"""Number of large bodies that grow in one turn of the event loop, each by up to 256 KiB."""
_SMALL_PIECE_BYTES = 1 << 14
"""Pieces up to this size bypass the turn queue, so slow senders do not use up turns that fast
senders need."""


@dataclass(repr=False)
class Bodies:
    """Memory limit on all bodies, each counted from its first byte to the end of its request. When
    it is exceeded, the largest incomplete body is rejected. Small bodies may use a quarter more, so
    large ones cannot shut them out."""

    max_bytes: int = MAX_BODIES_BYTES
    pace: ClientPace = USUAL_PACE
    held_bytes: int = 0
    coming: dict[BodyShare, asyncio.Timeout] = field(default_factory=dict)
    """Bodies that are still being received, with the timeout that can end each early."""
    turns: LoopTurns = field(default_factory=lambda: LoopTurns(_LARGE_AT_ONCE))

    def share(self) -> BodyShare:
        """Return a context manager that counts one request's body until its end."""
        return BodyShare(self)

    def grow(self, share: BodyShare, more_bytes: int) -> None:
        """Count received bytes of a body. Over the limit, reject the largest incomplete body.
        Raises: RouterError (503), that is this one."""
        share.held_bytes += more_bytes
        self.held_bytes += more_bytes
        small = share.held_bytes <= _SMALL_BYTES
        limit_bytes = self.max_bytes * 5 // 4 if small else self.max_bytes
        while self.held_bytes > limit_bytes:
            largest = max(self.coming, key=lambda share: share.held_bytes, default=share)
            if largest.held_bytes <= share.held_bytes:
                raise self.no_room()
            self.held_bytes -= largest.held_bytes
            largest.held_bytes = 0
            largest.lost = True
            self.coming.pop(largest).reschedule(0.0)

    def no_room(self) -> RouterError:
        most = f"{self.max_bytes} bytes (--sbs-max-bodies-size)"
        why = f"no room for this body: all bodies together may take {most}"
        return RouterError(503, "router_overloaded", why, retry_after_s=1.0)


@dataclass(eq=False, repr=False)
class BodyShare:
    """One request's body and the memory it uses; a context manager that frees it."""

    bodies: Bodies
    held_bytes: int = 0
    lost: bool = False
    """The body was rejected to make room for others."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.bodies.held_bytes -= self.held_bytes

    async def read(
        self, request: web.Request, limit_bytes: int, whose: str = ", the limit of this endpoint"
    ) -> bytes | bytearray:
        """Read the whole body. ``whose`` follows the limit in the 413's message. Raises:
        RouterError: 413, it is longer than ``limit_bytes``; 408, it stalls or arrives below the
        minimum rate; 503, all bodies exceed their memory limit and this one is the largest."""
        too_large = f"the body is over {limit_bytes} bytes{whose}"
        if (request.content_length or 0) > limit_bytes:
            raise RouterError(413, "payload_too_large", too_large)
        if request.content.is_eof():  # it arrived with the head
            whole = request.content.read_nowait()
            if len(whole) > limit_bytes:
                raise RouterError(413, "payload_too_large", too_large)
            self.bodies.grow(self, len(whole))
            return whole
        body, pace = bytearray(), self.bodies.pace
        started_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(pace.grace_s) as deadline:
                self.bodies.coming[self] = deadline
                while not self.lost and (data := await request.content.readany()):
                    body += data
                    if len(body) > limit_bytes:
                        raise RouterError(413, "payload_too_large", too_large)
                    self.bodies.grow(self, len(data))
                    if len(body) > _SMALL_BYTES and len(data) > _SMALL_PIECE_BYTES:
                        started_s += await self._turn(deadline)
                    if not self.lost:
                        at_pace_s = pace.grace_s + len(body) / pace.min_bytes_per_s
                        deadline.reschedule(started_s + at_pace_s)
        except TimeoutError:
            if not self.lost:
                why = f"the body stopped after {len(body)} bytes or is too slow"
                raise RouterError(408, "body_too_slow", why) from None
        finally:
            self.bodies.coming.pop(self, None)
        if self.lost:
            raise self.bodies.no_room()
        return body  # copying to bytes would block the loop

    async def _turn(self, deadline: asyncio.Timeout) -> float:
        """Wait for a turn and return the seconds waited, which do not count against the client."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        deadline.reschedule(None)
        await self.bodies.turns.take(self)
        return loop.time() - asked_s


class ParserLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log for a port, without records about clients that disconnected or sent invalid
    HTTP. Those records quote the input, which may contain a key, and any stranger could flood the
    log."""

    def __init__(self, malformed: Callable[[], None]) -> None:
        """Create the log; ``malformed`` is called for each invalid request."""
        super().__init__(logging.getLogger("sglang_sbs.http"))
        self._malformed = malformed

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        error = kwargs.get("exc_info")
        error = error if isinstance(error, BaseException) else sys.exception()
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            self._malformed()
            self.logger.debug("invalid HTTP request: %s", type(error).__name__)
            return
        if isinstance(error, ConnectionError):
            self.logger.debug("a client left: %s", type(error).__name__)
            return
        self.logger.log(level, msg, *args, **kwargs)


def refusing_odd_expect(server: web.Server) -> web.Server:
    """Make a server reject any ``Expect`` header except ``100-continue``, and return it. aiohttp
    would quote the header's value, and fails if it is not text."""
    handle = server.request_handler

    async def handled(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", "100-continue").lower() != "100-continue":
            why = "only Expect: 100-continue is supported"
            return RouterError(417, "expectation_failed", why).response()
        return await handle(request)

    server.request_handler = handled
    return server


class Doorman:
    """Closes unused connections: silent ones without a complete request head, and idle ones between
    requests."""

    def __init__(
        self,
        patience_s: float = USUAL_PACE.grace_s,
        most: int = 1 << 20,
        idle_s: float = KEEP_ALIVE_S,
    ) -> None:
        """Set limits: ``patience_s`` for silent and ``idle_s`` for idle connections, and ``most``
        waiting at a time; beyond that the longest waiting one is closed."""
        self._patience_s, self._idle_s = patience_s, idle_s
        self._most = most
        self.slices = Slices()
        """Connections of this port whose received data has too many short lines to parse at once
        (:mod:`.dense_input`); one slice is parsed per turn of the event loop."""
        self._waiting: dict[Any, _Wait] = {}
        """Waiting connections by transport, longest waiting first."""
        self._kinds: dict[float, _Wait] = {}
        """Timer shared by all connections with the same time limit, by that limit in seconds."""

    def watch(self, transport: asyncio.BaseTransport) -> None:
        self.enter(transport, self._patience_s)

    def rests(self, transport: asyncio.BaseTransport) -> None:
        """Start the idle time of a connection after a response."""
        self.enter(transport, self._idle_s)

    def on_received(self, transport: Any) -> None:
        """Stop the timer: a complete request head arrived, or the connection is gone."""
        wait = self._waiting.pop(transport, None)
        if wait is not None:
            wait.timer.discard(transport)

    @web.middleware
    async def between_requests(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Stop a connection's timer while its request is handled. Must be the outermost
        middleware."""
        self.on_received(request.transport)
        try:
            return await handler(request)
        finally:
            if request.transport is not None:  # includes closing ones with unsent data
                self.rests(request.transport)

    def close_oldest(self) -> bool:
        """Close the longest waiting connection to make room; return whether there was one."""
        while self._waiting:
            if self._close(next(iter(self._waiting))):
                return True
        return False

    def enter(self, transport: Any, patience_s: float, *, spared: bool = False) -> None:
        while len(self._waiting) >= self._most:
            self._close(next(iter(self._waiting)))
        wait = self._kinds.get(patience_s)
        if wait is None:
            timer = SharedTimer(patience_s, self._close)
            wait = self._kinds[patience_s] = _Wait(timer, patience_s)
        wait.timer.add(transport)
        self._waiting[transport] = wait._replace(spared=True) if spared else wait

    def _close(self, transport: Any) -> bool:
        """Close a waiting connection and return whether it was closed. One that still sends a
        response, even while closing, is spared once: its time starts again."""
        wait = self._waiting.pop(transport)
        wait.timer.discard(transport)
        unsent = transport.get_write_buffer_size()
        if unsent and not wait.spared:
            self.enter(transport, wait.patience_s, spared=True)
            return False
        if transport.is_closing() and not unsent:
            return False
        transport.abort()
        return True


class _Wait(NamedTuple):
    timer: SharedTimer[Any]
    patience_s: float
    spared: bool = False


@dataclass(eq=False, repr=False)
class Gate(asyncio.Protocol):
    """Creates aiohttp's protocol for a new connection and has the doorman watch it to its end."""

    doorman: Doorman
    serve: Callable[[], asyncio.Protocol]
    """Creates aiohttp's protocol for a connection."""
    has_room: Callable[[], bool] = lambda: True
    """Returns whether another connection fits; otherwise it is closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self.has_room():
            transport.abort()  # type: ignore[attr-defined]
            return
        self.doorman.watch(transport)
        protocol, on_received = self.serve(), self.doorman.on_received
        dense = DenseInput(transport, protocol, self.doorman.slices)

        def lost(exc: Exception | None) -> None:  # no self: avoids a reference cycle
            on_received(transport)
            dense.lost()
            protocol.connection_lost(exc)

        self.connection_lost = lost  # type: ignore[method-assign]
        self.data_received = dense.received  # type: ignore[method-assign]
        for name in ("eof_received", "pause_writing", "resume_writing"):
            setattr(self, name, getattr(protocol, name))
        transport.set_protocol(self)  # uvloop caches bound methods
        protocol.connection_made(transport)
