"""The dashboard's pages over scripted feeds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from router_harness import TIMEOUT_S, Cluster

from sglang_sbs.dashboard.client import frames
from sglang_sbs.dashboard.feed import LocalFeed, Stop, Take
from sglang_sbs.dashboard.pages import Dashboard


def local_feed(running: Cluster) -> LocalFeed:
    feed = running.server.scheduler.feed
    assert isinstance(feed, LocalFeed)
    return feed


async def take(running: Cluster, count: int, key: str | None = None) -> list[dict[str, Any]]:
    """The first frames of a connection."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(TIMEOUT_S):
        async for frame in frames(running.url, key):
            found.append(frame)
            if len(found) == count:
                break
    return found


class ScriptedFeed:
    """Frames on command."""

    def __init__(self) -> None:
        self.takes: list[Take] = []

    def watch(self, take: Take) -> Stop:
        self.takes.append(take)
        return lambda: self.takes.remove(take)

    def close(self) -> None: ...


@asynccontextmanager
async def served(feed: ScriptedFeed) -> AsyncIterator[tuple[Dashboard, int]]:
    dashboard = Dashboard(feed)
    app = web.Application()
    for method, path, handler in dashboard.routes():
        app.router.add_route(method, path, handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield dashboard, int(runner.addresses[0][1])
    finally:
        dashboard.close()
        await runner.cleanup()
