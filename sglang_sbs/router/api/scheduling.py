"""Endpoints about scheduling decisions: the policy in force at ``/policy``, a trial of two policies
(:mod:`sglang_sbs.trial`) at ``/trial``, and a recent request's result and why at
``/requests/{id}``."""

from __future__ import annotations

import reprlib

import msgspec
from aiohttp import web

from sglang_sbs.dashboard.pages import Handler
from sglang_sbs.explain.page import page
from sglang_sbs.router.api.bodies import json_answer, read_object
from sglang_sbs.router.api.scheduler_access import SchedulerAccess
from sglang_sbs.router.client.intake import Bodies
from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.relay.recent import RecentRequests
from sglang_sbs.router.relay.time_split import complete
from sglang_sbs.scheduling.explained.stories import Story
from sglang_sbs.scheduling.policy_registry import policy_names

_BODIES_BYTES = 2 << 20
"""Limit on the request bodies of these endpoints together."""
_TRIAL_BYTES = 8 << 10
"""Limit on the body that begins a trial, a few hundred bytes. A message to the scheduler's process
holds eight times as much: numbers may get longer when they are encoded again."""
_MOST_NAME_CHARS = 512


class Scheduling:
    def __init__(self, scheduler: SchedulerAccess, recent: RecentRequests) -> None:
        self._scheduler = scheduler
        self._recent = recent
        self._bodies = Bodies(_BODIES_BYTES)

    def routes(self) -> list[tuple[str, str, Handler]]:
        return [
            ("GET", "/policy", self.policy),
            ("PUT", "/policy", self.switch_policy),
            ("GET", "/trial", self.trial),
            ("POST", "/trial", self.begin_trial),
            ("DELETE", "/trial", self.end_trial),
            ("GET", "/requests/{name:.+}", self.story),
        ]

    async def policy(self, _request: web.Request) -> web.StreamResponse:
        state = self._scheduler.policy.state
        return json_answer(
            {
                "policy": state.policy,
                "since": state.since_s,
                "set_by": state.by or "command line",
                "switches": state.switches,
                "in_force": self._scheduler.placing_policy,
                "policies": list(policy_names()),
            }
        )

    async def switch_policy(self, request: web.Request) -> web.StreamResponse:
        """Switch the policy, and respond as ``GET`` once the scheduler uses it."""
        name = (await read_object(request, self._bodies)).get("policy")
        wanted = name.lower().replace("-", "_") if isinstance(name, str) else name
        if not isinstance(wanted, str) or wanted not in policy_names():
            choice = ", ".join(policy_names())
            message = f"policy must be one of {choice}, not {reprlib.repr(name)}"
            raise RouterError(400, "unknown_policy", message)
        await self._scheduler.switch_policy(wanted)
        return await self.policy(request)

    async def trial(self, _request: web.Request) -> web.StreamResponse:
        return json_answer(await self._scheduler.trial("show", {}))

    async def begin_trial(self, request: web.Request) -> web.StreamResponse:
        """Begin a trial, and respond as ``GET`` once its first slot has begun."""
        body = await read_object(request, self._bodies, _TRIAL_BYTES)
        return json_answer(await self._scheduler.trial("begin", body))

    async def end_trial(self, _request: web.Request) -> web.StreamResponse:
        """End the trial, and respond as ``GET`` once the original policy is restored."""
        return json_answer(await self._scheduler.trial("end", {}))

    async def story(self, request: web.Request) -> web.StreamResponse:
        """Return the story of a request as JSON, or with ``Accept: text/plain`` as the text of
        ``sglang-sbs why``."""
        name = request.match_info["name"]
        story = await self._find(name) if len(name) <= _MOST_NAME_CHARS else None
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
