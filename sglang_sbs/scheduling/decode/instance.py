"""The scheduler's view of one decode instance: ⟨B_i, K_i⟩ per DP rank.

A rank's state is its last report, plus what was dispatched and is not in it, minus what ended and
still is. A dispatch is in the report that echoes its id (or counts an id that was in a lost one);
an end is matched by :class:`~sglang_sbs.scheduling.decode.departures.Departures`. K_i of a request
on its way is its prompt, which is what the engine allocates; admission counts what it may grow to.

A rank that has fallen silent is known by load polls, and without any by what was dispatched to it
and has not ended. What it said last is no reason to leave it alone for good.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_sbs.scheduling.decode.departures import Departures
from sglang_sbs.scheduling.decode.rules import UNLIMITED, DecodeLoad
from sglang_sbs.scheduling.events import InstanceId, InstanceUp
from sglang_sbs.scheduling.report_cursor import SILENT_S, ReportCursor
from sglang_sbs.scheduling.token_ledger import TokenLedger
from sglang_sbs.wire import EndForward

_ENDED_FIRST = 64
_LOST_S = 5.0
"""A request dispatched longer ago is in the report even if its id was never echoed: the message
with the id was lost, and a first message cannot tell how many were lost before it."""


@dataclass(slots=True)
class DecodeRank:
    flight: TokenLedger = field(default_factory=TokenLedger)
    """Prompt tokens of requests dispatched and not yet accepted by the rank."""
    growth: TokenLedger = field(default_factory=TokenLedger)
    """Expected output tokens of the same requests."""
    sent_s: dict[str, float] = field(default_factory=dict)
    """Dispatch times of the same requests."""
    outstanding: TokenLedger = field(default_factory=TokenLedger)
    """Prompt plus expected output tokens of requests dispatched and not ended."""
    presumed: set[str] = field(default_factory=set)
    """Outstanding requests counted as accepted after a lost message, which may have been about
    others."""
    ended_first: dict[str, int] = field(default_factory=dict)
    """KV tokens of the last few requests that ended before a report contained them."""
    departures: Departures = field(default_factory=Departures)
    cursor: ReportCursor = field(default_factory=ReportCursor)
    speaks: bool = False
    """The rank's state comes from its reports."""
    reported_requests: int = 0
    reported_kv_tokens: int = 0
    doomed: list[str] | None = None
    """Requests dispatched before the instance went down, until the next report shows whether it
    restarted."""

    def forget(self, named: Sequence[str]) -> None:
        """Drop requests of the former process after a restart, except those the new one has
        ``named``."""
        gone = self.outstanding.oldest() if self.doomed is None else self.doomed
        for rid in set(gone).difference(named):
            self.land(rid)
            self.presumed.discard(rid)
            self.outstanding.pop(rid)
        self.ended_first.clear()
        self.departures = Departures()

    def fall_silent(self) -> None:
        """Drop the reported state of a rank that has been silent for long and is not polled."""
        self.speaks = False
        self.reported_requests = self.reported_kv_tokens = 0
        self.departures = Departures()

    def land(self, rid: str) -> bool:
        """Record that a request was accepted or ended; return whether it was in flight."""
        self.growth.pop(rid)
        self.sent_s.pop(rid, None)
        return self.flight.pop(rid) is not None

    def accepted(self, rids: list[str], lost: int, now_s: float) -> None:
        """Record accepted requests, and ``lost`` more from messages that were lost."""
        for rid in rids:
            if not self.land(rid) and rid in self.presumed:
                self.presumed.remove(rid)
                lost += 1
        for rid in self.flight.oldest(lost):
            self.land(rid)
            self.presumed.add(rid)
        for rid in self.flight.oldest():
            if self.sent_s[rid] >= now_s - _LOST_S:
                break
            self.land(rid)


