"""How requests come in: the pace and size a client must keep to, and the memory of all bodies;
without both, a byte a minute would hold a descriptor and memory for ever."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from sglang_sbs.router.client.dense_input import DenseInput, Slices
from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.lanes import Turns
from sglang_sbs.router.options.config import MAX_BODIES_BYTES

GRACE_S = 30.0
"""For the first request head of a connection, and for a body before its pace counts."""
KEEP_ALIVE_S = 75.0
MIN_BYTES_PER_S = 16 * 1024
MAX_HEAD_LINE_BYTES = 32 * 1024
"""Of a request line or header: tokens and baggage of gateways are larger than aiohttp's 8,190."""
READ_BYTES = 64 << 10
"""With twice as much of a body unread, no more is read from its connection. aiohttp's own limit is
four times that: twenty large bodies at once then hold up everybody else."""
_SMALL_BYTES = 64 << 10
_LARGE_AT_ONCE = 1
"""So many large bodies grow in a turn of the event loop, each by up to a quarter of a megabyte."""
_SMALL_PIECE_BYTES = 1 << 14
"""A piece that waits for no turn: who dribbles takes none from those that send."""


@dataclass(repr=False)
class Bodies:
    """What all bodies may take together, each from its first byte to the end of its request. When
    there is no room, the largest that is still coming in has to go. Small ones may take a quarter
    more: they get in however many large ones there are."""

    max_bytes: int = MAX_BODIES_BYTES
    held_bytes: int = 0
    coming: dict[BodyShare, asyncio.Timeout] = field(default_factory=dict)
    """Those not here yet, with what can end them early."""
    turns: Turns = field(default_factory=lambda: Turns(_LARGE_AT_ONCE))

    @contextmanager
    def share(self) -> Iterator[BodyShare]:
        share = BodyShare(self)
        try:
            yield share
        finally:
            self.held_bytes -= share.held_bytes

    def took(self, share: BodyShare, more_bytes: int) -> None:
        """Raises: RouterError (503), this body is the one that has to go."""
        share.held_bytes += more_bytes
        self.held_bytes += more_bytes
        small = share.held_bytes <= _SMALL_BYTES
        limit_bytes = self.max_bytes * 5 // 4 if small else self.max_bytes
        while self.held_bytes > limit_bytes:
            largest = max(self.coming, key=lambda one: one.held_bytes, default=share)
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
    """What the body of one request takes of it."""

    bodies: Bodies
    held_bytes: int = 0
    lost: bool = False
    """Another body got its room."""

    async def read(
        self, request: web.Request, limit_bytes: int, whose: str = ", the limit of this endpoint"
    ) -> bytes | bytearray:
        """The whole body. ``whose``: the words behind ``limit_bytes`` in the error. Raises:
        RouterError (413), it is longer; (408), it comes at less than ``MIN_BYTES_PER_S`` after
        ``GRACE_S``; (503), there is no room for it."""
        too_large = f"the body is over {limit_bytes} bytes{whose}"
        if (request.content_length or 0) > limit_bytes:
            raise RouterError(413, "payload_too_large", too_large)
        if request.content.is_eof():  # it came with the head
            whole = request.content.read_nowait()
            if len(whole) > limit_bytes:
                raise RouterError(413, "payload_too_large", too_large)
            self.bodies.took(self, len(whole))
            return whole
        body = bytearray()
        started_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(GRACE_S) as deadline:
                self.bodies.coming[self] = deadline
                while not self.lost and (data := await request.content.readany()):
                    body += data
                    if len(body) > limit_bytes:
                        raise RouterError(413, "payload_too_large", too_large)
                    self.bodies.took(self, len(data))
                    if len(body) > _SMALL_BYTES and len(data) > _SMALL_PIECE_BYTES:
                        started_s += await self._turn(deadline)
                    if not self.lost:
                        deadline.reschedule(started_s + GRACE_S + len(body) / MIN_BYTES_PER_S)
        except TimeoutError:
            if not self.lost:
                why = f"the body stopped after {len(body)} bytes or comes too slowly"
                raise RouterError(408, "body_too_slow", why) from None
        finally:
            self.bodies.coming.pop(self, None)
        if self.lost:
            raise self.bodies.no_room()
        return body  # a copy as bytes would hold up the loop

    async def _turn(self, deadline: asyncio.Timeout) -> float:
        """Wait for one, which is no fault of the client. Returns: for how many seconds."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        deadline.reschedule(None)
        await self.bodies.turns.take(self)
        return loop.time() - asked_s


class ParserLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log of a port, without clients that left or sent no HTTP: its own lines show what
    they sent, a key among it for all one knows, and any stranger can fill the log with them."""

    def __init__(self, malformed: Callable[[], None]) -> None:
        """``malformed`` is told of each such request."""
        super().__init__(logging.getLogger("sglang_sbs.http"))
        self._malformed = malformed

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        error = kwargs.get("exc_info")
        error = error if isinstance(error, BaseException) else sys.exception()
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            self._malformed()
            self.logger.debug("a request that is no HTTP: %s", type(error).__name__)
            return
        if isinstance(error, ConnectionError):
            self.logger.debug("a client left: %s", type(error).__name__)
            return
        self.logger.log(level, msg, *args, **kwargs)


