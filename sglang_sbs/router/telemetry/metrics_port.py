"""The metrics port. Serves ``GET /metrics`` without a key, and other pages of a process that has no
clients.

It shares descriptors with the serving port, so it accepts few connections, and closes silent
ones."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from aiohttp import web

from sglang_sbs.console.plain_words import naming_port
from sglang_sbs.router.client.intake import (
    KEEP_ALIVE_S,
    Doorman,
    Gate,
    ParserLog,
    refusing_odd_expect,
)

logger = logging.getLogger(__name__)

_AGAIN_S = 0.5
_LAST_ANSWERS_S = 1.0
"""Time for unfinished responses when the port closes."""
MAX_CONNECTIONS = 64
"""Limit on connections; above it the longest silent one is closed, else the new one."""

Page = Callable[[web.Request], Awaitable[web.Response]]


def page_of(metrics: bytes) -> web.Response:
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return web.Response(body=metrics, headers={"Content-Type": kind})


class MetricsPort:
    """Serves pages: ``open`` it, or ``open_when_free``, and ``close`` it."""

    def __init__(
        self, host: str, port: int, pages: Mapping[str, Page], malformed: Callable[[], None]
    ) -> None:
        """Create the port; ``malformed`` is called for requests that are not valid HTTP."""
        self._host = host
        self.port = port
        """0 selects a free port; the actual one once it is open."""
        self._doorman = Doorman()
        app = web.Application(middlewares=[self._doorman.between_requests])
        app.add_routes([web.get(path, page) for path, page in pages.items()])
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=ParserLog(malformed),
            auto_decompress=False,
            keepalive_timeout=KEEP_ALIVE_S,
            shutdown_timeout=_LAST_ANSWERS_S,
        )
        self._listening: asyncio.Server | None = None

    async def open(self) -> None:
        """Open the port. Raises: OSError, it is in use."""
        if self._runner.server is None:
            await self._runner.setup()
            assert self._runner.server is not None
            refusing_odd_expect(self._runner.server)
        gate = partial(Gate, self._doorman, self._runner.server, self._has_room)
        with naming_port("--prometheus-port", self._host, self.port):
            listening = await asyncio.get_running_loop().create_server(gate, self._host, self.port)
        self._listening = listening
        self.port = int(listening.sockets[0].getsockname()[1])

    async def open_when_free(self) -> None:
        """Open the port as soon as it is free; log an error if it can never be opened."""
        warning = "no metrics at :%d until it is free (--prometheus-port)"
        while self._listening is None:
            try:
                await self.open()
                logger.info("metrics at :%d", self.port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    logger.error("no metrics port: %s", error)
                    return
                if warning:
                    logger.warning(warning, self.port)
                warning = ""
                await asyncio.sleep(_AGAIN_S)

    async def close(self) -> None:
        """Close the port, even if it was never open."""
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()

    def _has_room(self) -> bool:
        server = self._runner.server
        assert server is not None
        return len(server.connections) < MAX_CONNECTIONS or self._doorman.close_oldest()
