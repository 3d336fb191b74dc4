"""Remembers enough of each decision to explain it on request.

This must not slow down decisions. So a batch stores only a few numbers of each candidate
(:class:`InstanceAtDecision`), and :meth:`RecentDecisions.why` computes from them when a candidate
would have finished the request. Everything follows from the events, so the replay of an event log
gives the same reasons.

Thousands of these records are kept. They contain no reference cycles, so the garbage collector can
skip them (``gc=False``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.prefill.completion import NextPass, PassFormula, likely_ranks
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.reasons import MOST_WAITS, Opening, Term, Waited, WaitReason
from sglang_sbs.scheduling.request import Request

_LATE_S = 0.02
"""Tolerance in seconds: an instance that was expected to be ready longer ago counts as ready."""
MOST_LOOKS = 4
"""Number of candidate instances stored per batch: those that would start first."""


class CandidateInstance(msgspec.Struct, frozen=True, omit_defaults=True):
    """Prediction for a request at one prefill instance, in seconds after the decision."""

    instance: InstanceId
    start_s: float
    """Time until the start of the pass that would contain the request."""
    finish_s: float
    """Time until the request's prompt would be computed."""
    delay_s: float
    """Time by which the request would delay the others in its pass."""
    cached_tokens: int = 0
    cost_s: float | None = None
    """Cost above that of the best instance; None: costs did not decide (``Term.LEAST_COST``)."""
    chosen: bool = False


