"""The metrics port: ``GET /metrics`` and what else is asked of a process that serves no clients,
open to whoever reaches it.

It shares descriptors with the serving port, so it takes few connections, and none that say nothing.
Must not know what is on the page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from aiohttp import web

from sglang_sbs.router.client.intake import Doorman, Leaving, ParserLog

MAX_CONNECTIONS = 64
"""Of scrapers; when all are taken the longest silent one has to go, else the new one."""

Page = Callable[[web.Request], Awaitable[web.Response]]


class MetricsPort:
    """``open`` once or until it succeeds, then ``close``."""

    def __init__(
        self,
        page: Page,
        malformed: Callable[[], None],
        shutdown_s: float,
        others: Mapping[str, Page] = {},
    ) -> None:
        """``malformed`` is told of requests that are no HTTP; ``shutdown_s`` is how long answers
        under way may take at the end; ``others`` are pages by path."""
        self._doorman = Doorman()
        app = web.Application(middlewares=[self._heard])
        app.router.add_get("/metrics", page)
        for path, other in others.items():
            app.router.add_get(path, other)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=ParserLog(malformed),
            auto_decompress=False,
            shutdown_timeout=shutdown_s,
        )
        self._listening: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> int:
        """The port, also where 0 was asked for. Raises: OSError, it is taken."""
        if self._runner.server is None:
            await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(lambda: _Gate(self.admit), host, port)
        return int(self._listening.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Also while it was never open."""
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()

    def admit(self, transport: asyncio.BaseTransport) -> None:
        """A new connection: to aiohttp, if there is room."""
        server = self._runner.server
        full = server is None or len(server.connections) >= MAX_CONNECTIONS
        if server is None or (full and not self._doorman.close_oldest()):
            transport.abort()  # type: ignore[attr-defined]
            return
        self._doorman.watch(transport)
        protocol = server()
        transport.set_protocol(Leaving(protocol, partial(self._doorman.heard, transport)))
        protocol.connection_made(transport)

    @web.middleware
    async def _heard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self._doorman.heard(request.transport)
        return await handler(request)


class _Gate(asyncio.Protocol):
    """Stands in for aiohttp's protocol until there is a connection."""

    def __init__(self, admit: Callable[[asyncio.BaseTransport], None]) -> None:
        self._admit = admit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._admit(transport)
