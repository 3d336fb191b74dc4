"""Whether this scheduler process schedules, and the term that every message of it bears."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import Metric

from sglang_sbs.router.election import Election
from sglang_sbs.router.metric_families import gauge, total
from sglang_sbs.router.processes.leading.fixed_order import FixedOrder
from sglang_sbs.router.processes.messages import Hello, Look, Standing, Unwelcome

logger = logging.getLogger(__name__)

_MOST_AHEAD = 1_000_000
"""Terms: nobody leads that often between two words of a peer."""


@dataclass(eq=False)
class Lead:
    election: Election
    address: str = ""
    """Where front ends reach this process."""
    begun: int = 0
    """Leads of this process so far."""
    since_s: float = 0.0
    """When the present one began."""
    _highest: int = 0

    @property
    def active(self) -> bool:
        """Asked before whatever only the one that schedules may do."""
        return self.election.leads()

    @property
    def term(self) -> int:
        """In which this process leads; else the highest heard of."""
        return self.election.term or self._highest

    @property
    def leader(self) -> str:
        """The address of who schedules, as far as it is known."""
        return self.address if self.election.term else self.election.leader or ""

    def begin(self, term: int, now_s: float) -> None:
        self.begun += 1
        self.since_s = now_s
        self._highest = max(self._highest, term)

    def shown(self, term: int) -> None:
        """Somebody else leads, or led, in this term. One far beyond all that were is nobody's: the
        terms must last."""
        if term > self._highest + _MOST_AHEAD:
            logger.warning("term %d is dropped: the latest is %d", term, self._highest)
            return
        self._highest = max(self._highest, term)
        if term >= self.term:
            self.election.exceed(term)

    def looked(self, look: Look, *, ready: bool) -> Standing:
        if look.term > self.term:
            self.shown(look.term)
        if isinstance(self.election, FixedOrder):
            self.election.told(look)
        return Standing(active=self.active, ready=ready)

    def turned_away(self) -> Unwelcome:
        """What a front end is told by who does not schedule."""
        return Unwelcome(standby=True, active=self.leader)

    def deposed_by(self, hello: Hello, boot_id: str) -> None:
        """A front end may know of a later scheduler than this one."""
        if hello.term > self.term:
            self.shown(hello.term)
        elif hello.scheduler not in ("", boot_id) and hello.last_term:
            self.shown(hello.last_term)

    def shown_to_people(self) -> dict[str, Any] | None:
        """On the dashboard; ``None`` where there can only be this one."""
        if isinstance(self.election, Unopposed):
            return None
        for_s = round(asyncio.get_running_loop().time() - self.since_s, 1)
        return {"address": self.address, "term": self.term, "for_s": for_s, "begun": self.begun}

    def families(self) -> Iterator[Metric]:
        about = "1 if this process schedules, 0 if it is a standby"
        yield gauge("sbs_scheduler_active", about, self.active)
        about = "Latest term that this scheduler process knows of"
        yield gauge("sbs_scheduler_term", about, self.term)
        yield total("sbs_scheduler_leads", "Times this process has begun to schedule", self.begun)


class Unopposed(Election):
    """The election of a scheduler that is the only one."""

    leader = None
    _own_term: int | None = None

    async def run(self, lead: Callable[[int], None], follow: Callable[[], None]) -> None:
        self.begin(lead, follow)
        await asyncio.Event().wait()

    def begin(self, lead: Callable[[int], None], follow: Callable[[], None]) -> None:
        self._lead, self._follow = lead, follow
        self._own_term = 1
        self._look()

    def exceed(self, term: int) -> None:
        """The scheduler before this process led in that term."""
        if self._own_term is not None:
            self._own_term = term + 1
            self._look()

    def _term_now(self) -> int | None:
        return self._own_term
