"""What the scheduler believes about one decode instance: ⟨B_i, K_i⟩ per DP rank.

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
"""A request dispatched longer ago is in the report, whether an id said so or not: the message that
would have is lost, and a first one cannot tell how many it missed."""


@dataclass(slots=True)
class DecodeRank:
    flight: TokenLedger = field(default_factory=TokenLedger)
    """Dispatched and not yet accepted by the rank: prompt tokens."""
    growth: TokenLedger = field(default_factory=TokenLedger)
    """Of the same requests: expected output tokens."""
    sent_s: dict[str, float] = field(default_factory=dict)
    """Of the same requests: when they were dispatched."""
    outstanding: TokenLedger = field(default_factory=TokenLedger)
    """Dispatched and not ended: prompt plus expected output tokens."""
    presumed: set[str] = field(default_factory=set)
    """Outstanding, and taken for accepted because a message was lost: some other may have been."""
    ended_first: dict[str, int] = field(default_factory=dict)
    """Ended before a report said that the rank has them: KV tokens. The last few."""
    departures: Departures = field(default_factory=Departures)
    cursor: ReportCursor = field(default_factory=ReportCursor)
    speaks: bool = False
    """What is known of it rests on its reports."""
    reported_requests: int = 0
    reported_kv_tokens: int = 0
    doomed: list[str] | None = None
    """Dispatched before the instance went down, until its next report says whether it restarted."""

    def forget(self, named: Sequence[str]) -> None:
        """The engine restarted: what was dispatched to the one before is gone, except for requests
        that the new one has ``named``."""
        gone = self.outstanding.oldest() if self.doomed is None else self.doomed
        for rid in set(gone).difference(named):
            self.land(rid)
            self.presumed.discard(rid)
            self.outstanding.pop(rid)
        self.ended_first.clear()
        self.departures = Departures()

    def fall_silent(self) -> None:
        """Nothing was heard of the rank for long, and no poll says how it is."""
        self.speaks = False
        self.reported_requests = self.reported_kv_tokens = 0
        self.departures = Departures()

    def land(self, rid: str) -> bool:
        """The rank has accepted a request, or it ended; whether it was in flight."""
        self.growth.pop(rid)
        self.sent_s.pop(rid, None)
        return self.flight.pop(rid) is not None

    def accepted(self, rids: list[str], lost: int, now_s: float) -> None:
        """The rank has accepted these, and so many more in messages that were lost."""
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
    """Belief about one decode instance with ``dp_size`` ranks."""

    def __init__(self, up: InstanceUp) -> None:
        self.id: InstanceId = up.instance
        self.dp_size = up.dp_size
        self.kv_capacity_tokens = UNLIMITED
        self.max_running = UNLIMITED
        self.ranks = [DecodeRank() for _ in range(up.dp_size)]
        self._loads = [DecodeLoad(0, 0)] * up.dp_size
        """The state vectors as last worked out."""
        self._rooms = [0] * up.dp_size
        """The room of each of them."""
        self._stale = set(range(up.dp_size))
        """Ranks that have changed since."""
        self._heard_s: dict[int, float] = {}
        """Ranks that reported or were polled, and when; the longest ago first."""
        self._parked_tokens = 0
        self.set_limits(up)

    def set_limits(self, up: InstanceUp) -> None:
        """Take over the limits per rank; unknown ones are as its ranks report them, or not
        enforced."""
        self._limits = (up.kv_capacity_tokens, up.max_running_requests)
        self._take_limits(0, 0)
        self.rank_choice = up.rank_choice
        self._allocates_late = up.allocates_late
        self._all_changed()

    def resize(self, up: InstanceUp) -> None:
        """DP ranks joined or left while the engine runs (elastic EP); the first ones stay as they
        are."""
        size = self.dp_size = up.dp_size
        del self.ranks[size:]
        self.ranks += [DecodeRank() for _ in range(size - len(self.ranks))]
        self._loads = [DecodeLoad(0, 0)] * size
        self._rooms = [0] * size
        self._stale = set(range(size))
        self._heard_s = {rank: at_s for rank, at_s in self._heard_s.items() if rank < size}
        self.set_limits(up)

    def may_park(self, tokens: int) -> None:
        """Each rank may be sent so many KV tokens more than it has room for, if it allocates late.

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

    def goes_with(self, rank: int, prefill_rank: int, prefill_dp_size: int) -> bool:
        """Whether a request of that prefill rank can be had on this rank (``rank_choice``)."""
        if self.rank_choice != "by_room":
            return True
        return (rank - prefill_rank) % math.gcd(self.dp_size, prefill_dp_size) == 0

    def loads(self) -> list[DecodeLoad]:
        """The state vectors, own dispatches included before any feedback. Not to be changed."""
        self._refresh()
        return list(self._loads)

    @property
    def room_tokens(self) -> int:
        """The largest total length one of its ranks can admit."""
        return max(self.rooms())

    def rooms(self) -> Sequence[int]:
        """The largest total length each of its ranks can admit. Not to be changed."""
        self._refresh()
        return self._rooms

    @property
    def has_outstanding(self) -> bool:
        return any(len(rank.outstanding) for rank in self.ranks)

    def dispatched(
        self, rid: str, rank: int, prompt_tokens: int, total_tokens: int, now_s: float
    ) -> None:
        """A request leaves for a rank; ``total_tokens`` is prompt plus expected output."""
        state = self.ranks[rank]
        state.sent_s[rid] = now_s
        state.flight.add(rid, prompt_tokens)
        state.growth.add(rid, total_tokens - prompt_tokens)
        state.outstanding.add(rid, total_tokens)
        self._stale.add(rank)

    def moved(self, rid: str, source: int, target: int) -> None:
        """The engine put a request on another rank than the books say."""
        old, new = self.ranks[source], self.ranks[target]
        old.presumed.discard(rid)
        for name in ("flight", "growth", "outstanding"):
            tokens = getattr(old, name).pop(rid)
            if tokens is not None:
                getattr(new, name).add(rid, tokens)
        if rid in old.sent_s:
            new.sent_s[rid] = old.sent_s.pop(rid)
        self._stale |= {source, target}

    def ended(self, rid: str, rank: int, kv_tokens: int) -> None:
        """The request is over, whatever state it was in; ``kv_tokens`` is what it held at its end.
        A rank that accepted it holds it until a report says otherwise."""
        if rank >= self.dp_size:
            return  # it went to an instance of another size that had this name
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
        """No answer from the instance: its next report tells whether what runs there survived."""
        for rank in self.ranks:
            rank.doomed = rank.outstanding.oldest()

    def on_report(self, report: EndForward, now_s: float) -> bool:
        """Replace belief by what a rank says; whether its engine has restarted. Old and duplicate
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
        # Those that wait have been retracted, or their KV has just arrived: they run again soon.
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
        """Coarse fallback where the plugin is missing, or silent."""
        self.advance(now_s)
        if len(running) != self.dp_size or len(kv_tokens) != self.dp_size:
            return
        for index, rank in enumerate(self.ranks):
            if not rank.speaks and kv_tokens[index] >= 0:
                self._holds(rank, running[index], kv_tokens[index])
                self._hear(index, now_s)
        self._all_changed()

    def advance(self, now_s: float) -> float:
        """Forget what was heard too long ago. Returns when to call again even if nothing is heard;
        infinity for never."""
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
        """What a rank is said to hold. No more counts than it could: what it can run, as many again
        that wait, and ours."""
        most = 2 * self.max_running + len(rank.outstanding)
        rank.reported_requests = min(max(0, requests), most)
        rank.reported_kv_tokens = min(max(0, kv_tokens), self.kv_capacity_tokens)

    def _take_limits(self, kv_capacity_tokens: int, max_running: int) -> None:
        """What was told when the instance came up counts, else what a report says; 0: nothing."""
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
            # No report: own books, unless a poll knows of more.
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
