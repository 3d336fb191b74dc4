"""Whether this scheduler process is active, and the term that its messages carry."""

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
"""A term is ignored if it is later than the latest known one by more than this."""


@dataclass(eq=False)
class Lead:
    election: Election
    address: str = ""
    """Address at which front ends reach this process."""
    begun: int = 0
    """Number of times this process became active."""
    since_s: float = 0.0
    """Time when this process last became active, in seconds of the event loop's clock."""
    _highest: int = 0

    @property
    def active(self) -> bool:
        """Whether this process is active. Check it before every action of an active scheduler."""
        return self.election.leads()

    @property
    def term(self) -> int:
        """Term in which this process is active; else the highest known."""
        return self.election.term or self._highest

    @property
    def leader(self) -> str:
        """Address of the active scheduler, if known."""
        return self.address if self.election.term else self.election.leader or ""

    def begin(self, term: int, now_s: float) -> None:
        self.begun += 1
        self.since_s = now_s
        self._highest = max(self._highest, term)

    def shown(self, term: int) -> None:
        """Take note of another active scheduler's term, and become a standby if it is not earlier
        than the own. A term far beyond all known ones is ignored, so that terms do not run out."""
        if term > self._highest + _MOST_AHEAD:
            logger.warning("ignoring term %d: the latest is %d", term, self._highest)
            return
        self._highest = max(self._highest, term)
        if term >= self.term:
            self.election.exceed(term)

    def looked(self, look: Look, *, ready: bool) -> Standing:
        if look.term > self.term:
            self.shown(look.term)
        if isinstance(self.election, FixedOrder):
            self.election.on_look(look)
        return Standing(active=self.active, ready=ready)

    def turned_away(self) -> Unwelcome:
        """Return a standby's answer to a front end, with the active scheduler's address."""
        return Unwelcome(standby=True, active=self.leader)

    def deposed_by(self, hello: Hello, boot_id: str) -> None:
        """Become a standby if a front end knows a later scheduler than this one (``boot_id``)."""
        if hello.term > self.term:
            self.shown(hello.term)
        elif hello.scheduler not in ("", boot_id) and hello.last_term:
            self.shown(hello.last_term)

    def shown_to_people(self) -> dict[str, Any] | None:
        """Return address, term, seconds since this process became active, and how often it did, for
        the dashboard; ``None`` if there can be no other scheduler."""
        if isinstance(self.election, Unopposed):
            return None
        for_s = round(asyncio.get_running_loop().time() - self.since_s, 1)
        return {"address": self.address, "term": self.term, "for_s": for_s, "begun": self.begun}

    def families(self) -> Iterator[Metric]:
        about = "1 if this scheduler is active, 0 if it is a standby"
        yield gauge("sbs_scheduler_active", about, self.active)
        about = "Latest term known to this scheduler process"
        yield gauge("sbs_scheduler_term", about, self.term)
        yield total(
            "sbs_scheduler_leads", "Times this process became the active scheduler", self.begun
        )


class Unopposed(Election):
    """Election for a router with a single scheduler, which is always active."""

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
        """Continue in the term after ``term``, which an earlier scheduler process had."""
        if self._own_term is not None:
            self._own_term = term + 1
            self._look()

    def _term_now(self) -> int | None:
        return self._own_term
