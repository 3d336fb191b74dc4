"""The paper's dual trigger, literally: I_opt elapsed AND EndForward of the next target instance.

``--sbs-trigger paper`` (Figure 5 and section 4.1 of arXiv 2512.16134), for comparison: at
EndForward, in strict rotation, with Algorithm 2's overshoot, which cost throughput on a real
engine."""

from __future__ import annotations

from sglang_sbs.scheduling.policies.pbaa import pbaa
from sglang_sbs.scheduling.policies.policy import Admissible, Placement, Plan, PrefillPolicy
from sglang_sbs.scheduling.prefill.instance import Instances
from sglang_sbs.scheduling.prefill.interval import IntervalController
from sglang_sbs.scheduling.queue.request import RequestQueue
from sglang_sbs.scheduling.reasons import Opening

_EPSILON_S = 1e-9


class PaperTrigger(PrefillPolicy):
    """Round robin over instances, one batch per interval, PBAA over the target's DP ranks."""

    holds = True
    literal_interval = True
    opening = Opening.INTERVAL

    def __init__(self, interval: IntervalController) -> None:
        self._interval = interval
        self._last_s = float("-inf")
        self._target: str | None = None

    def plan(
        self, queue: RequestQueue, instances: Instances, admissible: Admissible, now_s: float
    ) -> Plan:
        due_s = self._last_s + self._interval.interval_s
        if due_s > now_s + _EPSILON_S:
            return Plan(wake_s=due_s)
        ids = [instance.id for instance in instances]
        number = ids.index(self._target) if self._target in ids else 0
        target = instances[number]
        if not target.ready:
            if target.tier != "interval":
                return Plan()
            # A silent instance is served at fixed intervals (section 4.1.2, graceful degradation).
            fixed_s = target.last_dispatch_s + self._interval.mean_forward_s
            if fixed_s > now_s + _EPSILON_S:
                return Plan(wake_s=fixed_s)
        waiting = [
            request
            for request in queue
            if admissible(request) and request.may_use(target, instances)
        ]
        allocation = pbaa(
            [request for request in waiting if request.waited_batches],
            [request for request in waiting if not request.waited_batches],
            target.ranks.c_avail(),
            lambda request, rank: request.hit_tokens(target.id, rank),
            target.page,
            target.ranks.places(),
        )
        self._last_s = now_s
        self._target = ids[(number + 1) % len(ids)]
        return Plan(
            placements=[Placement(r, target, rank) for r, rank in allocation.placed],
            reason=f"interval elapsed and {target.id} ready ({target.tier})",
            wake_s=now_s + self._interval.interval_s,
            passed_over=allocation.left,
            spends=None if target.quiescent else target,
        )
