"""A front end's registry of workers, and the workers' states in messages. The registry copies the
scheduler's while connected, and is independent otherwise."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from sglang_sbs.router.errors import LegFailure
from sglang_sbs.router.options.config import BreakerConfig, MonitorConfig, PrefixWish
from sglang_sbs.router.processes.messages import LegFailed, WorkerState
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import WorkerInfo
from sglang_sbs.router.workers.worker import Worker, WorkerEvents, WorkerFacts
from sglang_sbs.scheduling.events import InstanceUp, PrefixSource

logger = logging.getLogger(__name__)

_FOLLOWED = tuple(name for name in WorkerFacts.__struct_fields__ if name not in ("url", "role"))
_FOUND_HERE = ("tokenizer",)
"""Kinds of worker problems that a front end detects itself."""
_MAX_PROBLEM_CHARS = 512
"""Limit on a problem's text, because all workers go into one message."""


def state_of(worker: Worker, now_s: float) -> WorkerState:
    facts: dict[str, Any] = {name: getattr(worker, name) for name in WorkerFacts.__struct_fields__}
    problems = {kind: text[:_MAX_PROBLEM_CHARS] for kind, text in worker.problems.items()}
    return WorkerState(
        **facts | {"problems": problems},
        breaker=worker.breaker.state,
        active=worker.active,
        report_age_s=worker.report_age_s(now_s),
        reports=sum(worker.reports.values()),
    )


def states_of(workers: Iterable[Worker]) -> list[WorkerState]:
    now_s = time.monotonic()
    return [state_of(worker, now_s) for worker in workers]


class MirroredRegistry(Registry):
    """A front end's workers. ``events`` are called only while there is no scheduler."""

    def __init__(
        self,
        events: WorkerEvents = WorkerEvents(),  # noqa: B008 - it is frozen
        breaker: BreakerConfig | None = None,
        *,
        monitor: MonitorConfig = MonitorConfig(),  # noqa: B008 - it is frozen
        prefix_source: PrefixWish = "off",
    ) -> None:
        super().__init__(
            events,
            breaker,
            expects_endforward=False,
            monitor=monitor,
            prefix_source=prefix_source,
        )
        self.report: Callable[[LegFailed], bool] = lambda failed: False
        """Sends a failure to the scheduler, which counts it. Returns False if it was not sent; this
        registry then counts it."""

    def announcements(self) -> list[InstanceUp]:
        """Return an :class:`InstanceUp` for each usable worker, to submit to a new scheduler."""
        return [self._instance_up(worker) for worker in self if worker.usable]

    def follow(self, states: Iterable[WorkerState]) -> None:
        now_s = time.monotonic()
        known: set[str] = set()
        for state in states:
            worker = self.get(state.url)
            if worker is not None and worker.role != state.role:
                self.remove(worker)
                worker = None
            try:
                state.info = msgspec.convert(state.info, WorkerInfo | None, from_attributes=True)
                worker = worker or self.add(state.url, state.role)
            except ValueError as error:
                logger.error("the scheduler reported an unusable worker %s: %s", state.url, error)
                continue
            known.add(worker.url)
            own = {kind: worker.problems[kind] for kind in _FOUND_HERE if kind in worker.problems}
            for name in _FOLLOWED:
                setattr(worker, name, getattr(state, name))
            worker.breaker.follow(state.breaker, now_s)
            worker.active_everywhere = state.active
            worker.problems = state.problems | own
            worker.reports = {0: state.reports}
            age_s = state.report_age_s
            worker.last_report_s = {0: now_s - age_s} if age_s is not None else {}
            worker.announced = worker.usable
        for worker in self:
            if worker.url not in known:
                worker.announced = False
                self.remove(worker)

    def leg_failed(self, failure: LegFailure) -> None:
        if failure.counts_against_worker and not self.report(
            msgspec.convert(failure, LegFailed, from_attributes=True)
        ):
            super().leg_failed(failure)

    def room_left(self, url: str) -> None:
        report = LegFailed(worker=url, leg="prefill", status=0, code="", message="", left_room=True)
        if not self.report(report):
            super().room_left(url)

    def prefix_source_of(self, worker: Worker) -> PrefixSource:
        """Return "off", because only the scheduler process matches prefixes."""
        return "off"

    def _check_signal(self, worker: Worker, now_s: float) -> None:
        """Do nothing: EndForward goes to the scheduler process, so its absence here is normal."""