class DecodeInstance:
    """The scheduler's view of a decode instance with ``dp_size`` ranks."""

    def __init__(self, up: InstanceUp) -> None:
        self.id: InstanceId = up.instance
        self.dp_size = up.dp_size
        self.kv_capacity_tokens = UNLIMITED
        self.max_running = UNLIMITED
        self.ranks = [DecodeRank() for _ in range(up.dp_size)]
        self._loads = [DecodeLoad(0, 0)] * up.dp_size
        """State vectors as last computed."""
        self._rooms = [0] * up.dp_size
        """Room per rank, in tokens."""
        self._stale = set(range(up.dp_size))
        """Ranks changed since then."""
        self._heard_s: dict[int, float] = {}
        """Time of the last report or poll per rank, oldest first."""
        self._parked_tokens = 0
        self.set_limits(up)

    def set_limits(self, up: InstanceUp) -> None:
        """Set the limits per rank. Unknown limits come from reports, or are not enforced."""
        self._limits = (up.kv_capacity_tokens, up.max_running_requests)
        self._take_limits(0, 0)
        self._allocates_late = up.allocates_late
        self._all_changed()

    def resize(self, up: InstanceUp) -> None:
        """Change the number of DP ranks at runtime (elastic EP); the remaining ranks keep their
        state."""
        size = self.dp_size = up.dp_size
        del self.ranks[size:]
        self.ranks += [DecodeRank() for _ in range(size - len(self.ranks))]
        self._loads = [DecodeLoad(0, 0)] * size
        self._rooms = [0] * size
        self._stale = set(range(size))
        self._heard_s = {rank: at_s for rank, at_s in self._heard_s.items() if rank < size}
        self.set_limits(up)

    def may_park(self, tokens: int) -> None:
        """Allow each rank this many KV tokens beyond its room, if it allocates late.

        With ``--disaggregation-decode-allocation-policy prefill_complete`` prefill computes without
        room in decode and keeps the KV until there is some (SGLang,
        ``can_prefill_before_bootstrap``), so what one pass of all prefill instances computes may
        leave before there is room: ``tokens`` is a rank's share of that. What leaves earlier would
        wait in prefill's KV cache, bound to one decode rank. How many requests a rank may run does
        not change."""
        tokens = tokens if self._allocates_late else 0
        if tokens != self._parked_tokens:
            self._parked_tokens = tokens
            self._all_changed()

    def loads(self) -> list[DecodeLoad]:
        """State vectors that include own dispatches before any report. Do not change them."""
        self._refresh()
        return list(self._loads)

    @property
    def room_tokens(self) -> int:
        """Largest total length that one of the ranks can admit."""
        return max(self.rooms())

    def rooms(self) -> Sequence[int]:
        """Largest total length that each rank can admit. Do not change it."""
        self._refresh()
        return self._rooms

    @property
    def has_outstanding(self) -> bool:
        return any(len(rank.outstanding) for rank in self.ranks)

    def dispatched(
        self, rid: str, rank: int, prompt_tokens: int, total_tokens: int, now_s: float
    ) -> None:
        """Record a dispatch to a rank; ``total_tokens`` is prompt plus expected output."""
        state = self.ranks[rank]
        state.sent_s[rid] = now_s
        state.flight.add(rid, prompt_tokens)
        state.growth.add(rid, total_tokens - prompt_tokens)
        state.outstanding.add(rid, total_tokens)
        self._stale.add(rank)

    def ended(self, rid: str, rank: int, kv_tokens: int) -> None:
        """Record the end of a request in any state; ``kv_tokens`` is what it held then. A rank that
        accepted it counts as holding it until a report no longer does."""
        if rank >= self.dp_size:
            return  # it was sent to a former instance of another size
        state = self.ranks[rank]
        known = state.outstanding.pop(rid) is not None
        state.presumed.discard(rid)
        on_its_way = state.land(rid)
        if known and on_its_way:
            state.ended_first[rid] = kv_tokens
            if len(state.ended_first) > _ENDED_FIRST:
                del state.ended_first[next(iter(state.ended_first))]
        elif known and state.speaks and state.cursor.reported_s is not None:
            state.departures.ended(kv_tokens, state.cursor.reported_s)
        self._stale.add(rank)

    def down(self) -> None:
        """Record that the instance does not respond. Its next report shows whether its requests
        survived."""
        for rank in self.ranks:
            rank.doomed = rank.outstanding.oldest()

    def on_report(self, report: EndForward, now_s: float) -> bool:
        """Apply a rank's report, and return whether its engine has restarted. Old and duplicate
        messages change nothing."""
        if not 0 <= report.dp_rank < self.dp_size:
            return False
        rank = self.ranks[report.dp_rank]
        taken = rank.cursor.take(report, now_s)
        if taken is None:
            return False
        if taken.restarted:
            rank.forget(report.rids)
        rank.doomed = None
        rank.speaks = True
        self._hear(report.dp_rank, now_s)
        rank.accepted(report.rids, taken.lost_requests, now_s)
        # Waiting requests were retracted, or their KV has just arrived: they will run again soon.
        present = report.running_requests + report.kv_transfer_requests + report.waiting_requests
        rank.departures.reported(report.accepted_requests, present, now_s)
        for rid in report.rids:
            if rid in rank.ended_first:
                rank.departures.ended(rank.ended_first.pop(rid), now_s)
        self._take_limits(
            report.kv_capacity_tokens or self.kv_capacity_tokens,
            report.max_running_requests or self.max_running,
        )
        self._holds(rank, present, report.kv_tokens)
        self._stale.add(report.dp_rank)
        return taken.restarted

    def on_load_poll(self, running: list[int], kv_tokens: list[int], now_s: float) -> None:
        """Apply a load poll, the coarse fallback for a missing or silent plugin."""
        self.advance(now_s)
        if len(running) != self.dp_size or len(kv_tokens) != self.dp_size:
            return
        for index, rank in enumerate(self.ranks):
            if not rank.speaks and kv_tokens[index] >= 0:
                self._holds(rank, running[index], kv_tokens[index])
                self._hear(index, now_s)
        self._all_changed()

    def advance(self, now_s: float) -> float:
        """Drop outdated reports. Returns when to call again even without new ones; infinity:
        never."""
        while self._heard_s:
            index, heard_s = next(iter(self._heard_s.items()))
            if heard_s + SILENT_S > now_s:
                return heard_s + SILENT_S
            del self._heard_s[index]
            self.ranks[index].fall_silent()
            self._stale.add(index)
            if not self._heard_s:
                self._take_limits(0, 0)
        return math.inf

    def _hear(self, index: int, now_s: float) -> None:
        self._heard_s.pop(index, None)
        self._heard_s[index] = now_s

    def _holds(self, rank: DecodeRank, requests: int, kv_tokens: int) -> None:
        """Set what a rank is reported to hold, limited to a plausible number: the requests it can
        run, as many waiting ones, and ours."""
        most = 2 * self.max_running + len(rank.outstanding)
        rank.reported_requests = min(max(0, requests), most)
        rank.reported_kv_tokens = min(max(0, kv_tokens), self.kv_capacity_tokens)

    def _take_limits(self, kv_capacity_tokens: int, max_running: int) -> None:
        """Set the limits from ``InstanceUp``, or from the report where those are 0."""
        told_tokens, told_running = self._limits
        before = self.kv_capacity_tokens, self.max_running
        self.kv_capacity_tokens = told_tokens or kv_capacity_tokens or UNLIMITED
        self.max_running = told_running or max_running or UNLIMITED
        if before != (self.kv_capacity_tokens, self.max_running):
            self._all_changed()

    def _all_changed(self) -> None:
        self._stale.update(range(self.dp_size))

    def _refresh(self) -> None:
        for index in self._stale:
            load = self._loads[index] = self._load(self.ranks[index])
            self._rooms[index] = load.room_tokens
        self._stale.clear()

    def _load(self, rank: DecodeRank) -> DecodeLoad:
        committed = rank.outstanding.total
        if not rank.speaks:
            # Without a report the own records count, or a poll if it shows more.
            requests = max(len(rank.outstanding), rank.reported_requests)
            kv_tokens = max(committed, rank.reported_kv_tokens)
        else:
            gone = rank.departures
            requests = max(0, rank.reported_requests - len(gone)) + len(rank.flight)
            kv_tokens = max(0, rank.reported_kv_tokens - gone.kv_tokens) + rank.flight.total
        return DecodeLoad(
            running=requests,
            kv_tokens=kv_tokens,
            committed_tokens=max(kv_tokens + rank.growth.total, committed),
            kv_capacity_tokens=self.kv_capacity_tokens + self._parked_tokens,
            max_running=self.max_running,
            awaited=len(rank.outstanding) > 0,
        )