class Why(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reasons for a request's waits and placement. Times are on the scheduler's clock unless
    they are durations."""

    rid: str
    prompt_tokens: int
    arrived_s: float
    waits: list[Waited]
    """Reasons for the request's waits, in chronological order."""
    batches: int = 0
    """Number of batches dispatched while the request waited."""
    decided_s: float | None = None
    """Time of the decision; None: still waiting."""
    opening: Opening | None = None
    term: Term | None = None
    candidates: list[CandidateInstance] = []
    """The instances that would have started first, and the chosen one; empty: not dispatched."""
    instances: int = 0
    """Number of prefill instances that were up at the decision."""
    waiting: int = 0
    """Number of requests in the queue at the decision."""
    launch_s: float | None = None
    """Predicted start of the first pass with the request's batch; None: not dispatched."""
    end_s: float | None = None
    """Predicted end of the pass at ``launch_s``, with the whole batch in it; None: unknown."""


class InstanceAtDecision(msgspec.Struct, frozen=True, gc=False):
    """State of one prefill instance at a decision."""

    instance: InstanceId
    at_s: float
    """Start of the pass that would get requests sent now; with ``waits``, of the pass before it."""
    ahead_tokens: Sequence[int]
    """Charged tokens ahead of a new request, per rank."""
    known_pass_s: float | None
    """Duration of the pass at ``at_s`` without new requests; None: it was not computed yet."""
    chunk_tokens: int
    page: int
    formula: PassFormula
    waits: bool = False
    """Another pass starts at ``at_s``, and new requests would be in the pass after it."""

    def next_pass(self) -> NextPass:
        """Return the pass that would contain requests sent now."""
        there = NextPass(
            self.formula,
            self.chunk_tokens,
            self.ahead_tokens,
            page=self.page,
            length_s=self.known_pass_s,
            start_s=self.at_s,
        )
        if self.waits:
            there.start_s += there.length_s
        return there

    def candidate(self, decided: Decided) -> CandidateInstance:
        hits = decided.hits.get(self.instance)
        there = self.next_pass()
        ranks = likely_ranks(there.ahead_tokens, hits)
        if decided.instance == self.instance:
            ranks = {decided.rank}
        finish_s, delay_s, cached = min(
            _on(there, rank, decided.prompt_tokens, 0 if hits is None else hits[rank])
            for rank in ranks
        )
        start_s = there.start_s - decided.batch.at_s
        costs_s = decided.costs_s or {}
        cost_s = costs_s.get(self.instance)
        return CandidateInstance(
            instance=self.instance,
            start_s=start_s,
            finish_s=start_s + finish_s,
            delay_s=delay_s,
            cached_tokens=cached,
            cost_s=None if cost_s is None else cost_s - min(costs_s.values()),
            chosen=self.instance == decided.instance,
        )


def _on(there: NextPass, rank: int, prompt_tokens: int, cached: int) -> tuple[float, float, int]:
    """Return the seconds from the start of the pass until the prompt is computed, the seconds by
    which that pass gets longer, and the cached tokens."""
    tokens = max(1, prompt_tokens - cached)
    delay_s = (
        there.with_s(rank, tokens, cached) - there.length_s if any(there.ahead_tokens) else 0.0
    )
    return there.done_s(rank, tokens, cached), delay_s, cached


def look_at(instance: PrefillInstance, at_s: float, *, waits: bool = False) -> InstanceAtDecision:
    return InstanceAtDecision(
        instance.id,
        at_s,
        tuple(instance.ranks.ahead_tokens),
        instance.known_pass_s,
        instance.chunk_tokens,
        instance.page,
        instance.model.formula,
        waits,
    )


class BatchRecord(msgspec.Struct, gc=False):
    """Facts about a batch when it was dispatched."""

    at_s: float
    opening: Opening
    term: Term
    looks: Sequence[InstanceAtDecision]
    instances: int = 0
    waiting: int = 0
    launch_s: float | None = None
    """Predicted launch of the batch; None: when its instance's pass in ``looks`` starts."""
    placed: Sequence[tuple[int, int]] = ()
    """(rank, uncached tokens) of each request in the batch."""
    costs_s: Mapping[str, Mapping[InstanceId, float]] = {}
    """Costs in seconds by request id and instance, where they decided. Empty once the batch is
    dispatched, because each request keeps its own."""


class Decided(msgspec.Struct, frozen=True, gc=False):
    """Record of a dispatched request, kept to explain it later."""

    batch: BatchRecord
    rid: str
    prompt_tokens: int
    arrived_s: float
    instance: InstanceId
    rank: int
    waits: Sequence[Waited]
    batches: int
    hits: Mapping[InstanceId, Sequence[int]]
    """Cached tokens of the prompt per rank, by candidate instance."""
    costs_s: Mapping[InstanceId, float] | None

    @property
    def term(self) -> Term:
        term = Term.LEAST_COST if self.costs_s else self.batch.term
        if term not in (Term.SOONEST, Term.FIRST_OPEN) or not self.hits:
            return term
        here = max(self.hits.get(self.instance, [0]))
        others = [max(rank_hits) for name, rank_hits in self.hits.items() if name != self.instance]
        return Term.CACHED if here > max(others, default=0) else term


_NO_HITS: dict[InstanceId, Sequence[int]] = {}


class RecentDecisions:
    """Remembers the most recent requests that were dispatched or refused."""

    def __init__(self, most: int) -> None:
        """``most``: number of remembered requests; 0: none."""
        self.wanted = most > 0
        self._most = most
        self._kept: dict[str, Decided | Why] = {}
        self._order: deque[str] = deque()
        """Ids in ``_kept``, oldest first: finding the first key of a dict takes time."""

    def record_dispatched(self, request: Request, batch: BatchRecord | None, batches: int) -> None:
        """Record a dispatched request, without the names of its blocks. ``batches``: number of
        batches dispatched while it waited."""
        if batch is None or request.prefill is None or not self._most:
            return
        instance, rank = request.prefill
        kept, hits = self._kept, _NO_HITS
        if request.hits.by_instance:
            found = request.hits.by_instance
            names = [look.instance for look in batch.looks]
            hits = {name: found[name] for name in names if name in found}
        self._make_room(request.rid)
        kept[request.rid] = Decided(
            batch,
            request.rid,
            request.prompt_tokens,
            request.arrived_s,
            instance,
            rank,
            request.waits,
            batches,
            hits,
            batch.costs_s.get(request.rid) if batch.costs_s else None,
        )

    def record_refused(self, request: Request, batches: int, now_s: float) -> None:
        """Record the refusal of a waiting request. ``batches``: as in :meth:`record_dispatched`."""
        if self._most:
            self._make_room(request.rid)
            self._kept[request.rid] = why_waiting(request, batches, now_s)

    def _make_room(self, rid: str) -> None:
        if rid not in self._kept:
            if len(self._kept) >= self._most:
                del self._kept[self._order.popleft()]
            self._order.append(rid)

    def why(self, rid: str) -> Why | None:
        """Explain a request; None if it is not remembered."""
        decided = self._kept.get(rid)
        if decided is None or isinstance(decided, Why):
            return decided
        batch = decided.batch
        return Why(
            rid=rid,
            prompt_tokens=decided.prompt_tokens,
            arrived_s=decided.arrived_s,
            waits=_waits_of(decided.waits, decided.batches, batch.at_s),
            batches=decided.batches,
            decided_s=batch.at_s,
            opening=batch.opening,
            term=decided.term,
            candidates=[look.candidate(decided) for look in batch.looks],
            instances=batch.instances,
            waiting=batch.waiting,
            **_launch_of(batch, decided.instance),
        )


def _launch_of(batch: BatchRecord, instance: InstanceId) -> dict[str, float | None]:
    """Return the predicted start and end of a batch's first pass, as fields of :class:`Why`."""
    look = next((seen for seen in batch.looks if seen.instance == instance), None)
    if look is None:
        return {"launch_s": batch.launch_s}
    there = look.next_pass()
    launch_s = there.start_s if batch.launch_s is None else batch.launch_s
    for rank, tokens in batch.placed:
        there.length_s = there.with_s(rank, min(tokens, there.chunk_tokens))
        there.add(rank, tokens)
    return {"launch_s": launch_s, "end_s": launch_s + there.length_s}


def _waits_of(noted: Sequence[Waited], batches: int, until_s: float) -> list[Waited]:
    # Reasons noted at the decision itself did not cause waiting.
    waits = [waited for waited in noted if waited.at_s < until_s]
    last = waits[-1] if waits else None
    if last is not None and last.reason is WaitReason.NOT_YET and batches:
        due_s = last.until_s
        if due_s is not None and last.at_s < due_s < until_s - _LATE_S:
            # No decision looked as far as this request, because earlier ones filled the passes.
            waits.append(Waited(WaitReason.SHARE_FULL, due_s, last.instance))
    return waits


def why_waiting(request: Request, batches: int, now_s: float) -> Why:
    """Explain a queued request. ``batches``: number of batches dispatched since it arrived."""
    return Why(
        rid=request.rid,
        prompt_tokens=request.prompt_tokens,
        arrived_s=request.arrived_s,
        waits=_waits_of(request.waits, batches, now_s),
        batches=batches,
    )


def note(
    request: Request,
    reason: WaitReason,
    now_s: float,
    instance: InstanceId = "",
    until_s: float | None = None,
    gain_s: float | None = None,
) -> None:
    """Record that the request waits for this reason from now on (other fields: :class:`Waited`).
    Call it only if ``request.waits_for`` is a different reason, because reasons are checked more
    often than they change."""
    request.waits_for = reason
    if gain_s is not None and gain_s <= 0:
        # Another request that costs no less has its turn, or costs changed after the choice.
        gain_s = None
    if len(request.waits) < MOST_WAITS:
        request.waits = (*request.waits, Waited(reason, now_s, instance, until_s, gain_s))
