"""Frames of a scheduler in another process, at a front end.

While the front end is without the scheduler process its own fallback scheduler is shown, marked as
such.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from sglang_sbs.dashboard.feed import LocalFeed, Stop, Take
from sglang_sbs.router.assignment.scheduler_driver import SchedulerPump
from sglang_sbs.router.processes.messages import DashboardFrame, WatchDashboard
from sglang_sbs.router.processes.scheduler_link import SchedulerLink
from sglang_sbs.scheduling import SchedulerConfig

RENEW_S = 0.5


@dataclass(slots=True, eq=False)
class _Watcher:
    take: Take
    follows: bool = False
    """It has its history."""


class RemoteFeed:
    """A :class:`~sglang_sbs.dashboard.feed.Feed`. Must be used from one event loop only."""

    def __init__(self, link: SchedulerLink, config: SchedulerConfig) -> None:
        """``config`` is the fallback's."""
        self._link = link
        self._config = config
        self._watchers: list[_Watcher] = []
        self._renewer: asyncio.Task[None] | None = None
        self._own: LocalFeed | None = None
        self._own_pump: SchedulerPump | None = None

    def watch(self, take: Take) -> Stop:
        """The history comes with the answer."""
        watcher = _Watcher(take)
        self._watchers.append(watcher)
        self._renew()
        if self._renewer is None:
            self._renewer = asyncio.create_task(self._renew_for_ever())

        def stop() -> None:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

        return stop

    def close(self) -> None:
        self._watchers.clear()
        renewer, self._renewer = self._renewer, None
        if renewer is not None:
            renewer.cancel()
        self._leave_own()

    async def _renew_for_ever(self) -> None:
        while self._watchers:
            await asyncio.sleep(RENEW_S)
            self._renew()
        self._renewer = None
        self._leave_own()

    def _renew(self) -> None:
        """Ask the scheduler process, or the fallback while there is none."""
        pump = self._link.fallback_pump
        if pump is not self._own_pump:
            self._leave_own()
            for watcher in self._watchers:  # another scheduler: its frames do not fit the last ones
                watcher.follows = False
        waiting = not all(watcher.follows for watcher in self._watchers)
        if pump is None:
            self._link.tell(WatchDashboard(history=waiting))
        elif self._own is None:
            self._own_pump = pump
            self._own = LocalFeed(pump, self._config, alone=True)
            self._own.watch(self._deliver)
        elif waiting:
            self._own.watch(self._deliver)()  # only for its history

    def _leave_own(self) -> None:
        own, self._own, self._own_pump = self._own, None, None
        if own is not None:
            own.close()

    def received(self, frame: DashboardFrame) -> None:
        if self._own is None:
            self._deliver(frame.payload, frame.full)

    def _deliver(self, payload: bytes, full: bool) -> None:
        """A history to those that wait for one, a frame to those that have one."""
        for watcher in list(self._watchers):
            if full != watcher.follows:
                watcher.follows = True
                watcher.take(payload, full)
