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
    """Silence after which another scheduler counts as absent. A process that was itself inactive
    for this long gives up its lead, because another may be active."""
    start_s: float = 2.0
    """After a start or a pause, longest wait for the others' answers before becoming active."""
    served_s: float = 2.0
    """Time after which a front end's report that it is being served expires unless repeated."""
    return_s: float = 5.0
    """The active scheduler steps down when one earlier in the order has been ready this long."""


_TIMES = OrderTimes()


class Order:
    """Decides whether one scheduler is active, from the answers of the others and the reports of
    front ends. Does no I/O. Times are seconds of one clock."""

    def __init__(
        self,
        own: int,
        now_s: float,
        times: OrderTimes = _TIMES,
    ) -> None:
        """Create the state of the scheduler at position ``own``."""
        self.term: int | None = None
        """Term in which this scheduler is active; ``None``: standby."""
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
        """Take note that another scheduler is or was active in ``term``; become a standby if the
        own term is not later."""
        self._highest = max(self._highest, term)
        if self.term is not None and term >= self.term:
            self.term = None

    def stalled(self, now_s: float) -> bool:
        """Return whether this process was inactive for more than ``lost_s``: another may be active.
        If so, become a standby and wait for new answers."""
        if now_s - self._asked_s <= self._times.lost_s:
            return False
        self._asked_s = self._knows_nothing_since_s = now_s
        self.term = self._ready_since_s = None
        return True

    def decide(self, standings: Sequence[Standing | None], now_s: float) -> int | None:
        """Return the term in which this scheduler is active from now on; ``None``: standby.
        ``standings`` has all schedulers in order, ``None`` for this one and for silent ones."""
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
        """Create the election. ``endpoints``: all schedulers in order; ``own``: this process's
        position in it; ``dial``: opens connections to the others."""
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
        """Take note of what the sender of a :class:`Look` reports: the highest term it knows, and
        whether it is a front end that is being served."""
        self._order.on_look(look, self._loop.time())
