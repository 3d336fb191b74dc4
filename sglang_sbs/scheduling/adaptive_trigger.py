"""The default trigger: late binding to the instance that is about to be ready.

Owns when a batch leaves, for which instance, and which requests are in it under
``--sbs-trigger adaptive``. Must not know decode or flow control.

Theory of operation
-------------------
An SGLang prefill instance takes in new requests only when a pass ends, and an idle one starts on
the first request it sees. So a batch must arrive shortly *before* the predicted end of the running
pass: later it misses the pass or is split over two, earlier it gives away the choice. The lead
adapts until few requests miss (:meth:`AdaptiveTrigger.on_landing`). Then, per decision:

1. candidates: idle instances, busy ones within the lead of their predicted end, and, when more
   waits than a pass holds, any with room in its next pass (nothing is lost by committing early);
2. spacing: instances are kept apart in phase by a fraction of the pass time that the arrival rate
   calls for. Never while all are idle, the queue is long, or the candidate will run anyway;
3. order: short first, with an ageing that bounds how long anything is overtaken;
4. cut: how many of the queue to send now and how many to leave for the instance that is ready
   next, by the sum of predicted completion times of both alternatives;
5. placement: longest first into the emptiest rank, whole requests only, and split requests to fill
   the pass only under backlog.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang_sbs.scheduling.interval import IntervalController
from sglang_sbs.scheduling.pbaa import place_fitting, top_up
from sglang_sbs.scheduling.policy import Placement, Plan, permitted
from sglang_sbs.scheduling.prefill_instance import PrefillInstance
from sglang_sbs.scheduling.request import Request, prompt_tokens_of

RATE_WINDOW_S = 3.0
"""Time constant of the arrival rate."""
AGEING_S = 0.5
"""Waiting this long is worth a chunk of length in the order."""
SPACING_SHARE = 0.8
BACKLOG_FACTOR = 1.3
COMMIT_AHEAD_FACTOR = 1.5
MISS_TARGET = 0.01
LEAD_STEP_S = 0.004
MIN_LEAD_S = 0.003
_EPSILON_S = 1e-9


class AdaptiveTrigger:
    """See the module's theory of operation."""

    holds = True

    def __init__(self, interval: IntervalController, *, max_hold_s: float) -> None:
        self._interval = interval
        self._max_hold_s = max_hold_s
        self._last_s = float("-inf")
        self._token_rate = 0.0
        self._request_rate = 0.0
        self._rate_s: float | None = None
        self._lead_s = interval.latency_s + MIN_LEAD_S

    @property
    def lead_s(self) -> float:
        """How long before the predicted end of a pass its successor's batch leaves."""
        return self._lead_s

    def on_arrival(self, tokens: int, now_s: float) -> None:
        self._decay(now_s)
        self._token_rate += tokens / RATE_WINDOW_S
        self._request_rate += 1 / RATE_WINDOW_S

    def on_landing(self, landed_s: Sequence[float], missed_s: Sequence[float]) -> None:
        """Stochastic approximation of the (1 - MISS_TARGET) quantile of the dispatch latency.

        Only what was sent about one lead ahead says whether the lead is right: a request sent later
        than that was expected to miss, one sent much earlier could not.
        """
        missed = sum(1 for s in missed_s if s >= 0.5 * self._lead_s)
        landed = sum(1 for s in landed_s if s <= 2 * self._lead_s)
        if missed + landed == 0:
            return
        share = missed / (missed + landed)
        self._lead_s += LEAD_STEP_S * (share - MISS_TARGET)
        floor_s = self._interval.latency_s + MIN_LEAD_S
        self._lead_s = min(max(self._lead_s, floor_s), 0.8 * self._interval.mean_forward_s)

    def plan(
        self, queue: Sequence[Request], instances: Sequence[PrefillInstance], now_s: float
    ) -> Plan:
        if not queue:
            return Plan()
        self._decay(now_s)
        queue_tokens = prompt_tokens_of(queue)
        overdue = now_s - queue[0].arrived_s >= self._max_hold_s
        candidates: list[PrefillInstance] = []
        wakes = [queue[0].arrived_s + self._max_hold_s] if not overdue else []
        for instance in instances:
            long_queue = queue_tokens >= COMMIT_AHEAD_FACTOR * instance.capacity_tokens
            # One batch per pass: adding to it later would delay those already on their way.
            sent = any(rank.flight for rank in instance.ranks) and not long_queue
            if sent or instance.launching or not any(c > 0 for c in instance.c_avail()):
                continue
            open_s = self._opens_s(instance, queue_tokens, now_s)
            if open_s <= now_s + _EPSILON_S:
                candidates.append(instance)
            else:
                wakes.append(open_s)
        if not overdue:
            candidates = self._spaced(candidates, instances, queue_tokens, now_s, wakes)
        for instance in sorted(candidates, key=lambda i: self._free_at_s(i, now_s)):
            plan = self._batch_for(instance, instances, queue, overdue, now_s)
            if plan.placements:
                self._last_s = now_s
                return plan
        return Plan(wake_s=min(wakes, default=None))

    # Candidates ---------------------------------------------------------------------------

    def _opens_s(self, instance: PrefillInstance, queue_tokens: int, now_s: float) -> float:
        if instance.idle or queue_tokens >= COMMIT_AHEAD_FACTOR * instance.capacity_tokens:
            return now_s
        return self._free_at_s(instance, now_s) - self._lead_s - instance.model.error_s

    def _spaced(
        self,
        candidates: list[PrefillInstance],
        instances: Sequence[PrefillInstance],
        queue_tokens: int,
        now_s: float,
        wakes: list[float],
    ) -> list[PrefillInstance]:
        """Soft stagger; its length comes from the model and the arrival rate, not from measured
        pass times, which would feed back into themselves."""
        n = len(instances)
        model = instances[0].model
        capacity = instances[0].capacity_tokens
        slope = model.slope_s_per_token() / instances[0].dp_size
        load = min(0.95, self._token_rate * slope / n)
        pass_s = min(model.fixed_s / (1 - load), model.fixed_s + slope * capacity)
        due_s = self._last_s + SPACING_SHARE * pass_s / n
        long_queue = queue_tokens >= BACKLOG_FACTOR * max(1.0, self._token_rate * pass_s / n)
        if due_s <= now_s + _EPSILON_S or long_queue or all(i.idle for i in instances):
            return candidates
        wakes.append(due_s)
        return [i for i in candidates if i.backlog_tokens > 0]

    # One batch ----------------------------------------------------------------------------

    def _batch_for(
        self,
        instance: PrefillInstance,
        instances: Sequence[PrefillInstance],
        queue: Sequence[Request],
        overdue: bool,
        now_s: float,
    ) -> Plan:
        c_avail = instance.c_avail()
        ordered = sorted(
            (r for r in queue if permitted(r, instance, instances)),
            key=lambda r: (
                r.prompt_tokens / instance.chunk_tokens - (now_s - r.arrived_s) / AGEING_S
            ),
        )
        room = sum(c for c in c_avail if c > 0)
        taken, head = 0, 0
        while head < len(ordered) and taken < room:
            taken += ordered[head].prompt_tokens
            head += 1
        others = [i for i in instances if i is not instance]
        cut = head if overdue or not others else self._cut(instance, others, ordered, now_s)
        if all(i.idle for i in instances):
            cut = max(cut, 1)
        chosen, rest = ordered[: min(head, cut)], ordered[min(head, cut) :]
        allocation = place_fitting(chosen, c_avail, instance.chunk_tokens)
        backlog_passes = max(1.0, len(instances) / 3)
        allocation = top_up(
            allocation._replace(left=allocation.left + rest),
            c_avail,
            instance.chunk_tokens,
            keep_tokens=backlog_passes * instance.capacity_tokens,
        )
        ahead_ms = 1e3 * (self._free_at_s(instance, now_s) - now_s)
        return Plan(
            placements=[Placement(r, instance, rank) for r, rank in allocation.placed],
            reason=(
                f"{instance.id} idle"
                if instance.idle
                else f"{ahead_ms:.0f} ms before the predicted end of the pass on {instance.id}"
            ),
            passed_over=allocation.left,
        )

    def _cut(
        self,
        instance: PrefillInstance,
        others: Sequence[PrefillInstance],
        ordered: Sequence[Request],
        now_s: float,
    ) -> int:
        """Rolling horizon: how many of the ordered queue this pass should take.

        Compares, for each prefix, the sum of completion times of the prefix in this pass and of the
        rest (with the arrivals expected by then) in the pass of the instance that is ready next.
        """
        following = min(others, key=lambda i: self._free_at_s(i, now_s))
        latency_s = self._interval.latency_s
        start_s = max(now_s + latency_s, self._free_at_s(instance, now_s))
        wait_s = max(0.0, max(now_s + latency_s, self._free_at_s(following, now_s)) - start_s)
        arriving_tokens = self._token_rate * (start_s + wait_s - now_s)
        arriving_requests = self._request_rate * (start_s + wait_s - now_s)
        total = prompt_tokens_of(ordered)
        here, there = instance.backlog_tokens, following.backlog_tokens
        if total + here >= BACKLOG_FACTOR * instance.capacity_tokens:
            return len(ordered)
        best_cost, best = math.inf, 0
        taken = 0
        for count in range(len(ordered) + 1):
            if count:
                taken += ordered[count - 1].prompt_tokens
            if here + taken > instance.capacity_tokens and count > 1:
                break
            left = len(ordered) - count
            cost = count * _completion_s(instance, here + taken) + left * wait_s
            cost += (left + arriving_requests) * _completion_s(
                following, there + total - taken + arriving_tokens
            )
            if cost < best_cost - 1e-12:
                best_cost, best = cost, count
        return best

    def _free_at_s(self, instance: PrefillInstance, now_s: float) -> float:
        return max(now_s, instance.free_at_s(now_s, self._interval.latency_s))

    def _decay(self, now_s: float) -> None:
        if self._rate_s is not None:
            share = math.exp(-(now_s - self._rate_s) / RATE_WINDOW_S)
            self._token_rate *= share
            self._request_rate *= share
        self._rate_s = now_s


def _completion_s(instance: PrefillInstance, tokens: float) -> float:
    """Time from the start of a pass until the mean of these tokens is done, over several passes."""
    slope = instance.model.slope_s_per_token() / instance.dp_size
    if tokens <= instance.capacity_tokens:
        return instance.model.fixed_s + slope * tokens
    full_s = instance.model.fixed_s + slope * instance.capacity_tokens
    return full_s * (tokens / instance.capacity_tokens + 1) / 2
