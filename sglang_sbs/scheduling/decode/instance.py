"""The scheduler's view of one decode instance: running requests B_i and KV tokens K_i per DP rank.

A rank's state is its last report, plus the dispatched requests that it does not contain yet, minus
those that have ended but are still in it. A report contains a dispatch if it echoes the id. If it
shows that reports with some ids were lost, that many of the oldest dispatches count as contained.
:class:`~sglang_sbs.scheduling.decode.departures.Departures` matches the ends. K_i of a request on
its way is its prompt, which is what the engine allocates; admission counts its expected total
length.

A silent rank's last report is discarded, so that it does not keep requests away for good. Then load
polls count, or, without any, the requests dispatched there and not ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from sglang_sbs.scheduling.decode.departures import Departures
from sglang_sbs.scheduling.decode.rules import UNLIMITED, DecodeLoad
from sglang_sbs.scheduling.events import InstanceId, InstanceUp
from sglang_sbs.scheduling.received.load_source import LoadSource
from sglang_sbs.scheduling.received.report_cursor import SILENT_S, ReportCursor
from sglang_sbs.wire import EndForward

_ENDED_FIRST = 64
_LOST_S = 5.0
"""Seconds after which a dispatched request counts as accepted, even if no report contained its id.
The report with the id was lost, and the first report received does not show how many were lost
before it."""


@dataclass(slots=True)
class DecodeRequest:
    """A request dispatched to a decode rank and not ended."""

    prompt_tokens: int
    total_tokens: int
    """Prompt plus expected output."""
    sent_s: float
    is_presumed: bool = False
    """Its acceptance is assumed: a report was lost, which may have been about another one."""
    is_doomed: bool = False
    """Dispatched before the instance last went down, so gone if the engine restarted."""


@dataclass(slots=True, repr=False)
class DecodeRank:
    """Requests at one decode DP rank, and what the rank last reported."""

    requests: dict[str, DecodeRequest] = field(default_factory=dict)
    """Requests dispatched and not ended, oldest first."""
    flight: dict[str, DecodeRequest] = field(default_factory=dict)
    """Requests that the rank has not accepted yet, oldest first."""
    committed_tokens: int = 0
    """Total length (prompt plus expected output) of all ``requests``."""
    flight_tokens: int = 0
    """Total length (prompt plus expected output) of the requests in ``flight``."""
    flight_prompt_tokens: int = 0
    ended_first: dict[str, int] = field(default_factory=dict)
    """KV tokens of the last few requests that ended before a report contained them, by id."""
    departures: Departures = field(default_factory=Departures)
    cursor: ReportCursor = field(default_factory=ReportCursor)
    source: LoadSource = field(default_factory=LoadSource)
    reported_requests: int = 0
    reported_kv_tokens: int = 0
    was_down: bool = False
    """The instance went down after the last report. The next one shows whether it restarted."""

    def __repr__(self) -> str:
        source = self.source.name
        return (
            f"<DecodeRank {len(self.requests)} requests, {len(self.flight)} in flight, "
            f"{self.committed_tokens} tokens committed, {source}>"
        )

    def add(self, rid: str, request: DecodeRequest) -> None:
        self.drop(rid)
        self.requests[rid] = self.flight[rid] = request
        self.committed_tokens += request.total_tokens
        self.flight_tokens += request.total_tokens
        self.flight_prompt_tokens += request.prompt_tokens

    def _land(self, rid: str) -> DecodeRequest | None:
        """Remove a request from ``flight`` and return it; None: it is not there."""
        request = self.flight.pop(rid, None)
        if request is not None:
            self.flight_tokens -= request.total_tokens
            self.flight_prompt_tokens -= request.prompt_tokens
        return request

    def drop(self, rid: str) -> DecodeRequest | None:
        """Remove a request in any state and return it; None: it is unknown."""
        self._land(rid)
        request = self.requests.pop(rid, None)
        if request is not None:
            self.committed_tokens -= request.total_tokens
        return request

    def on_ended(self, rid: str, kv_tokens: int) -> None:
        """Record the end of a request, which held ``kv_tokens`` of KV."""
        on_its_way = rid in self.flight
        if self.drop(rid) is None:
            return
        if on_its_way:
            self.ended_first[rid] = kv_tokens
            if len(self.ended_first) > _ENDED_FIRST:
                del self.ended_first[next(iter(self.ended_first))]
        elif self.source.reports and self.cursor.reported_s is not None:
            self.departures.on_ended(kv_tokens, self.cursor.reported_s)

    def forget(self, named: Sequence[str]) -> None:
        """Drop the requests of the former process after a restart, except ``named``: the ids that
        the new process has reported as accepted."""
        for rid in self.requests.keys() - named:
            # Requests sent since the instance went down were sent to the new process.
            if self.requests[rid].is_doomed or not self.was_down:
                self.drop(rid)
        self.ended_first.clear()
        self.departures = Departures()

    def fall_silent(self) -> None:
        """Drop the reported state of a rank that has been silent for long and is not polled."""
        self.source.forget()
        self.reported_requests = self.reported_kv_tokens = 0
        self.departures = Departures()

    def accepted(self, rids: list[str], lost: int, now_s: float) -> None:
        """Remove from ``flight`` the requests that the rank has accepted: ``rids``, and the
        ``lost`` oldest others, because messages with that many ids were lost."""
        for rid in rids:
            if self._land(rid) is None:
                request = self.requests.get(rid)
                if request is not None and request.is_presumed:
                    request.is_presumed = False
                    lost += 1
        for request in list(islice(self.flight.values(), lost)):
            request.is_presumed = True
        for rid in list(islice(self.flight, lost)):
            self._land(rid)
        given_up_s = now_s - _LOST_S
        for rid in list(takewhile(lambda rid: self.flight[rid].sent_s < given_up_s, self.flight)):
            self._land(rid)


class DecodeInstance:
    """The scheduler's view of a decode instance: the load and the room of each DP rank."""

    def __init__(self, up: InstanceUp) -> None:
        self.id: InstanceId = up.instance
        self.dp_size = up.dp_size
        self.kv_capacity_tokens = UNLIMITED
        self.max_running = UNLIMITED
        self.ranks = [DecodeRank() for _ in range(up.dp_size)]
        self._loads = [DecodeLoad(0, 0)] * up.dp_size
        """Load per rank as last computed; outdated for ranks in ``_stale``."""
        self._rooms = [0] * up.dp_size
        """Room per rank in tokens, as last computed (``DecodeLoad.room_tokens``)."""
        self._stale = set(range(up.dp_size))
        """Ranks whose load and room must be computed again."""
        self._last_report_s: dict[int, float] = {}
        """Time of the last report or poll per rank, oldest first."""
        self._parked_tokens = 0
        self.set_limits(up)

    def __repr__(self) -> str:
        return f"<DecodeInstance {self.id} {self.ranks}>"

    def set_limits(self, up: InstanceUp) -> None:
        """Set the limits per rank. Unknown limits come from reports, or are not enforced."""
        self._limits = (up.kv_capacity_tokens, up.max_running_requests)
        self._take_limits(0, 0)
        self._allocates_late = up.allocates_late
        self._all_changed()

    def resize(self, up: InstanceUp) -> None:
        """Change the number of DP ranks at runtime (elastic EP). The remaining ranks keep their
        state."""
        size = self.dp_size = up.dp_size
        del self.ranks[size:]
        self.ranks += [DecodeRank() for _ in range(size - len(self.ranks))]
        self._loads = [DecodeLoad(0, 0)] * size
        self._rooms = [0] * size
        self._stale = set(range(size))
        self._last_report_s = {
            rank: at_s for rank, at_s in self._last_report_s.items() if rank < size
        }
        self.set_limits(up)

    def may_park(self, tokens: int) -> None:
        """Allow each rank this many KV tokens beyond its room, if it allocates late.

        With ``--disaggregation-decode-allocation-policy prefill_complete``, prefill computes a
        request before decode has room and keeps its KV until then (SGLang,
        ``can_prefill_before_bootstrap``). So the requests of one pass of all prefill instances may
        leave before decode has room; ``tokens`` is one rank's share of their tokens. Requests sent
        even earlier would wait in prefill's KV cache, bound to one decode rank. The limit on
        running requests stays as it is."""
        tokens = tokens if self._allocates_late else 0
        if tokens != self._parked_tokens:
            self._parked_tokens = tokens
            self._all_changed()

    def loads(self) -> list[DecodeLoad]:
        """Return the load per rank, including own dispatches not reported yet. Do not change it."""
        self._refresh()
        return list(self._loads)

    @property
    def room_tokens(self) -> int:
        """Largest total length, in tokens, that one of the ranks can admit."""
        return max(self.rooms())

    def rooms(self) -> Sequence[int]:
        """Return the largest total length in tokens that each rank can admit. Do not change it."""
        self._refresh()
        return self._rooms

    @property
    def has_outstanding(self) -> bool:
        return any(rank.requests for rank in self.ranks)

    def on_dispatched(
        self, rid: str, rank: int, prompt_tokens: int, total_tokens: int, now_s: float
    ) -> None:
        """Record a dispatch to a rank; ``total_tokens`` is prompt plus expected output."""
        self.ranks[rank].add(rid, DecodeRequest(prompt_tokens, total_tokens, now_s))
        self._stale.add(rank)

    def on_ended(self, rid: str, rank: int, kv_tokens: int) -> None:
        """Record the end of a request in any state; ``kv_tokens`` is the KV that it held. A rank
        that accepted it counts as holding it until a report no longer does."""
        if rank >= self.dp_size:
            return  # it was sent to a former instance of another size
        self.ranks[rank].on_ended(rid, kv_tokens)
        self._stale.add(rank)

    def down(self) -> None:
        """Record that the instance does not respond. Its next report shows whether its requests
        survived."""
        for rank in self.ranks:
            rank.was_down = True
            for request in rank.requests.values():
                request.is_doomed = True

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
            # First, so that the requests of the former process are not counted as accepted.
            rank.forget(report.rids)
        rank.was_down = False
        rank.source.on_report()
        self._record_report(report.dp_rank, now_s)
        rank.accepted(report.rids, taken.lost_requests, now_s)
        # Waiting requests were retracted, or their KV has just arrived: they will run again soon.
        present = report.running_requests + report.kv_transfer_requests + report.waiting_requests
        rank.departures.reported(report.accepted_requests, present, now_s)
        # Afterwards, because this report still counts a request that ended before it was accepted:
        # only a later report can come without it.
        for rid in report.rids:
            if rid in rank.ended_first:
                rank.departures.on_ended(rank.ended_first.pop(rid), now_s)
        # Before the reported load, which is clamped to the limits.
        self._take_limits(
            report.kv_capacity_tokens or self.kv_capacity_tokens,
            report.max_running_requests or self.max_running,
        )
        self._holds(rank, present, report.kv_tokens)
        self._stale.add(report.dp_rank)
        return taken.restarted

    def on_load_poll(self, running: list[int], kv_tokens: list[int], now_s: float) -> None:
        """Apply a load poll, the coarse fallback for a missing or silent plugin. Lists are per
        rank; -1: no data."""
        self.advance(now_s)
        if len(running) != self.dp_size or len(kv_tokens) != self.dp_size:
            return
        for index, rank in enumerate(self.ranks):
            if kv_tokens[index] >= 0 and rank.source.on_load_poll():
                self._holds(rank, running[index], kv_tokens[index])
                self._record_report(index, now_s)
        self._all_changed()

    def advance(self, now_s: float) -> float:
        """Discard the reported state of ranks that have been silent for ``SILENT_S``. Return when
        to call again even without new reports; infinity: never."""
        while self._last_report_s:
            index, reported_s = next(iter(self._last_report_s.items()))
            if reported_s + SILENT_S > now_s:
                return reported_s + SILENT_S
            del self._last_report_s[index]
            self.ranks[index].fall_silent()
            self._stale.add(index)
            if not self._last_report_s:
                self._take_limits(0, 0)
        return math.inf

    def _record_report(self, index: int, now_s: float) -> None:
        self._last_report_s.pop(index, None)
        self._last_report_s[index] = now_s

    def _holds(self, rank: DecodeRank, requests: int, kv_tokens: int) -> None:
        """Set the reported requests and KV tokens of a rank, clamped to plausible numbers: twice
        the requests that the rank can run (half of them wait) plus those dispatched here."""
        most = 2 * self.max_running + len(rank.requests)
        rank.reported_requests = min(max(0, requests), most)
        rank.reported_kv_tokens = min(max(0, kv_tokens), self.kv_capacity_tokens)

    def _take_limits(self, kv_capacity_tokens: int, max_running: int) -> None:
        """Set the limits per rank: from ``InstanceUp``; where it has 0, from the arguments (those
        of a report); where these are 0, unlimited."""
        given_tokens, given_running = self._limits
        before = self.kv_capacity_tokens, self.max_running
        self.kv_capacity_tokens = given_tokens or kv_capacity_tokens or UNLIMITED
        self.max_running = given_running or max_running or UNLIMITED
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
        growth_tokens = rank.flight_tokens - rank.flight_prompt_tokens
        if not rank.source.reports:
            # Without a report the own records count, or a poll if it shows more.
            requests = max(len(rank.requests), rank.reported_requests)
            kv_tokens = max(rank.committed_tokens, rank.reported_kv_tokens)
        else:
            gone = rank.departures
            requests = max(0, rank.reported_requests - len(gone)) + len(rank.flight)
            kv_tokens = max(0, rank.reported_kv_tokens - gone.kv_tokens)
            kv_tokens += rank.flight_prompt_tokens
        return DecodeLoad(
            running=requests,
            kv_tokens=kv_tokens,
            committed_tokens=max(kv_tokens + growth_tokens, rank.committed_tokens),
            kv_capacity_tokens=self.kv_capacity_tokens + self._parked_tokens,
            max_running=self.max_running,
            awaited=bool(rank.requests),
        )
