"""A dashboard recorder without a router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_sbs.dashboard.recorder import DashboardRecorder
from sglang_sbs.scheduling import Scheduler
from sglang_sbs.scheduling.events import Command, Event
from sglang_sbs.scheduling.explained.timelines import Timelines


class LoneRecorder(DashboardRecorder):
    """Keeps its own timelines, which in a router are the driver's."""

    def __init__(self, scheduler: Scheduler, now_s: float, **options: Any) -> None:
        super().__init__(scheduler, now_s, Timelines(), **options)

    def observe(self, event: Event, commands: Sequence[Command], now_s: float) -> None:
        """Show the event to the timelines first, as the driver does."""
        self._timelines.observe(event, commands, now_s)
        super().observe(event, commands, now_s)
