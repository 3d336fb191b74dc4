"""Interface through which the HTTP endpoints use the scheduler and its workers.
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
        """Register and return a worker, whose engine may start later. Raises: ValueError, the URL
        is bad or already registered; RouterError (503), the scheduler is unreachable."""

    async def remove_worker(self, worker: Worker) -> None:
        """Remove a worker. Raises: RouterError (503), the scheduler is unreachable."""

    async def update_worker(self, worker: Worker) -> None:
        """Publish the worker's new priority, cost or labels. Raises: RouterError (503), the
        scheduler is unreachable."""

    async def drain_worker(self, worker: Worker, draining: bool) -> None:
        """Stop or resume sending new requests to a worker. Raises: RouterError (503), the scheduler
        is unreachable."""

    async def switch_policy(self, policy: Policy) -> None:
        """Switch the scheduler's policy. Raises: RouterError: 503, the scheduler is unreachable;
        400, it does not know the policy."""

    async def trial(self, do: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a trial (``do`` is ``begin``), end it (``end``) or ``show`` it. Returns the report
        of the current or last trial. Raises: RouterError: 400, it cannot begin; 503, the scheduler
        is unreachable."""

    @property
    def placing_policy(self) -> str:
        """Policy that now places this process's requests; without the scheduler, the fallback's."""

    def scheduled_by(self) -> dict[str, Any]:
        """Return ``{"scheduler": …}``, the state of the link, if another process schedules; else
        empty."""

    async def story(self, name: str, known: Story | None) -> Story | None:
        """Return the story of a recent request, found in any process by any of its ids; ``None`` if
        unknown. ``known``, this process's record of it, is completed with the scheduler's
        attempts."""

    async def abort_elsewhere(self, rid: str) -> int:
        """Abort requests of other processes whose client's request id begins with ``rid`` (empty:
        all), and return their number."""
