"""Selects the active one of several schedulers without a lock: the first available in order.

:class:`Order` decides from known facts and the time; :class:`FixedOrder` asks the other schedulers.

Theory of operation
-------------------
Every scheduler asks all others for their state, and front
ends report to each scheduler whether they are being served. A scheduler becomes active when

* no earlier one in the order answers,
* none that answers is active, and
* no front end reports an active scheduler.

The last rule keeps two schedulers that cannot reach each other from both becoming active: as long
as one front end that reaches both is served by the first, the second stays a standby. A front end
that reaches only the second places its requests itself meanwhile.

Two active schedulers learn of each other by their answers or through a front end, and the later
term wins. A scheduler that returns does not take over at once: the active one steps down when an
earlier one has been ready for ``return_s``.

This cannot distinguish a dead scheduler from one that is cut off together with all front ends that
it reaches: each side then has an active scheduler and its own schedule. Only a store with a
majority can (:mod:`sglang_sbs.router.election`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_sbs.router.election import Election
from sglang_sbs.router.processes.leading.scouts import Dial, Scouts
from sglang_sbs.router.processes.messages import Look, Standing

logger = logging.getLogger(__name__)

_MOST_FRONT_ENDS = 4096


@dataclass(frozen=True)
class OrderTimes:
    tick_s: float = 0.1
    lost_s: float = 1.0
    """Silence after which another scheduler counts as absent; a process inactive for this long
    knows nothing about the others."""
    start_s: float = 2.0
    """Time for which a scheduler without knowledge waits for all answers."""
    served_s: float = 2.0
    """Time after which a front end's report of its session expires unless repeated."""
    return_s: float = 5.0
    """After this long an earlier scheduler that is ready gets the lead back."""


_TIMES = OrderTimes()


class Order:
    """Conclusions of one scheduler. Times are seconds of one clock."""

    def __init__(
        self,
        own: int,
        now_s: float,
        times: OrderTimes = _TIMES,
    ) -> None:
        """Create the state of the scheduler at position ``own``."""
        self.term: int | None = None
        """Term in which it is active."""
        self._own = own
        self._highest = 0
        self._times = times
        self._knows_nothing_since_s = now_s
        self._asked_s = now_s
        self._served: dict[str, float] = {}
        self._ready_since_s: float | None = None

    def on_look(self, look: Look, now_s: float) -> None:
        self._highest = max(self._highest, look.term)
        self._served.pop(look.who, None)
        if len(self._served) >= _MOST_FRONT_ENDS:
            self._forget(now_s)
        if look.served and len(self._served) < _MOST_FRONT_ENDS:
            self._served[look.who] = now_s

    def exceed(self, term: int) -> None:
        """Take note of another scheduler that is or was active in this term."""
        self._highest = max(self._highest, term)
        if self.term is not None and term >= self.term:
            self.term = None

    def stalled(self, now_s: float) -> bool:
        """Return whether this process was inactive long enough for others to have taken over."""
        if now_s - self._asked_s <= self._times.lost_s:
            return False
        self._asked_s = self._knows_nothing_since_s = now_s
        self.term = self._ready_since_s = None
        return True

    def decide(self, standings: Sequence[Standing | None], now_s: float) -> int | None:
        """Return the term in which it is active. ``standings`` are in order, with ``None`` for
        schedulers that do not answer and for itself."""
        self.stalled(now_s)
        self._asked_s = now_s
        others = {i: s for i, s in enumerate(standings) if s is not None and i != self._own}
        self._highest = max([self._highest, *(s.term for s in others.values())])
        if self.term is not None and self._must_end(others, now_s):
            self.term = None
        elif self.term is None and self._may_begin(others, len(standings), now_s):
            self.term = self._highest = self._highest + 1
        if self.term is None:
            self._ready_since_s = None
        return self.term

    def _must_end(self, others: dict[int, Standing], now_s: float) -> bool:
        assert self.term is not None
        for position, standing in others.items():
            if standing.active and (standing.term, -position) > (self.term, -self._own):
                return True
        if not any(s.ready for position, s in others.items() if position < self._own):
            self._ready_since_s = None
        elif self._ready_since_s is None:
            self._ready_since_s = now_s
        since_s, return_s = self._ready_since_s, self._times.return_s
        return since_s is not None and now_s - since_s >= return_s

    def _may_begin(self, others: dict[int, Standing], count: int, now_s: float) -> bool:
        if any(position < self._own or standing.active for position, standing in others.items()):
            return False
        self._forget(now_s)
        if self._served:
            return False
        waited_s = now_s - self._knows_nothing_since_s
        return len(others) == count - 1 or waited_s >= self._times.start_s

    def _forget(self, now_s: float) -> None:
        limit_s = self._times.served_s
        self._served = {who: at for who, at in self._served.items() if now_s - at < limit_s}


class FixedOrder(Election):
    def __init__(
        self,
        endpoints: Sequence[str],
        own: int,
        dial: Dial,
        times: OrderTimes = _TIMES,
    ) -> None:
        """Stand for election; ``endpoints`` are all schedulers in order, ``own`` is this process's
        position."""
        super().__init__()
        self._endpoints = tuple(endpoints)
        self._own = own
        self._loop = asyncio.get_running_loop()
        others = [endpoint for endpoint in endpoints if endpoint != endpoints[own]]
        self._scouts = Scouts(others, dial)
        self._times = times
        self._order = Order(own, self._loop.time(), times)

    async def run(self, lead: Callable[[int], None], follow: Callable[[], None]) -> None:
        self._lead, self._follow = lead, follow
        try:
            while True:
                self._scouts.ask(Look(who=self._endpoints[self._own]))
                lost_s = self._times.lost_s
                standings = [
                    self._scouts.standing(endpoint, lost_s) for endpoint in self._endpoints
                ]
                self._order.decide(standings, self._loop.time())
                self._look()
                await asyncio.sleep(self._times.tick_s)
        finally:
            if self._order.term is not None:
                self.exceed(self._order.term)
            self._scouts.close()

    @property
    def leader(self) -> str | None:
        terms = self._scouts.leaders(self._times.lost_s)
        return max(terms, key=terms.__getitem__, default=None)

    def _term_now(self) -> int | None:
        led = self._order.term is not None
        if self._order.stalled(self._loop.time()) and led:
            logger.warning(
                "this process was inactive for %g s or more: another may be active",
                self._times.lost_s,
            )
        return self._order.term

    def exceed(self, term: int) -> None:
        self._order.exceed(term)
        self._look()

    def on_look(self, look: Look) -> None:
        """Handle a :class:`Look`, with which another process asks for this one's state and reports
        its own."""
        self._order.on_look(look, self._loop.time())
