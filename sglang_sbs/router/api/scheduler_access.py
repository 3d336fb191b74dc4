"""The scheduler and its workers, as the HTTP surface uses them.
:mod:`sglang_sbs.router.schedulers` implements it for a scheduler in this process and in another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from sglang_sbs.router.dispatch.dispatcher import Dispatcher
from sglang_sbs.router.policy_in_force import PolicyInForce
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.scheduling.events import InstanceRole
from sglang_sbs.scheduling.explained.stories import Story
from sglang_sbs.scheduling.policy_registry import Policy


class SchedulerAccess(Protocol):
    policy: PolicyInForce

    @property
    def registry(self) -> Registry: ...

    @property
    def dispatcher(self) -> Dispatcher: ...

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
        """Return ``{"scheduler": …}`` if another process schedules; else empty."""

    async def story(self, name: str, known: Story | None) -> Story | None:
        """Complete ``known``, this process's record of a request, or find a recent request of any
        process by any of its ids; ``None`` if unknown."""

    async def abort_elsewhere(self, rid: str) -> int:
        """Abort requests of other processes by their clients' id (empty: all) and return their
        number."""
