"""Chooses the scheduler that a front end connects to.

A front end follows the scheduler that is active in the highest term, and stays with it until
another is active in a higher one, so a scheduler that is cut off but believes itself active keeps
no front ends. Every address is asked all the time, even during a session, because only that reveals
a later term. The same message carries the highest term this front end knows, which deposes
schedulers with an earlier one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from sglang_sbs.router.processes.leading.scouts import Dial, Line, Scouts
from sglang_sbs.router.processes.messages import Cluster, FromScheduler, Look, Welcome


@dataclass(frozen=True)
class ChoiceTimes:
    look_every_s: float = 0.5
    """Interval of polling all schedulers during a session; otherwise it is the heartbeat's."""
    fresh_s: float = 1.5
    """Age after which a scheduler's answer no longer counts."""
    again_s: float = 1.0
    """Shortest interval of reconnecting to an address whose scheduler is not active."""


_TIMES = ChoiceTimes()


class LeadView(msgspec.Struct, frozen=True, kw_only=True):
    """The active scheduler, as shown by ``GET /workers`` of a front end."""

    address: str
    """Address reported by the scheduler, or the one being tried."""
    connected: bool
    """Whether this front end has a session with the scheduler; if not, it places requests
    itself."""
    term: int
    since: float | None
    """Unix time in seconds when the scheduler became active; ``None`` if unknown."""
    changes: int
    """Number of times that another scheduler, or the same one in another term, was found."""
    losses: int
    """Number of times that this front end lost the scheduler."""


class SchedulerChoice:
    """Chooses the scheduler that a front end connects to. Use only from one event loop."""

    def __init__(
        self,
        endpoints: Sequence[str],
        dial: Dial,
        name: str,
        times: ChoiceTimes = _TIMES,
    ) -> None:
        """Create the choice among ``endpoints``, the preferred one first. ``dial`` connects to an
        endpoint; ``name`` is this front end's."""
        self.target = endpoints[0]
        """Address of the scheduler that the front end is connected to, or tries next."""
        self.term = 0
        """Highest term of any scheduler known to this front end."""
        self.boot_id = ""
        """Boot id of the last scheduler with a session; empty if there was none."""
        self.last_term = 0
        """Term of the last session."""
        self._found_at = self._address = ""
        self._since_s = 0.0
        self._changes = 0
        self._endpoints = tuple(endpoints)
        self._dial = dial
        self._name = name
        self._times = times
        self._loop = asyncio.get_running_loop()
        self._scouts = Scouts(self._endpoints if len(self._endpoints) > 1 else (), dial)
        self._asked_s = 0.0
        self._connected_s = 0.0
        self._turned_away = False

    def connect(self, receive: Callable[[FromScheduler], None]) -> Line:
        """Open a connection to ``target``. If it raises, nothing is left open."""
        self._connected_s = self._loop.time()
        self._turned_away = False
        return self._dial(self.target, receive)

    def look(self, *, served: bool) -> str:
        """Poll the schedulers if it is time, and set ``target`` to the active one. Return the
        reason to reconnect to ``target``, for the log; empty: stay. Call at every heartbeat."""
        now_s = self._loop.time()
        if not served or now_s - self._asked_s >= self._times.look_every_s:
            self._asked_s = now_s
            self._scouts.ask(Look(who=self._name, term=self.term, served=served))
        leader = self._leader()
        if leader is not None:
            if leader == self.target:
                return ""
            self.target = leader
            return f"{leader} is active in term {self.term}"
        if not self._turned_away or now_s - self._connected_s < self._times.again_s:
            return ""  # ZMQ reconnects by itself
        return f"{self.target} is not active"

    def turned_away(self) -> None:
        """Take note that the scheduler reached at ``target`` is not active. :meth:`look` then asks
        to reconnect, because another scheduler at the same address may be."""
        self._turned_away = True

    def found(self, welcome: Welcome) -> str:
        """Record a session with ``target``. Return the words for its scheduler in the log: "the"
        (same as before, or first), "the other" (new address) or "the restarted"."""
        before, at = (self.boot_id, self.last_term), self._found_at
        self.boot_id, self.last_term = welcome.scheduler, welcome.term
        self._found_at = self.target
        if before[0] != self.boot_id:  # its address is not known yet
            self._address, self._since_s = "", 0.0
        if not before[0]:
            return "the"
        self._changes += before != (self.boot_id, self.last_term)
        if at != self.target:
            return "the other"
        return "the" if before[0] == self.boot_id else "the restarted"

    def on_cluster(self, cluster: Cluster) -> None:
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
        """Return the endpoint of the active scheduler with the highest term; ``None`` if no active
        one answers, or only in terms earlier than the highest known."""
        terms = self._scouts.leaders(self._times.fresh_s)
        latest = max(terms, key=terms.__getitem__, default=None)
        if latest is None or terms[latest] < self.term:
            return None
        self.term = terms[latest]
        return self.target if terms.get(self.target) == self.term else latest
