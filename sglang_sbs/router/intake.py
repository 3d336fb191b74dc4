"""How requests come in: the pace and size a client must keep to.

Owns reading request bodies and the guard against connections that never say anything whole. Must
not know what a request means. Without both, a client that sends a byte a minute holds a descriptor
and memory for as long as it likes.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from sglang_sbs.router.clients import Client
from sglang_sbs.router.errors import RouterError

GRACE_S = 30.0
"""For the first request head of a connection, and for a body before its pace counts."""
MIN_BYTES_PER_S = 16 * 1024
MAX_HEAD_LINE_BYTES = 32 * 1024
"""Of a request line or header: tokens and baggage of gateways are larger than aiohttp's 8,190."""


async def read_body(request: Client, limit_bytes: int) -> bytes:
    """The whole body.

    Raises:
        HTTPRequestEntityTooLarge: it is longer than ``limit_bytes``.
        RouterError: 408, it comes at less than ``MIN_BYTES_PER_S`` after ``GRACE_S``.
    """
    if (request.content_length or 0) > limit_bytes:
        raise web.HTTPRequestEntityTooLarge(limit_bytes)
    if request.content.is_eof():  # it came with the head
        whole = request.content.read_nowait()
        if len(whole) > limit_bytes:
            raise web.HTTPRequestEntityTooLarge(limit_bytes)
        return whole
    body = bytearray()
    started_s = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(GRACE_S) as deadline:
            while data := await request.content.readany():
                body += data
                if len(body) > limit_bytes:
                    raise web.HTTPRequestEntityTooLarge(limit_bytes)
                deadline.reschedule(started_s + GRACE_S + len(body) / MIN_BYTES_PER_S)
    except TimeoutError:
        raise RouterError(
            408, "body_too_slow", f"the body stopped after {len(body)} bytes or comes too slowly"
        ) from None
    return bytes(body)


class ParserLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log of a port, without what clients sent that is no HTTP, and those that left.

    Its own lines have a traceback and the offending bytes, a key among them for all one knows, and
    whoever likes can have as many of them as he likes.
    """

    def __init__(self, malformed: Callable[[], None]) -> None:
        """``malformed`` is told of each such request."""
        super().__init__(logging.getLogger("sglang_sbs.http"))
        self._malformed = malformed

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """What every other method of a logger comes down to."""
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


class Doorman:
    """Closes connections that send no request head."""

    def __init__(self, patience_s: float = GRACE_S, most: int = 1 << 20) -> None:
        """``most``: of them at a time, else the longest silent one has to go."""
        self._patience_s = patience_s
        self._most = most
        self._silent: dict[Any, float] = {}  # by age: the value is when patience ends
        self._sweep: asyncio.TimerHandle | None = None

    def watch(self, transport: asyncio.BaseTransport) -> None:
        """A new connection."""
        loop = asyncio.get_running_loop()
        if len(self._silent) >= self._most:
            self.close_oldest()
        self._silent[transport] = loop.time() + self._patience_s
        if self._sweep is None:
            self._sweep = loop.call_later(self._patience_s, self._close_silent)

    def heard(self, transport: asyncio.BaseTransport | None) -> None:
        """A whole request head came over that connection, or it is gone."""
        self._silent.pop(transport, None)

    def close_oldest(self) -> bool:
        """To make room: the one that has said nothing for longest; whether there was one."""
        while self._silent:
            transport = next(iter(self._silent))
            del self._silent[transport]
            if not transport.is_closing():
                transport.abort()
                return True
        return False

    def _close_silent(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweep = None
        while self._silent:
            transport, end_s = next(iter(self._silent.items()))
            if end_s > loop.time():
                self._sweep = loop.call_at(end_s, self._close_silent)
                return
            del self._silent[transport]
            transport.abort()