def refusing_odd_expect(server: web.Server) -> web.Server:
    """It refuses an Expect of anything but 100-continue by itself: aiohttp quotes it, and breaks
    over one that is no text."""
    handle = server.request_handler

    async def handled(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", "100-continue").lower() != "100-continue":
            why = "the only Expect that is met here is 100-continue"
            return RouterError(417, "expectation_failed", why).response()
        return await handle(request)

    server.request_handler = handled
    return server


class Doorman:
    """Closes connections on which nothing is asked: silent ones, that sent no whole request head,
    and idle ones, between two requests."""

    def __init__(
        self, patience_s: float = GRACE_S, most: int = 1 << 20, idle_s: float = KEEP_ALIVE_S
    ) -> None:
        """``most``: of them at a time, else the one that waits longest has to go. ``patience_s``
        with silent ones, ``idle_s`` with idle ones."""
        self._patience_s, self._idle_s = patience_s, idle_s
        self._most = most
        self.slices = Slices()
        """Of what they send; shared by the connections of a port."""
        self._waiting: dict[Any, _Wait] = {}
        """By transport, the one that has waited longest first."""

    def watch(self, transport: asyncio.BaseTransport) -> None:
        self.enter(transport, self._patience_s)

    def rests(self, transport: asyncio.BaseTransport) -> None:
        """A request on it was answered."""
        self.enter(transport, self._idle_s)

    def heard(self, transport: Any) -> None:
        """A whole request head came over that connection, or it is gone."""
        wait = self._waiting.pop(transport, None)
        if wait is not None:
            wait.timer.cancel()

    @web.middleware
    async def between_requests(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """The outermost middleware of an application whose connections are watched."""
        self.heard(request.transport)
        try:
            return await handler(request)
        finally:
            if request.transport is not None:  # also one that is closed with something unsent
                self.rests(request.transport)

    def close_oldest(self) -> bool:
        """To make room: the one that waits longest; whether there was one."""
        while self._waiting:
            if self._close(next(iter(self._waiting))):
                return True
        return False

    def enter(self, transport: Any, patience_s: float, *, spared: bool = False) -> None:
        while len(self._waiting) >= self._most:
            self._close(next(iter(self._waiting)))
        timer = asyncio.get_running_loop().call_later(patience_s, self._close, transport)
        self._waiting[transport] = _Wait(timer, patience_s, spared)

    def _close(self, transport: Any) -> bool:
        """False: it is closed already, or the client still takes an answer, for which it may wait
        as long again, once. One that was closed with something unsent is not gone before that."""
        wait = self._waiting.pop(transport)
        wait.timer.cancel()
        unsent = transport.get_write_buffer_size()
        if unsent and not wait.spared:
            self.enter(transport, wait.patience_s, spared=True)
            return False
        if transport.is_closing() and not unsent:
            return False
        transport.abort()
        return True


class _Wait(NamedTuple):
    timer: asyncio.TimerHandle
    patience_s: float
    spared: bool


@dataclass(eq=False, repr=False)
class Gate(asyncio.Protocol):
    """aiohttp's protocol, made once there is a connection, which a doorman watches to its end."""

    doorman: Doorman
    serve: Callable[[], asyncio.Protocol]
    """Makes aiohttp's protocol."""
    has_room: Callable[[], bool] = lambda: True
    """A connection there is no room for is closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self.has_room():
            transport.abort()  # type: ignore[attr-defined]
            return
        self.doorman.watch(transport)
        protocol, heard = self.serve(), self.doorman.heard
        dense = DenseInput(transport, protocol, self.doorman.slices)

        def lost(exc: Exception | None) -> None:  # without self, else both wait for a collector
            heard(transport)
            dense.lost()
            protocol.connection_lost(exc)

        self.connection_lost = lost  # type: ignore[method-assign]
        self.data_received = dense.received  # type: ignore[method-assign]
        for name in ("eof_received", "pause_writing", "resume_writing"):
            setattr(self, name, getattr(protocol, name))
        transport.set_protocol(self)  # uvloop has looked its methods up
        protocol.connection_made(transport)
