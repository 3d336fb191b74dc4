"""The interface of the router that the HTTP surface uses.
:class:`sglang_sbs.router.server.RouterServer` implements it."""

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
    """Session for control requests to engines."""
    tokenizer: ChatTokenizer | None
    """Tokenizer of ``--tokenizer-path``."""
    lanes: Lanes
    traces: Traces | None
    draining: bool
    """Shutdown has begun: each response closes its connection."""
    started_at: int
    """Unix time in seconds."""
    policy: PolicyInForce

    async def add_worker(self, url: str, role: InstanceRole, bootstrap_port: int | None) -> Worker:
        """Register a worker and wait for it in the background. Raises: ValueError, the URL is bad
        or already registered; RouterError (503), the scheduler is unreachable."""

    async def remove_worker(self, worker: Worker) -> None:
        """Remove a worker. Raises: RouterError (503), the scheduler is unreachable."""

    async def update_worker(self, worker: Worker) -> None:
        """Publish the worker's new priority, cost or labels. Raises: RouterError (503)."""

    async def drain_worker(self, worker: Worker, draining: bool) -> None:
        """Stop or resume sending new requests to a worker. Raises: RouterError (503)."""

    async def switch_policy(self, policy: Policy) -> None:
        """Switch the scheduler's policy. Raises: RouterError (503), the scheduler is
        unreachable."""

    async def trial(self, do: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a trial (``do`` is ``begin``), end it (``end``) or ``show`` it. Returns the report
        of the current or last trial. Raises: RouterError (400), it cannot begin; RouterError (503),
        the scheduler is unreachable."""

    @property
    def placing_policy(self) -> str:
        """Policy that now places this process's requests; without the scheduler, the fallback's."""

    def scheduled_by(self) -> dict[str, Any]:
        """``{"scheduler": …}`` if another process schedules; else empty."""

    async def story(self, name: str) -> Story | None:
        """Find a recent request of any process by any of its ids; ``None`` if unknown."""

    async def abort(self, rid: str) -> int:
        """Abort requests by their clients' id in every process (empty: all) and return their
        number."""
