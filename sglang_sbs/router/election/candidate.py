"""Decides whether a candidate leads, from its view of the lock, and its next request to the store.

Sans-I/O: the store's responses are passed in with the times of request and response, and
:meth:`Candidate.next_step` returns the next request. The rules are those of client-go's
``leaderelection``:

* A record that has not changed for its lifetime, **by this machine's clock since this machine first
  saw it**, is free. Clocks of two machines are never compared.
* Every write names the version that it replaces, so that one of two candidates is rejected.
* A leader without a renewal for ``renew_s`` stops leading. The time counts from when the last
  successful renewal was *sent*: others saw it later and wait ``lease_s``, which is longer.

In addition, a term is written with every change of holder. It only rises, so that a receiver of
messages from two leaders can identify the later one."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_TERM = 2**31 - 1
"""Largest term, because a Lease stores it in ``leaseTransitions`` (int32)."""
LONGEST_LEASE_S = 60.0
_UNDISTURBED_S = 60.0
"""Time in seconds after which a lead counts as undisputed."""


@dataclass(frozen=True, slots=True)
class ElectionTimes:
    """Times in seconds, with client-go's names: ``LeaseDuration``, ``RenewDeadline``,
    ``RetryPeriod`` (15, 10 and 2 there; here for a takeover in under three seconds). Raises:
    ValueError, they are inconsistent."""

    lease_s: float = 2.0
    """Time without renewal after which a leader loses the lock. Whole seconds."""
    renew_s: float = 1.5
    """A leader that cannot renew the lock for this long steps down."""
    retry_s: float = 0.3
    """Interval of renewals by the leader, and of reads by other candidates."""

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
        """Time limit in seconds of one request to the store; two fit into ``renew_s``."""
        return self.renew_s / 2


@dataclass(frozen=True, slots=True)
class Record:
    """The lock as read from the store."""

    holder: str = ""
    """Candidate that holds the lock; empty if it is free."""
    term: int = 0
    """Term of the present or last holder."""
    sign: str = ""
    """Value that changes with every renewal."""
    lasts_s: float = math.inf
    """Seconds without a change after which the lock is free; infinite if the store itself removes
    holders that do not renew."""
    version: str = ""
    """Version of the lock, which a write names so that the store rejects outdated writes."""

    def same_as(self, other: Record) -> bool:
        """Return whether the lock was not renewed between these two readings. Other writes (an
        annotation) do not count."""
        return (self.holder, self.term, self.sign) == (other.holder, other.term, other.sign)


@dataclass(frozen=True, slots=True)
class Sleep:
    for_s: float


@dataclass(frozen=True, slots=True)
class Read:
    """Next step: read the lock."""


@dataclass(frozen=True, slots=True)
class Take:
    """Next step: write this candidate into the lock that was ``seen``, with a new term."""

    seen: Record
    term: int


@dataclass(frozen=True, slots=True)
class Renew:
    mine: Record


Step = Sleep | Read | Take | Renew


class Candidate:
    """One process that stands for election. Times are seconds of a clock that only moves
    forward."""

    def __init__(self, holder: str, times: ElectionTimes) -> None:
        """Create a candidate; ``holder`` must be unique, even among processes at the same
        address."""
        self.holder = holder
        self._times = times
        self._lead: Record | None = None
        self._until_s = 0.0
        self._seen: Record | None = None
        self._seen_s = 0.0
        self._look_s = -math.inf
        self._not_before_s = -math.inf
        self._floor = 0
        """Highest term seen or reported; this candidate may lead only in a higher one."""
        self._led_since_s = -math.inf
        self._ousted = 0
        """Number of consecutive leads that ended because another scheduler led through another
        lock."""
        self._take_not_before_s = -math.inf

    def term_at(self, now_s: float) -> int | None:
        """Return the term in which this candidate leads at ``now_s``, or ``None``."""
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

    # Responses of the store -----------------------------------------------------------------------

    def observed(self, record: Record, now_s: float) -> None:
        """Handle the response to :class:`Read`."""
        if self._seen is None or not record.same_as(self._seen):
            self._seen_s = now_s
        self._seen = record
        self._floor = max(self._floor, record.term)
        self._look_s = now_s + self._times.retry_s

    def on_taken(self, record: Record, asked_s: float, now_s: float) -> None:
        """Handle a successful :class:`Take` sent at ``asked_s``. It gives no lead if the response
        is late, or if an equal or higher term has been seen since."""
        wanted = record.term > self._floor
        self.observed(record, now_s)
        if wanted:
            self._led_since_s = now_s
            self._lead_by(record, asked_s, now_s)

    def renewed(self, record: Record, asked_s: float, now_s: float) -> None:
        """Handle a successful :class:`Renew`; it cannot restore an expired lead."""
        still = self.term_at(now_s) == record.term
        self.observed(record, now_s)
        if still:
            self._lead_by(record, asked_s, now_s)

    def on_refused(self, now_s: float) -> None:
        """Handle a write rejected because another candidate wrote first."""
        led = self._lead is not None
        self._lead = self._seen = None
        # After losing the lead, look at once; after a lost race there is time.
        self._not_before_s = now_s if led else now_s + self._times.retry_s

    def unreachable(self, asked_s: float, now_s: float) -> None:
        self._not_before_s = max(now_s, asked_s + self._times.retry_s)

    def exceed(self, term: int, now_s: float) -> None:
        """Handle a term in which another scheduler leads or led: this candidate may lead only in a
        higher one, which can end its present lead. Impossible terms are ignored.

        If this ends a lead twice in a row, two candidates use two locks by mistake: each then waits
        twice as long as the last time."""
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
        """Stop leading. Returns the record of the lock to release; ``None`` if another candidate
        holds it."""
        self._lead, seen = None, self._seen
        return seen if seen is not None and seen.holder == self.holder else None

    def _lead_by(self, record: Record, asked_s: float, now_s: float) -> None:
        self._until_s = asked_s + min(self._times.renew_s, record.lasts_s)
        self._lead = record if self._until_s > now_s else None
        self._look_s = asked_s + self._times.retry_s

    def _free_s(self, seen: Record) -> float:
        """Return the time from which this candidate may take the lock."""
        if seen.holder in ("", self.holder):
            return self._take_not_before_s
        return max(self._take_not_before_s, self._seen_s + seen.lasts_s)
