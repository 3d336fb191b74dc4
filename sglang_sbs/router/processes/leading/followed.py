"""Whom a front end has followed: for people, and for the scheduler after."""

from __future__ import annotations

import time

import msgspec

from sglang_sbs.router.processes.messages import Cluster, Welcome


class LeadView(msgspec.Struct, frozen=True, kw_only=True):
    """Who schedules, as ``GET /workers`` of a front end shows it."""

    address: str
    """That which it says it has, or the one that is tried."""
    connected: bool
    """Whether this front end is served by it; else it places requests by itself."""
    term: int
    since: float | None
    """Seconds since 1970; ``None``: not known."""
    changes: int
    """How often this front end has found another one, or the same one in another term."""
    losses: int
    """How often it lost the one it had."""


class Followed:
    """The schedulers of one front end so far."""

    def __init__(self) -> None:
        self.boot_id = ""
        """Of the last one; empty: there was none."""
        self.term = 0
        """In which it led."""
        self.changes = 0
        self._target = ""
        self._address = ""
        self._since_s = 0.0

    def found(self, welcome: Welcome, target: str) -> str:
        """One more session begins; returns what the scheduler is to the last one, for the log."""
        before = (self.boot_id, self.term, self._target)
        self.boot_id, self.term, self._target = welcome.scheduler, welcome.term, target
        if not before[0]:
            return "the"
        self.changes += before[:2] != (self.boot_id, self.term)
        if before[2] != target:
            return "the other"
        return "the" if before[0] == self.boot_id else "the restarted"

    def said(self, cluster: Cluster) -> None:
        """How long it has led, and where it is."""
        self._address = cluster.address
        self._since_s = time.time() - cluster.lead_s

    def view(self, target: str, term: int, losses: int, *, connected: bool) -> LeadView:
        """``term``: the highest heard of."""
        address = self._address if connected and self._address else target
        return LeadView(
            address="this machine" if address.startswith("ipc://") else address,
            connected=connected,
            term=term,
            since=round(self._since_s, 3) if connected and self._since_s else None,
            changes=self.changes,
            losses=losses,
        )
