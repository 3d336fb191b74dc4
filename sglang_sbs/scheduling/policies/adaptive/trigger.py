"""The default policy: minimise the total time to first token of waiting and expected requests, as
predicted by one model of a pass.

Must not know decode or flow control.

Theory of operation
-------------------
An SGLang prefill instance takes in new requests only when a pass ends, and an idle one starts on
the first request that arrives. So a request is sent only when its pass is about to be formed: until
then the choice is free. A batch that arrives after the predicted end of a pass misses the next one
or is split over two passes. How much earlier a batch leaves is learned from the cost of both
(:mod:`.dispatch_lead`). A decision has six steps:

1. **observe**: one snapshot of the queue, the instances and the learned times (:mod:`.view`).
2. **open_passes**: *when*. The passes that a batch may leave for (:mod:`.openings`), in the order
   in which they start: of an idle instance; of one that is within the lead of its predicted end; of
   any with room when more waits than all earlier passes can hold. A single request may follow a
   batch that is on its way, as it can leave later than a batch. Under overlap scheduling, first
   come the instances that could run on without a gap (:func:`.lookahead`). Starts are kept apart.
3. **divide**: *how much*. The share of the queue that leaves now makes the sum of predicted
   completion times smallest (:mod:`.few_requests`). With prompts of several chunks it matters more
   where a request goes: each leaves only for the pass where it costs least (:mod:`.pass_forecast`).
4. **rank_by_affinity**: *where*. A request of which some rank has a part cached, or is computing
   one, may wait for that rank (:mod:`.cache_affinity`).
5. **choose**: the first of the queue that fit into the pass (:mod:`.batch`). Short requests come
   first, with an ageing that bounds how long a request is overtaken.
6. **place**: *which rank*. The longest goes first into the emptiest rank (:mod:`.placement`). A
   prompt is split to fill the pass only when more is left than the other instances can take.

Requests leave at once as under ``eta`` if the dispatch latency is most of a pass or more
(:mod:`.far_away`), or if batches do not arrive whole (:mod:`.hold_guard`).
``tokens`` are uncached tokens.
"""

from __future__ import annotations

from sglang_sbs.scheduling.policies.adaptive.batch import Batch, choose
from sglang_sbs.scheduling.policies.adaptive.cache_affinity import CacheAffinity, rank_by_affinity
from sglang_sbs.scheduling.policies.adaptive.dispatch_lead import DispatchLead
from sglang_sbs.scheduling.policies.adaptive.division import Division, divide
from sglang_sbs.scheduling.policies.adaptive.explained import explain, note_opening
from sglang_sbs.scheduling.policies.adaptive.far_away import is_far_away, place_far_away
from sglang_sbs.scheduling.policies.adaptive.hold_guard import HoldGuard, place_at_once
from sglang_sbs.scheduling.policies.adaptive.lineup import Lineup, PlannedStarts
from sglang_sbs.scheduling.policies.adaptive.long_prompts import LongPrompts
from sglang_sbs.scheduling.policies.adaptive.openings import Openings, open_passes
from sglang_sbs.scheduling.policies.adaptive.placement import place
from sglang_sbs.scheduling.policies.adaptive.view import Learned, View, observe
from sglang_sbs.scheduling.policies.immediate import Eta
from sglang_sbs.scheduling.policies.offered_load import OfferedLoad
from sglang_sbs.scheduling.policies.policy import Admissible, Plan, PrefillPolicy
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.instance import Instances, PrefillInstance
from sglang_sbs.scheduling.prefill.interval import IntervalController
from sglang_sbs.scheduling.prefill.observation import Observation
from sglang_sbs.scheduling.queue.priority import Urgency
from sglang_sbs.scheduling.queue.request import RequestQueue
from sglang_sbs.scheduling.reasons import Opening
from sglang_sbs.scheduling.request import Request


