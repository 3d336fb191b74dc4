"""Begins, ends and shows a trial of two policies (:mod:`sglang_sbs.trial`) at ``/trial``."""

from __future__ import annotations

from aiohttp import web

from sglang_sbs.dashboard.pages import Handler
from sglang_sbs.router.api.bodies import json_answer, read_object
from sglang_sbs.router.api.scheduler_access import SchedulerAccess
from sglang_sbs.router.client.intake import Bodies

PATH = "/trial"
_BODIES_BYTES = 1 << 20


class TrialControl:
    def __init__(self, scheduler: SchedulerAccess) -> None:
        self._scheduler = scheduler
        self._bodies = Bodies(_BODIES_BYTES)

    def routes(self) -> list[tuple[str, str, Handler]]:
        return [("GET", PATH, self.show), ("POST", PATH, self.begin), ("DELETE", PATH, self.end)]

    async def show(self, _request: web.Request) -> web.StreamResponse:
        return json_answer(await self._scheduler.trial("show", {}))

    async def begin(self, request: web.Request) -> web.StreamResponse:
        """Begin a trial, and respond as ``GET`` once its first slot has begun."""
        body = await read_object(request, self._bodies)
        return json_answer(await self._scheduler.trial("begin", body))

    async def end(self, _request: web.Request) -> web.StreamResponse:
        """End the trial, and respond as ``GET`` once the original policy is restored."""
        return json_answer(await self._scheduler.trial("end", {}))
