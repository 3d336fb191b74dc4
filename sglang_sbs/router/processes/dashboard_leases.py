"""The scheduler process's side of dashboards open at its front ends. One that does not ask again
every second is forgotten, so frames are never queued for one that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_sbs.dashboard.feed import Feed, Stop
from sglang_sbs.router.processes.messages import DashboardFrame, WatchDashboard

LEASE_S = 3.0


@dataclass(slots=True)
class _Lease:
    until_s: float
    stop: Stop = lambda: None


@dataclass(eq=False)
class Leases:
    """Must be used from one event loop only."""

    feed: Feed
    tell: Callable[[bytes, DashboardFrame], bool]
    """Sends to a front end, False if it is gone."""
    _leases: dict[bytes, _Lease] = field(default_factory=dict)

    def ask(self, identity: bytes, question: WatchDashboard) -> None:
        """A front end wants frames for ``LEASE_S`` more, and perhaps a history now."""
        now = asyncio.get_running_loop().time
        known = self._leases.get(identity)
        if known is not None and not question.history:
            known.until_s = now() + LEASE_S
            return
        self._end(identity)
        lease = self._leases[identity] = _Lease(now() + LEASE_S)

        def take(payload: bytes, full: bool) -> None:
            frame = DashboardFrame(payload=payload, full=full)
            if now() > lease.until_s or not self.tell(identity, frame):
                self._end(identity)

        lease.stop = self.feed.watch(take)

    def _end(self, identity: bytes) -> None:
        lease = self._leases.pop(identity, None)
        if lease is not None:
            lease.stop()
