"""Frames of a scheduler in another process, as a front end gets them."""

from __future__ import annotations

from sglang_sbs.dashboard.feed import LocalFeed, Stop, Take
from sglang_sbs.router.processes.messages import WatchDashboard
from sglang_sbs.router.processes.scheduler_link import SchedulerLink


class RemoteFeed:
    """While there is no scheduler, of this front end's fallback, and marked as such."""

    def __init__(self, link: SchedulerLink) -> None:
        self._link = link
        self._watchers: dict[Take, bool] = {}
        """Whether each has its history."""
        self._own: LocalFeed | None = None
        """The fallback's, while that is watched."""
        self._stop: Stop = lambda: None

    def watch(self, take: Take) -> Stop:
        """The history comes with the answer."""
        self._watchers[take] = False
        self._begin()

        def stop() -> None:
            if self._watchers.pop(take, None) is not None and not self._watchers:
                self._stop()

        return stop

    def close(self) -> None:
        self._watchers.clear()
        self.scheduler_changed()

    def scheduler_changed(self) -> None:
        """It was lost or found: the frames of another one do not fit the last ones."""
        own, self._own = self._own, None
        if own is not None:
            own.close()
        self._watchers = dict.fromkeys(self._watchers, False)
        if self._watchers:
            self._begin()

    def _begin(self) -> None:
        """Have a history sent, and frames from then on."""
        pump = self._link.pump
        if pump is None:
            self._link.tell(WatchDashboard(history=True))
            self._stop = self._want_no_more
        else:
            self._stop()
            self._own = self._own or LocalFeed(pump, alone=True)
            self._stop = self._own.watch(self.deliver)

    def _want_no_more(self) -> None:
        self._link.tell(WatchDashboard(ended=True))

    def deliver(self, payload: bytes, full: bool) -> None:
        """A history to those that wait for one, a frame to those that have one."""
        for take, follows in list(self._watchers.items()):
            if take in self._watchers and full != follows:
                self._watchers[take] = True
                take(payload, full)
