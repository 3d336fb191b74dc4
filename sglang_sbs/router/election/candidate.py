"""Who leads: what one candidate knows of the lock, and what it does next.

Sans-I/O: what the store said goes in with the time it was asked and the time it answered, and
:meth:`Candidate.next_step` says what to ask next. The rules are those of client-go's
``leaderelection``:

* A record that has not changed for as long as it lasts, **by this machine's clock since this
  machine saw it first**, is nobody's any more. Clocks of two machines are never compared.
* Every write names the version that it replaces, so that of two candidates one is refused.
* A leader that has renewed nothing for ``renew_s`` leads no more. The time counts from when the
  last successful renewal was *sent*: others saw it later and wait ``lease_s``, which is longer.

Beyond those, a term is written with every change of hands: it only rises, so that whoever hears
from two leaders knows the later one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_TERM = 2**31 - 1
"""As large as ``leaseTransitions`` can be (int32)."""
LONGEST_LEASE_S = 60.0
_UNDISTURBED_S = 60.0
"""A lead that was longer has been everybody's."""


@dataclass(frozen=True, slots=True)
class ElectionTimes:
    """Seconds, with client-go's names: ``LeaseDuration``, ``RenewDeadline``, ``RetryPeriod`` (15,
    10 and 2 there; here for a takeover below three seconds). Raises: ValueError, they contradict
    each other."""

    lease_s: float = 2.0
    """A leader that is not heard of for so long is none. Whole seconds."""
    renew_s: float = 1.5
    """A leader that cannot renew steps down after so long."""
    retry_s: float = 0.3
    """Between renewals, and between looks at another's lock."""

    def __post_init__(self) -> None:
        if not 1 <= self.lease_s <= LONGEST_LEASE_S or self.lease_s != int(self.lease_s):
            raise ValueError(f"the lease must last 1 to {LONGEST_LEASE_S:.0f} whole seconds")
        if not 0 < self.renew_s < self.lease_s:
            raise ValueError("the renew deadline must be shorter than the lease")
        if not 0.05 <= self.retry_s <= self.renew_s / 2:
            wanted = "0.05 s or more, and fit twice into the renew deadline"
            raise ValueError(f"the retry period must be {wanted}")

    @property
    def ask_s(self) -> float:
        """How long one answer of the store may take: two fit into the deadline."""
        return self.renew_s / 2


@dataclass(frozen=True, slots=True)
class Record:
    """What the store holds."""

    holder: str = ""
    """Empty: nobody."""
    term: int = 0
    """Of the holder, or of the last one."""
    sign: str = ""
    """Changes with every renewal; means nothing else."""
    lasts_s: float = math.inf
    """Without a change; infinite: the store itself removes a holder that is gone."""
    version: str = ""
    """What a write must name."""

    def same_as(self, other: Record) -> bool:
        """No renewal in between. A write by somebody else (an annotation) is none."""
        return (self.holder, self.term, self.sign) == (other.holder, other.term, other.sign)


@dataclass(frozen=True, slots=True)
class Sleep:
    for_s: float


@dataclass(frozen=True, slots=True)
class Read:
    """Look at the lock."""


@dataclass(frozen=True, slots=True)
class Take:
    """Write this candidate into the lock, in a term of its own."""

    seen: Record
    term: int


@dataclass(frozen=True, slots=True)
class Renew:
    mine: Record


Step = Sleep | Read | Take | Renew


