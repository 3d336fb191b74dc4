"""Dashboard frames for a front end's watchers, from a scheduler in another process."""

from __future__ import annotations

from sglang_sbs.dashboard.feed import LocalFeed, Stop, Take
from sglang_sbs.router.processes.messages import WatchDashboard
from sglang_sbs.router.processes.scheduler_link import SchedulerLink


class RemoteFeed:
    """Passes on the scheduler's frames. Without a scheduler the frames come from this front end's
    fallback, and are marked as such."""

    def __init__(self, link: SchedulerLink) -> None:
        self._link = link
        self._watchers: dict[Take, bool] = {}
        """Whether each watcher has received a history, after which it gets single frames."""
        self._own: LocalFeed | None = None
        """Feed of the fallback scheduler while watchers use it."""
        self._stop: Stop = lambda: None

    def watch(self, take: Take) -> Stop:
        """Send a history and then every frame to ``take``; return a function that stops it."""
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
        """Send all watchers a new history after the scheduler was lost or found, because frames of
        another scheduler do not continue the old one."""
        own, self._own = self._own, None
        if own is not None:
            own.close()
        self._watchers = dict.fromkeys(self._watchers, False)
        if self._watchers:
            self._begin()

    def _begin(self) -> None:
        """Request a history, then frames: from the fallback if in use, else from the scheduler."""
        pump = self._link.pump
        if pump is None:
            self._link.send_message(WatchDashboard(history=True))
            self._stop = self._want_no_more
        else:
            self._stop()
            self._own = self._own or LocalFeed(pump, alone=True)
            self._stop = self._own.watch(self.deliver)

    def _want_no_more(self) -> None:
        self._link.send_message(WatchDashboard(ended=True))

    def deliver(self, payload: bytes, full: bool) -> None:
        """Pass on a frame: a history (``full``) to watchers that wait for one, any other frame to
        those that have received theirs."""
        for take, follows in list(self._watchers.items()):
            if take in self._watchers and full != follows:
                self._watchers[take] = True
                take(payload, full)
