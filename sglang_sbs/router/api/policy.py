"""Shows and switches the policy in force at ``/policy``."""

from __future__ import annotations

import reprlib

from aiohttp import web

from sglang_sbs.dashboard.pages import Handler
from sglang_sbs.router.api.bodies import json_answer, read_object
from sglang_sbs.router.api.scheduler_access import SchedulerAccess
from sglang_sbs.router.client.intake import Bodies
from sglang_sbs.router.errors import RouterError
from sglang_sbs.scheduling.policy_registry import policy_names

PATH = "/policy"
_BODIES_BYTES = 1 << 20


class PolicyControl:
    def __init__(self, scheduler: SchedulerAccess) -> None:
        self._scheduler = scheduler
        self._bodies = Bodies(_BODIES_BYTES)

    def routes(self) -> list[tuple[str, str, Handler]]:
        return [("GET", PATH, self.show), ("PUT", PATH, self.switch)]

    async def show(self, _request: web.Request) -> web.StreamResponse:
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

    async def switch(self, request: web.Request) -> web.StreamResponse:
        """Switch the policy, and respond as ``GET`` once the scheduler uses it."""
        name = (await read_object(request, self._bodies)).get("policy")
        wanted = name.lower().replace("-", "_") if isinstance(name, str) else name
        if not isinstance(wanted, str) or wanted not in policy_names():
            choice = ", ".join(policy_names())
            message = f"policy must be one of {choice}, not {reprlib.repr(name)}"
            raise RouterError(400, "unknown_policy", message)
        await self._scheduler.switch_policy(wanted)
        return await self.show(request)