class Candidate:
    """One process that wants to lead. Times: seconds of a clock that only goes forward."""

    def __init__(self, holder: str, times: ElectionTimes) -> None:
        """``holder``: nobody else's, not even of an earlier process at the same address."""
        self.holder = holder
        self._times = times
        self._lead: Record | None = None
        self._until_s = 0.0
        self._seen: Record | None = None
        self._seen_s = 0.0
        self._look_s = -math.inf
        self._not_before_s = -math.inf
        self._floor = 0
        """No term of this candidate's is as low as this."""
        self._led_since_s = -math.inf
        self._ousted = 0
        """How often in a row a lead was ended by another in another lock."""
        self._take_not_before_s = -math.inf

    def term_at(self, now_s: float) -> int | None:
        """The term in which this candidate leads, or ``None``. A lead that has lapsed is over."""
        if self._lead is not None and now_s >= self._until_s:
            self._lead = None
        return self._lead.term if self._lead else None

    def leader_at(self, now_s: float) -> str | None:
        if self.term_at(now_s) is not None:
            return self.holder
        seen = self._seen
        if seen is None or seen.holder in ("", self.holder) or now_s >= self._free_s(seen):
            return None
        return seen.holder

    def next_step(self, now_s: float) -> Step:
        if now_s < self._not_before_s:
            return Sleep(self._not_before_s - now_s)
        if self.term_at(now_s) is not None and self._lead is not None:
            if now_s >= self._look_s:
                return Renew(self._lead)
            return Sleep(min(self._look_s, self._until_s) - now_s)
        seen = self._seen
        if seen is not None and now_s >= self._free_s(seen) and self._floor < MAX_TERM:
            return Take(seen, self._floor + 1)
        if seen is None or now_s >= self._look_s:
            return Read()
        return Sleep(min(self._look_s, self._free_s(seen)) - now_s)

    # What the store said --------------------------------------------------------------------------

    def observed(self, record: Record, now_s: float) -> None:
        """The answer to :class:`Read`."""
        if self._seen is None or not record.same_as(self._seen):
            self._seen_s = now_s
        self._seen = record
        self._floor = max(self._floor, record.term)
        self._look_s = now_s + self._times.retry_s

    def took(self, record: Record, asked_s: float, now_s: float) -> None:
        """:class:`Take` succeeded; ``asked_s``: when it was sent. No lead comes of an answer that
        is too late, nor of a term that somebody has seen since."""
        wanted = record.term > self._floor
        self.observed(record, now_s)
        if wanted:
            self._led_since_s = now_s
            self._lead_by(record, asked_s, now_s)

    def renewed(self, record: Record, asked_s: float, now_s: float) -> None:
        """:class:`Renew` succeeded. It does not bring back a lead that is over."""
        still = self.term_at(now_s) == record.term
        self.observed(record, now_s)
        if still:
            self._lead_by(record, asked_s, now_s)

    def refused(self, now_s: float) -> None:
        """A write named a version that is no more: somebody else was faster."""
        led = self._lead is not None
        self._lead = self._seen = None
        # Who has lost the lead looks at once; who was too late at it has time.
        self._not_before_s = now_s if led else now_s + self._times.retry_s

    def unreachable(self, asked_s: float, now_s: float) -> None:
        self._not_before_s = max(now_s, asked_s + self._times.retry_s)

    def exceed(self, term: int, now_s: float) -> None:
        """Another has led in this term, or may have: lead in a higher one. This lead may end.

        A term that no store can have given is ignored. The second time in a row that this ends a
        lead, two candidates have two locks, by mistake: each then waits twice as long as the last
        time."""
        if not 0 <= term < MAX_TERM:
            return
        self._floor = max(self._floor, term)
        if self._lead is None or self._lead.term > term:
            return
        if now_s - self._led_since_s > _UNDISTURBED_S:
            self._ousted = 0
        wait_s = self._times.lease_s * 2 ** min(self._ousted - 1, 5) if self._ousted else 0.0
        self._take_not_before_s = now_s + wait_s
        self._ousted += 1
        self._lead = self._seen = None

    def resign(self) -> Record | None:
        """Lead no more. Returns what to give back: the lock may be this candidate's after the
        lead."""
        self._lead, seen = None, self._seen
        return seen if seen is not None and seen.holder == self.holder else None

    def _lead_by(self, record: Record, asked_s: float, now_s: float) -> None:
        self._until_s = asked_s + min(self._times.renew_s, record.lasts_s)
        self._lead = record if self._until_s > now_s else None
        self._look_s = asked_s + self._times.retry_s

    def _free_s(self, seen: Record) -> float:
        """From when on the lock may be taken."""
        if seen.holder in ("", self.holder):
            return self._take_not_before_s
        return max(self._take_not_before_s, self._seen_s + seen.lasts_s)