class AdaptiveTrigger(PrefillPolicy):
    """The default policy, ``sbs`` with the adaptive trigger. The module explains how it works."""

    holds = True
    fills_the_way = True

    def __init__(
        self, interval: IntervalController, load: OfferedLoad, max_hold_s: float, urgency: Urgency
    ) -> None:
        self._interval = interval
        self._offered = load
        self._lineup = Lineup()
        self._urgency = urgency
        self.starts = PlannedStarts()
        self._planned_s: float | None = None
        """Predicted start of the pass that the last batch was sent to; None: the batch joined
        another one, or left at once."""
        self._long = LongPrompts(load)
        self._lead = DispatchLead()
        self._eta = Eta(interval, knows_caches=True)
        self.guard = HoldGuard()
        self.holding = True
        """Whether requests may be held; False while batches do not arrive whole."""
        self._retry_s = float("-inf")
        self._moment: CacheAffinity | None = None
        self._view: View | None = None
        """Snapshot of the last decision; None: it sent at once, or instances changed since."""
        self._learned = Learned(
            *(interval, load, self._lineup, self._lead, self._long, urgency, self.starts),
            max_hold_s,
        )

    @property
    def lead_s(self) -> float:
        """Dispatch lead: seconds before the predicted end of a pass at which a batch leaves."""
        return self._learned.lead_s

    def on_dispatched(self, now_s: float) -> None:
        if self._planned_s is not None:
            self.starts.add(self._planned_s, forget_s=now_s - self._offered.pass_s)

    def on_landing(self, seen: Observation, ranks: int, now_s: float) -> None:
        self._lead.observe(
            seen,
            now_s,
            ranks=ranks,
            load=self._offered.load,
            latency_s=self._interval.lone_s,
            pass_s=self._interval.mean_forward_s,
        )

    def on_forward_learned(self, instance: PrefillInstance) -> None:
        self._offered.forget_speed(instance)

    def key_of(self, request: Request) -> float:
        """Return the sort key in the queue, smallest first: short prompts first, with ageing. A
        chunk of length counts as much as ``_ageing_s`` of waiting. A prompt longer than a chunk
        counts as one chunk: it takes several passes in any case, and would form the tail if it
        started last."""
        chunks = request.uncached_tokens / self._long.chunk_tokens
        shift_s = self._urgency.shift_s(request, chunks)
        return request.arrived_s + self._ageing_s() * min(1.0, chunks) + shift_s

    def _ageing_s(self) -> float:
        """Return the seconds of waiting that a chunk of length counts as in :meth:`key_of`. They
        are fewer with many instances, because batches leave more often."""
        batches_s = self._interval.mean_forward_s / max(1, self._interval.active)
        return TUNING.ageing * batches_s

    def on_topology_change(self, instances: Instances) -> None:
        self._long.on_topology_change(instances)
        self._moment = self._view = None
        self._offered.on_topology_change(instances)
        self._lineup.on_topology_change(instances)

    def plan(
        self, queue: RequestQueue, instances: Instances, admissible: Admissible, now_s: float
    ) -> Plan:
        if now_s + TUNING.epsilon_s < self._retry_s:
            return Plan(wake_s=self._retry_s)
        self._offered.measure(instances, now_s)
        self._lineup.refresh()
        at_once, far_away = self._sends_at_once(now_s), is_far_away(self._learned, now_s)
        self.holding = not at_once
        if at_once or far_away:
            self._planned_s = self._view = None
            self.opening = Opening.FAR_AWAY if far_away else Opening.AT_ONCE
            if far_away:
                return place_far_away(self._learned, queue, instances, admissible, self._eta, now_s)
            return place_at_once(queue, instances, admissible, self._eta, now_s)
        self._view = view = observe(self._learned, queue, instances, admissible, now_s)
        openings = open_passes(view)
        division = divide(view, openings)
        moment = rank_by_affinity(view, division.passes, self._moment)
        if division.passes:
            self._moment = moment
        for batch in choose(view, division, moment):
            placements, left = place(view, batch)
            if placements:
                self._leaves(batch, openings, moment)
                reason, record = explain(
                    view, openings, batch.opening, division.costs_s, recorded=self.explains
                )
                return Plan(placements, reason, passed_over=left, batch=record)
        wake_s = min(openings.wake_s, moment.wake_s)
        return self._later(view, wake_s, division, moment.deferred)

    def _leaves(self, batch: Batch, openings: Openings, moment: CacheAffinity) -> None:
        instance = batch.opening.instance
        joins = batch.opening.kind is Opening.JOINS
        self._planned_s = None if joins else openings.begins.begin_s(instance)
        moment.on_dispatched(instance)

    def note_waiting(self, request: Request, now_s: float) -> None:
        note_opening(request, self._view, now_s)

    def _sends_at_once(self, now_s: float) -> bool:
        if self._offered.load >= TUNING.guard_most_load:
            return False
        lone_s, pass_s = self._interval.lone_s, self._interval.mean_forward_s
        split_s = self._lead.left_behind_s - lone_s
        if self.guard.update((self.lead_s - lone_s) / pass_s, split_s / pass_s, now_s):
            self._lead.forget()
        return self.guard.on

    def _later(self, view: View, wake_s: float, division: Division, deferred: int) -> Plan:
        if max(deferred, len(division.homes)) >= TUNING.most_deferred:
            self._retry_s = view.at.now_s + TUNING.retry_s
            wake_s = min(wake_s, self._retry_s)
        return Plan(wake_s=wake_s)
