"""Placement where the dispatch latency (L_net) is most of a pass or more. Requests leave at once.

Holding gains nothing there: the state at the end of a pass does not help a request that will be in
a later one. Placement is that of ``eta``, or the cheapest rank by cached prefix
(:class:`.CacheAffinity`) if a part of the prompt is cached that is worth computing elsewhere."""

from __future__ import annotations

import math

from sglang_sbs.scheduling.policies.adaptive.cache_affinity import CacheAffinity
from sglang_sbs.scheduling.policies.adaptive.lineup import Moment
from sglang_sbs.scheduling.policies.adaptive.view import Learned
from sglang_sbs.scheduling.policies.immediate import Eta, Place
from sglang_sbs.scheduling.policies.policy import Admissible, Placement, Plan
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.instance import Instances
from sglang_sbs.scheduling.queue.request import RequestQueue
from sglang_sbs.scheduling.request import Request


def is_far_away(learned: Learned, now_s: float) -> bool:
    """Return whether engines are too far away for holding."""
    interval, busy = learned.interval, learned.offered.load >= TUNING.busy_load
    passes = TUNING.far_passes_busy if busy else TUNING.far_passes
    return interval.away_s(now_s) >= passes * interval.mean_forward_s


def place_far_away(
    learned: Learned,
    queue: RequestQueue,
    instances: Instances,
    admissible: Admissible,
    eta: Eta,
    now_s: float,
) -> Plan:
    """Return a plan that sends the oldest request that decode has room for.

    An instance gets no more than it computes during twice the latency and one pass: its reports
    show what it finished a latency ago, and a request arrives a latency later. The rest waits in
    the queue, where priorities and limits still count, until a report shows room. Without a report
    room is looked for again after a pass."""
    request = queue.oldest_of(admissible, TUNING.most_refused)
    if request is None:
        return Plan()
    pass_s = learned.interval.mean_forward_s
    passes = 1 + math.ceil(2 * learned.interval.away_s(now_s) / pass_s)
    roomy = [i for i in request.allowed_on(instances) if i.ranks.has_room_in(passes)]
    if not roomy:
        return Plan(wake_s=now_s + pass_s)
    if request.hits.best_tokens >= TUNING.least_hit_share * roomy[0].chunk_tokens:
        instance, rank = _cheapest(learned, request, roomy, queue.tokens, now_s)
    else:
        instance, rank = eta.choose(request, roomy, now_s)
    reason = "at once: L_net is most of a pass or more"
    return Plan([Placement(request, instance, rank)], reason=reason)


def _cheapest(
    learned: Learned, request: Request, roomy: Instances, waiting_tokens: int, now_s: float
) -> Place:
    """Return the instance and rank where a request with a cached prefix costs least."""
    at = Moment(now_s, learned.interval.lone_s)
    load = learned.offered.load_with(waiting_tokens)
    moment = CacheAffinity(at, learned.lineup.by_id, roomy[0], load=load)
    moment.look_at(request)
    best = min([moment.best_on(request, instance) for instance in roomy])
    return learned.lineup.by_id[best.instance], best.rank
