"""Frames of a scheduler in another process: how a front end gets them, and how that process knows
who wants them. One that does not ask again every second is forgotten, so frames are never queued
for a front end that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_sbs.dashboard.feed import Feed, LocalFeed, Stop, Take
from sglang_sbs.router.assignment.scheduler_driver import SchedulerPump
from sglang_sbs.router.processes.messages import DashboardFrame, WatchDashboard
from sglang_sbs.router.processes.scheduler_link import SchedulerLink
from sglang_sbs.scheduling import SchedulerConfig

RENEW_S = 0.5
LEASE_S = 3.0


class RemoteFeed:
    """A front end's; while there is no scheduler, of its own fallback, and marked as such. Must be
    used from one event loop only."""

    def __init__(self, link: SchedulerLink, config: SchedulerConfig) -> None:
        """``config`` is the fallback's."""
        self._link = link
        self._config = config
        self._watchers: dict[Take, bool] = {}
        """Whether each has its history."""
        self._renewer: asyncio.Task[None] | None = None
        self._own: LocalFeed | None = None
        self._pump: SchedulerPump | None = None
        """The fallback's, while that is watched."""

    def watch(self, take: Take) -> Stop:
        """The history comes with the answer."""
        self._watchers[take] = False
        self._renew()
        if self._renewer is None:
            self._renewer = asyncio.create_task(self._renew_for_ever())

        def stop() -> None:
            self._watchers.pop(take, None)

        return stop

    def close(self) -> None:
        self._watchers.clear()
        if self._renewer is not None:
            self._renewer.cancel()
            self._renewer = None
        self._leave_own()

    async def _renew_for_ever(self) -> None:
        while self._watchers:
            await asyncio.sleep(RENEW_S)
            self._renew()
        self._renewer = None
        self._leave_own()

    def _renew(self) -> None:
        """Ask the scheduler process, or the fallback while there is none."""
        pump = self._link.pump
        if pump is not self._pump:
            self._leave_own()
            # Another scheduler: its frames do not fit the last ones.
            self._watchers = dict.fromkeys(self._watchers, False)
        waiting = not all(self._watchers.values())
        if pump is None:
            self._link.tell(WatchDashboard(history=waiting))
        elif self._own is None:
            self._pump = pump
            self._own = LocalFeed(pump, self._config, alone=True)
            self._own.watch(self._deliver)
        elif waiting:
            self._own.watch(self._deliver)()  # only for its history

    def _leave_own(self) -> None:
        own, self._own, self._pump = self._own, None, None
        if own is not None:
            own.close()

    def received(self, frame: DashboardFrame) -> None:
        if self._own is None:
            self._deliver(frame.payload, frame.full)

    def _deliver(self, payload: bytes, full: bool) -> None:
        """A history to those that wait for one, a frame to those that have one."""
        for take, follows in list(self._watchers.items()):
            if take in self._watchers and full != follows:
                self._watchers[take] = True
                take(payload, full)


@dataclass(eq=False)
class Leases:
    """The scheduler process's, of front ends where somebody looks. Must be used from one event loop
    only."""

    feed: Feed
    tell: Callable[[bytes, DashboardFrame], bool]
    """Sends to a front end, False if it is gone."""
    _until_s: dict[bytes, float] = field(default_factory=dict)
    _stops: dict[bytes, Stop] = field(default_factory=dict)

    def ask(self, identity: bytes, question: WatchDashboard) -> None:
        """A front end wants frames for ``LEASE_S`` more, and perhaps a history now."""
        now = asyncio.get_running_loop().time
        follows = identity in self._until_s and not question.history
        if not follows:
            self._end(identity)
        self._until_s[identity] = now() + LEASE_S
        if follows:
            return

        def take(payload: bytes, full: bool) -> None:
            frame = DashboardFrame(payload=payload, full=full)
            if now() > self._until_s.get(identity, 0.0) or not self.tell(identity, frame):
                self._end(identity)

        self._stops[identity] = self.feed.watch(take)

    def _end(self, identity: bytes) -> None:
        self._until_s.pop(identity, None)
        if stop := self._stops.pop(identity, None):
            stop()
