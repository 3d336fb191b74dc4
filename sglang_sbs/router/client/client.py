"""The client of one request as the relay sees it, and the client that aiohttp serves.

Owns what the relay needs of a client's connection: its body, its transport, the head and the end of
its answer. Must not know what is relayed. The other kind of client is :mod:`.serving_port`'s.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from aiohttp import HttpVersion11, web


class Body(Protocol):
    """A request's body as it comes in."""

    def is_eof(self) -> bool:
        """All of it is here and was read, or can be by ``read_nowait``."""

    def read_nowait(self) -> bytes: ...

    async def readany(self) -> bytes:
        """What has come meanwhile; empty at the end."""


class Client(Protocol):
    """Who asks, for the time of one request."""

    @property
    def transport(self) -> asyncio.WriteTransport | None:
        """``None`` once the connection is gone."""

    @property
    def content_length(self) -> int | None: ...

    @property
    def content(self) -> Body: ...

    @property
    def chunked(self) -> bool:
        """Whether a streamed answer is sent in chunks (HTTP/1.1)."""

    def head(self, content_type: str) -> bytes | None:
        """The head of a streamed answer, to be written with its first piece.

        ``None``: it has to be sent by :meth:`begin`.
        """

    async def begin(self, content_type: str, first: bytes) -> None:
        """Send the head of a streamed answer and the first of its body."""

    async def end(self) -> None:
        """End a streamed answer and wait until the client has taken it."""


class WebClient:
    """The client of a request that came through aiohttp."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response: web.StreamResponse | None = None
        """Of a streamed answer."""
        self.chunked = request.version >= HttpVersion11

    @property
    def transport(self) -> asyncio.WriteTransport | None:
        """See :class:`Client`."""
        return self._request.transport

    @property
    def content_length(self) -> int | None:
        return self._request.content_length

    @property
    def content(self) -> Body:
        return self._request.content

    def head(self, content_type: str) -> bytes | None:
        """It is aiohttp that sends it."""
        return None

    async def begin(self, content_type: str, first: bytes) -> None:
        """See :class:`Client`."""
        response = web.StreamResponse(status=200, headers={"Content-Type": content_type})
        if self.chunked:
            response.enable_chunked_encoding()
        self.response = response
        await response.prepare(self._request)
        await response.write(first)

    async def end(self) -> None:
        """See :class:`Client`."""
        assert self.response is not None
        await self.response.write_eof()
