"""The assigner whose scheduler is in this process, driven from its event loop."""

from __future__ import annotations

from typing import Any

from sglang_sbs.router.assignment.assigner import Assigner
from sglang_sbs.router.assignment.scheduler_driver import (
    DispatchObserver,
    SchedulerLike,
    SchedulerPump,
)
from sglang_sbs.scheduling.eventlog import EventLogWriter
from sglang_sbs.scheduling.events import Event


class Dispatcher(Assigner):
    """Also what everybody else in the router tells the scheduler through (:meth:`submit`)."""

    def __init__(
        self,
        scheduler: SchedulerLike,
        *,
        observer: DispatchObserver | None = None,
        event_log: EventLogWriter | None = None,
        give_up_s: float | None = None,
    ) -> None:
        """``give_up_s``: see :class:`~.assigner.Assigner`."""
        super().__init__(give_up_s)
        self.pump = SchedulerPump(
            scheduler,
            decided=self._decided,
            failed=self._fail,
            counts=observer,
            event_log=event_log,
        )

    def submit(self, event: Event) -> None:
        self.pump.submit(event)

    _say = submit

    @property
    def scheduler_errors(self) -> int:
        return self.pump.errors

    def snapshot(self) -> Any:
        return self.pump.snapshot()

    def flush_log(self) -> None:
        self.pump.flush_log()

    def close(self) -> None:
        self.pump.close()
