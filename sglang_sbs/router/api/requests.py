"""Explains a recent request at ``GET /requests/{id}``: its result and why. The response is JSON, or
with ``Accept: text/plain`` the text of ``sglang-sbs why``."""

from __future__ import annotations

import msgspec
from aiohttp import web

from sglang_sbs.dashboard.pages import Handler
from sglang_sbs.explain.page import page
from sglang_sbs.router.api.scheduler_access import SchedulerAccess
from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.relay.recent import RecentRequests
from sglang_sbs.router.relay.time_split import complete
from sglang_sbs.scheduling.explained.stories import Story

_MOST_CHARS = 512


class Requests:
    def __init__(self, recent: RecentRequests, scheduler: SchedulerAccess) -> None:
        self._recent = recent
        self._scheduler = scheduler

    def routes(self) -> list[tuple[str, str, Handler]]:
        return [("GET", "/requests/{name:.+}", self.story)]

    async def story(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        story = await self._find(name) if len(name) <= _MOST_CHARS else None
        if story is None:
            why = "unknown request id: the router remembers only the last few thousand requests"
            raise RouterError(404, "request_not_found", why)
        if "text/plain" in request.headers.get("Accept", ""):
            return web.Response(text=page(story), content_type="text/plain")
        return web.Response(body=msgspec.json.encode(story), content_type="application/json")

    async def _find(self, name: str) -> Story | None:
        """Return the story of a recent request of any process, found by any of its ids; ``None`` if
        unknown."""
        found = self._recent.find(name)
        story = await self._scheduler.story(name, self._recent.story(name))
        if found is not None and story is not None:
            complete(story, found)
        return story
