"""Which of several schedulers a front end speaks with.

A front end follows the scheduler that leads in the highest term, and stays with it while nobody
leads in a higher one: a scheduler that is cut off from the others and believes that it leads keeps
nobody. Every address is asked all the time, also while there is a session, for that alone tells of
a later term. The same question carries the highest term this front end knows of, which deposes
whoever leads in an earlier one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from sglang_sbs.router.processes.leading.scouts import Dial, Line, Scouts
from sglang_sbs.router.processes.messages import Cluster, FromScheduler, Look, Welcome

LOOK_EVERY_S = 0.5
"""While there is a session; without one at every beat."""
FRESH_S = 1.5
"""An older answer tells nothing."""
AGAIN_S = 1.0
"""So often an address whose scheduler does not lead is connected to anew."""


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


class SchedulerChoice:
    """Must be used from one event loop only."""

    def __init__(self, endpoints: Sequence[str], dial: Dial, name: str) -> None:
        """``endpoints``: the one to prefer first; ``name``: of this front end."""
        self.target = endpoints[0]
        """The address the session is with, or is to be with."""
        self.term = 0
        """The highest heard of."""
        self.boot_id = ""
        """Of the last scheduler that was found; empty: there was none."""
        self.last_term = 0
        """In which it led."""
        self._found_at = self._address = ""
        self._since_s = 0.0
        self._changes = 0
        self._endpoints = tuple(endpoints)
        self._dial = dial
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._scouts = Scouts(self._endpoints if len(self._endpoints) > 1 else (), dial)
        self._asked_s = 0.0
        self._connected_s = 0.0
        self._turned_away = False

    def connect(self, receive: Callable[[FromScheduler], None]) -> Line:
        """A line to ``target``. May raise; then nothing is left open."""
        self._connected_s = self._loop.time()
        self._turned_away = False
        return self._dial(self.target, receive)

    def look(self, *, served: bool) -> str:
        """At every beat: why to connect anew, to ``target``; empty: there is no reason."""
        now_s = self._loop.time()
        if not served or now_s - self._asked_s >= LOOK_EVERY_S:
            self._asked_s = now_s
            self._scouts.ask(Look(who=self._name, term=self.term, served=served))
        leader = self._leader()
        if leader is not None:
            if leader == self.target:
                return ""
            self.target = leader
            return f"{leader} leads in term {self.term}"
        if not self._turned_away or now_s - self._connected_s < AGAIN_S:
            return ""  # ZMQ connects again by itself
        return f"{self.target} does not lead"

    def turned_away(self) -> None:
        """``target`` does not lead. Behind one address there may be several, one of which does."""
        self._turned_away = True

    def found(self, welcome: Welcome) -> str:
        """A session with ``target``; returns what it is to the last scheduler, for the log."""
        before, at = (self.boot_id, self.last_term), self._found_at
        self.boot_id, self.last_term = welcome.scheduler, welcome.term
        self._found_at = self.target
        if before[0] != self.boot_id:  # it has not said yet where it is
            self._address, self._since_s = "", 0.0
        if not before[0]:
            return "the"
        self._changes += before != (self.boot_id, self.last_term)
        if at != self.target:
            return "the other"
        return "the" if before[0] == self.boot_id else "the restarted"

    def said(self, cluster: Cluster) -> None:
        self._address = cluster.address
        self._since_s = time.time() - cluster.lead_s

    def view(self, losses: int, *, connected: bool) -> LeadView:
        address = self._address if connected and self._address else self.target
        return LeadView(
            address="this machine" if address.startswith("ipc://") else address,
            connected=connected,
            term=self.term,
            since=round(self._since_s, 3) if connected and self._since_s else None,
            changes=self._changes,
            losses=losses,
        )

    def close(self) -> None:
        self._scouts.close()

    def _leader(self) -> str | None:
        """Who leads in the highest term, which is not below the highest heard of."""
        terms = self._scouts.leaders(FRESH_S)
        latest = max(terms, key=terms.__getitem__, default=None)
        if latest is None or terms[latest] < self.term:
            return None
        self.term = terms[latest]
        return self.target if terms.get(self.target) == self.term else latest
