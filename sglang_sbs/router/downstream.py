"""The client's side of a stream: head, pieces, back pressure, end.

Owns one streaming response. Must not know legs or their meaning. Pieces are written to the
transport in the callback that brings them, past aiohttp's coroutine ``write``: per piece that saves
a task switch, which is most of what relaying it would cost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from aiohttp import HttpVersion11, web

HIGH_WATER_BYTES = 1 << 20
LOW_WATER_BYTES = 1 << 18
_RECHECK_S = 0.02
FINISH_S = 60.0
"""How long a client that stopped reading may take for the rest once everything was said."""


class Source(Protocol):
    """Where pieces come from."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Downstream:
    def __init__(self, request: web.Request, sources: Mapping[int, Source]) -> None:
        """``sources`` are paused while the client reads too slowly; more may be added later."""
        self._request = request
        self._response: web.StreamResponse | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._chunked = request.version >= HttpVersion11
        self._paused = False
        self._sources = sources

    @property
    def opened(self) -> bool:
        """The status line left: errors can only be events of the stream from now on."""
        return self._response is not None

    def push(self, data: bytes) -> None:
        """Send a piece; kept until :meth:`open` has sent the head."""
        transport = self._transport
        if transport is None:
            self._pending.append(data)
            self._pending_bytes += len(data)
            if self._pending_bytes > HIGH_WATER_BYTES:
                self._pause()
            return
        if transport.is_closing():
            return
        if self._chunked:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            transport.write(data)
        if transport.get_write_buffer_size() > HIGH_WATER_BYTES:
            self._pause()

    def _pause(self) -> None:
        for source in self._sources.values():  # also those that began since the last time
            source.pause()
        if not self._paused:
            self._paused = True
            asyncio.get_running_loop().call_later(_RECHECK_S, self._recheck)

    def _recheck(self) -> None:
        transport = self._transport
        if transport is not None and transport.is_closing():
            return
        if transport is None or transport.get_write_buffer_size() > LOW_WATER_BYTES:
            if self._request.transport is not None:
                asyncio.get_running_loop().call_later(_RECHECK_S, self._recheck)
            return
        self._paused = False
        for source in self._sources.values():
            source.resume()

    async def open(self, content_type: str) -> None:
        """Send the head and what was pushed so far, in one write. A second call does nothing."""
        if self._response is not None:
            return
        response = web.StreamResponse(status=200, headers={"Content-Type": content_type})
        if self._chunked:
            response.enable_chunked_encoding()
        self._response = response
        await response.prepare(self._request)
        pending, self._pending = self._pending, []
        await response.write(b"".join(pending))
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("client connection is gone")
        self._transport = transport
        # Pieces that came while the head was on its way.
        pending, self._pending = self._pending, []
        for data in pending:
            self.push(data)

    async def finish(self) -> web.StreamResponse:
        """End the body; returns the response for aiohttp.

        Raises:
            ConnectionResetError: the client does not take it; its connection is closed.
        """
        assert self._response is not None
        if self._transport is not None and self._transport.get_write_buffer_size() == 0:
            await self._response.write_eof()  # nothing waits for the client: nor will this
            return self._response
        try:
            async with asyncio.timeout(FINISH_S):
                await self._response.write_eof()
        except TimeoutError:
            if self._transport is not None:
                self._transport.abort()
            raise ConnectionResetError("the client stopped reading") from None
        return self._response
