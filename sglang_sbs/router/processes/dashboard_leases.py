"""The scheduler process's side of dashboards that are open at its front ends.

A front end asks again every second; one that does not is forgotten, so frames are never queued for
one that is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from sglang_sbs.dashboard.feed import Feed, Stop
from sglang_sbs.router.processes.messages import DashboardFrame, WatchDashboard

LEASE_S = 3.0


@dataclass(slots=True)
class _Lease:
    until_s: float
    stop: Stop


class Leases:
    """Must be used from one event loop only."""

    def __init__(self, feed: Feed, tell: Callable[[bytes, DashboardFrame], bool]) -> None:
        """``tell`` sends to a front end, False if it is gone."""
        self._feed = feed
        self._tell = tell
        self._leases: dict[bytes, _Lease] = {}
        self._loop = asyncio.get_running_loop()

    def ask(self, identity: bytes, question: WatchDashboard) -> None:
        """A front end wants frames for ``LEASE_S`` more, and perhaps a history now."""
        known = self._leases.get(identity)
        if known is not None and not question.history:
            known.until_s = self._loop.time() + LEASE_S
            return
        self._end(identity)
        until_s = self._loop.time() + LEASE_S
        lease = self._leases[identity] = _Lease(until_s, lambda: None)

        def take(payload: bytes, full: bool) -> None:
            if self._loop.time() > lease.until_s or not self._tell(
                identity, DashboardFrame(payload=payload, full=full)
            ):
                self._end(identity)

        lease.stop = self._feed.watch(take)

    def _end(self, identity: bytes) -> None:
        lease = self._leases.pop(identity, None)
        if lease is not None:
            lease.stop()
