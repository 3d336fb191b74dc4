"""The paper's dual trigger, literally: I_opt has elapsed and the next target instance has sent
EndForward.

``--sbs-trigger paper`` (Figure 5, section 4.1 and Algorithm 2 of arXiv 2512.16134), for comparison.
Batches leave at EndForward, for instances in strict rotation, with Algorithm 2's overshoot, which
cost throughput on a real engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from sglang_sbs.scheduling.paging import paged
from sglang_sbs.scheduling.policies.pbaa import Allocation, Room
from sglang_sbs.scheduling.policies.policy import Admissible, Placement, Plan, PrefillPolicy
from sglang_sbs.scheduling.prefill.instance import Instances
from sglang_sbs.scheduling.prefill.interval import IntervalController
from sglang_sbs.scheduling.queue.request import RequestQueue
from sglang_sbs.scheduling.reasons import Opening
from sglang_sbs.scheduling.request import Request

_EPSILON_S = 1e-9

PrefixHit = Callable[[Request, int], int]
"""L_hit(r, d): function that returns how many tokens of a request's prompt a rank has cached."""


def no_hit(_request: Request, _rank: int) -> int:
    """Return 0: in PBAA's basic mode no rank has any of the prompt cached."""
    return 0


def pbaa(
    pending: Iterable[Request],
    new: Iterable[Request],
    c_avail: Sequence[int],
    prefix_hit_tokens: PrefixHit = no_hit,
    page: int = 1,
    places: Sequence[float] = (),
) -> Allocation:
    """Phases 1 and 2 of Algorithm 2: pending before new, each longest first.

    A request goes to the rank with the most capacity left after it, as long as that rank's
    ``C_avail`` is positive, so a rank may be overshot by at most one request. Phase 3 (counting
    ``r.wait``) is up to the caller, which defines the cycle.

    Args:
        pending: unassigned requests of earlier cycles.
        new: requests that have not been through a cycle.
        c_avail: C_avail per DP rank, uncached tokens; not modified.
        prefix_hit_tokens: L_hit; the default is the basic mode.
        page: tokens per page. A request is charged whole pages.
        places: how many requests each rank still takes; empty: any number.
    """
    room = Room(c_avail, places or [math.inf] * len(c_avail))
    ranks = range(len(c_avail))
    placed: list[tuple[Request, int]] = []
    left: list[Request] = []
    for queue in (pending, new):
        longest_first = sorted(queue, key=attrgetter("prompt_tokens"), reverse=True)
        for position, request in enumerate(longest_first):
            if max(room.free) <= 0:
                left += longest_first[position:]
                break
            after = [
                room.free[d] - paged(request.prompt_tokens - prefix_hit_tokens(request, d), page)
                for d in ranks
            ]
            best = max(ranks, key=after.__getitem__)
            if room.free[best] > 0:
                placed.append((request, best))
                room.take(best, room.free[best] - after[best])
            else:
                left.append(request)
    return Allocation(placed, left)


class PaperTrigger(PrefillPolicy):
    """Policy ``sbs`` with ``--sbs-trigger paper``: instances in turn, one batch per interval I_opt,
    placed on the target's DP ranks by :func:`pbaa`."""

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
