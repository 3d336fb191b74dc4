"""The client of one request as the relay sees it, over the connection that aiohttp serves.

Owns what the relay needs of a client's connection: its body, its transport, the head and the end of
its answer. Must not know what is relayed.
"""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion11, StreamReader, web


class Client:
    """Who asks, for the time of one request."""

    def __init__(self, request: web.Request) -> None:
        self.request = request
        self.response: web.StreamResponse | None = None
        """Of a streamed answer."""
        self.chunked = request.version >= HttpVersion11
        """Whether a streamed answer is sent in chunks."""

    @property
    def transport(self) -> asyncio.WriteTransport | None:
        """``None`` once the connection is gone."""
        return self.request.transport

    @property
    def content_length(self) -> int | None:
        return self.request.content_length

    @property
    def content(self) -> StreamReader:
        """The request's body as it comes in."""
        return self.request.content

    async def begin(self, content_type: str, first: bytes) -> None:
        """Send the head of a streamed answer and the first of its body.

        Raises:
            ConnectionResetError: the client is gone.
        """
        response = web.StreamResponse(status=200, headers={"Content-Type": content_type})
        if self.chunked:
            response.enable_chunked_encoding()
        self.response = response
        await response.prepare(self.request)
        await response.write(first)

    async def end(self) -> None:
        """End a streamed answer and wait until the client has taken it."""
        assert self.response is not None
        await self.response.write_eof()
