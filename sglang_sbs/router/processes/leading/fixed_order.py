"""Which of several schedulers leads where no store decides: the first in order that is there.

:class:`Order` decides, with what is known and the time going in; :class:`FixedOrder` asks the
others.

Theory of operation
-------------------
Every scheduler asks all others how they stand, and front ends tell each of them whether they are
served by anybody. A scheduler leads when

* nobody before it in the order answers,
* nobody who answers leads, and
* no front end says that it is served.

The last is what keeps two schedulers that do not reach each other from leading both: as long as one
front end that reaches both is content with the first, the second stays a standby. A front end that
reaches only the second places its requests by itself meanwhile.

Two that lead learn of each other by their answers or by a front end: the later term wins. One that
is back hands nothing back at once: who leads steps down when one before it has been ready for
``RETURN_S``.

What this cannot do is tell a scheduler that is dead from one that it is cut off from together with
all front ends that it reaches: then both sides have a scheduler, and a schedule, of their own. Only
a store with a majority can (:mod:`sglang_sbs.router.election`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from sglang_sbs.router.election import Election
from sglang_sbs.router.processes.leading.scouts import Dial, Scouts
from sglang_sbs.router.processes.messages import Look, Standing

logger = logging.getLogger(__name__)

TICK_S = 0.1
LOST_S = 1.0
"""Another one that has not answered for so long is not there; a process that did nothing for so
long knows nothing of the others."""
START_S = 2.0
"""So long whoever knows nothing waits for answers of all."""
SERVED_S = 2.0
"""What a front end said of its session is forgotten then, unless it says so again."""
RETURN_S = 5.0
_MOST_FRONT_ENDS = 4096


class Order:
    """What one of them concludes. Times: seconds of one clock."""

    def __init__(self, own: int, now_s: float) -> None:
        """``own``: the position in the order."""
        self.term: int | None = None
        """In which it leads."""
        self._own = own
        self._highest = 0
        self._knows_nothing_since_s = now_s
        self._asked_s = now_s
        self._served: dict[str, float] = {}
        self._ready_since_s: float | None = None

    def told(self, look: Look, now_s: float) -> None:
        self._highest = max(self._highest, look.term)
        self._served.pop(look.who, None)
        if len(self._served) >= _MOST_FRONT_ENDS:
            self._forget(now_s)
        if look.served and len(self._served) < _MOST_FRONT_ENDS:
            self._served[look.who] = now_s

    def exceed(self, term: int) -> None:
        """Somebody leads, or led, in this term."""
        self._highest = max(self._highest, term)
        if self.term is not None and term >= self.term:
            self.term = None

    def stalled(self, now_s: float) -> bool:
        """Whether this process did nothing for so long that the others may have done without it."""
        if now_s - self._asked_s <= LOST_S:
            return False
        self._asked_s = self._knows_nothing_since_s = now_s
        self.term = self._ready_since_s = None
        return True

    def decide(self, standings: Sequence[Standing | None], now_s: float) -> int | None:
        """The term in which it leads. ``standings``: in order, ``None`` for who does not answer and
        for itself."""
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
        return self._ready_since_s is not None and now_s - self._ready_since_s >= RETURN_S

    def _may_begin(self, others: dict[int, Standing], count: int, now_s: float) -> bool:
        if any(position < self._own or standing.active for position, standing in others.items()):
            return False
        self._forget(now_s)
        if self._served:
            return False
        return len(others) == count - 1 or now_s - self._knows_nothing_since_s >= START_S

    def _forget(self, now_s: float) -> None:
        self._served = {who: at for who, at in self._served.items() if now_s - at < SERVED_S}


class FixedOrder(Election):
    def __init__(self, endpoints: Sequence[str], own: int, dial: Dial) -> None:
        """``endpoints``: of all, in order; ``own``: which of them this process is."""
        super().__init__()
        self._endpoints = tuple(endpoints)
        self._own = own
        self._loop = asyncio.get_running_loop()
        others = [one for one in endpoints if one != endpoints[own]]
        self._scouts = Scouts(others, dial)
        self._order = Order(own, self._loop.time())

    async def run(self, lead: Callable[[int], None], follow: Callable[[], None]) -> None:
        self._lead, self._follow = lead, follow
        try:
            while True:
                self._scouts.ask(Look(who=self._endpoints[self._own]))
                standings = [self._scouts.standing(one, LOST_S) for one in self._endpoints]
                self._order.decide(standings, self._loop.time())
                self._look()
                await asyncio.sleep(TICK_S)
        finally:
            if self._order.term is not None:
                self.exceed(self._order.term)
            self._scouts.close()

    @property
    def leader(self) -> str | None:
        terms = self._scouts.leaders(LOST_S)
        return max(terms, key=terms.__getitem__, default=None)

    def _term_now(self) -> int | None:
        led = self._order.term is not None
        if self._order.stalled(self._loop.time()) and led:
            logger.warning("this process did nothing for %g s or more: others may lead", LOST_S)
        return self._order.term

    def exceed(self, term: int) -> None:
        self._order.exceed(term)
        self._look()

    def told(self, look: Look) -> None:
        """Somebody asks how this process stands, and says how he does."""
        self._order.told(look, self._loop.time())
