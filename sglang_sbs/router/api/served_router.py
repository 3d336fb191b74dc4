"""What the HTTP surface needs of the router behind it.
:class:`sglang_sbs.router.server.RouterServer` is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import aiohttp

from sglang_sbs.dashboard.pages import Dashboard
from sglang_sbs.router.assignment.assigner import Assigner
from sglang_sbs.router.client.intake import Doorman
from sglang_sbs.router.lanes import Lanes
from sglang_sbs.router.options.router_options import RouterOptions
from sglang_sbs.router.policy_in_force import PolicyInForce
from sglang_sbs.router.prompts.chat_tokenizer import ChatTokenizer
from sglang_sbs.router.relay.relay import Relay
from sglang_sbs.router.telemetry.metrics import RouterMetrics
from sglang_sbs.router.telemetry.tracing import Traces
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.scheduling.events import InstanceRole
from sglang_sbs.scheduling.explained.stories import Story
from sglang_sbs.scheduling.policy_registry import Policy


class Router(Protocol):
    options: RouterOptions
    metrics: RouterMetrics
    registry: Registry
    dispatcher: Assigner
    relay: Relay
    dashboard: Dashboard
    doorman: Doorman
    session: aiohttp.ClientSession
    """For questions to engines."""
    tokenizer: ChatTokenizer | None
    """Of ``--tokenizer-path``."""
    lanes: Lanes
    traces: Traces | None
    draining: bool
    """It ends: every answer is the last of its connection."""
    started_at: int
    """Seconds since 1970."""
    policy: PolicyInForce

    async def add_worker(self, url: str, role: InstanceRole, bootstrap_port: int | None) -> Worker:
        """Register a worker and wait for it in the background. Raises: ValueError, a bad URL, or
        there already; RouterError (503), the scheduler cannot be told."""

    async def remove_worker(self, worker: Worker) -> None:
        """Raises: RouterError (503), the scheduler cannot be told."""

    async def update_worker(self, worker: Worker) -> None:
        """Its priority, cost or labels were set. Raises: RouterError (503)."""

    async def drain_worker(self, worker: Worker, draining: bool) -> None:
        """Keep new requests away from it, or let them in again. Raises: RouterError (503)."""

    async def switch_policy(self, policy: Policy) -> None:
        """Have the scheduler decide by another policy. Raises: RouterError (503), it cannot be
        told."""

    async def trial(self, do: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a trial (``do`` is ``begin``), end it (``end``) or ``show`` it; the report of the
        one that runs, or of the last one. Raises: RouterError (400), it cannot begin; RouterError
        (503), the scheduler cannot be asked."""

    @property
    def placing_policy(self) -> str:
        """Which policy places the requests of this process now: without the scheduler it is that
        of the fallback."""

    def scheduled_by(self) -> dict[str, Any]:
        """``{"scheduler": …}``: who schedules, where that is another process; else empty."""

    async def story(self, name: str) -> Story | None:
        """One of the last requests, by any of its ids, of every process. None: it is unknown."""

    async def abort(self, rid: str) -> int:
        """End requests by the id their clients gave, in every process (empty: all); how many."""
