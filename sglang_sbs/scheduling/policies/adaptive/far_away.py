"""Placement where the dispatch latency (L_net) is half a pass or more. Requests then leave at once.

Holding gains nothing there: the state at the end of a pass does not help a request that will be in
a later one. Placement is that of ``eta``."""

from __future__ import annotations

import math

from sglang_sbs.scheduling.policies.immediate import Eta
from sglang_sbs.scheduling.policies.policy import Admissible, Placement, Plan
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.instance import Instances
from sglang_sbs.scheduling.prefill.interval import IntervalController
from sglang_sbs.scheduling.queue.request import RequestQueue


def is_far_away(interval: IntervalController, now_s: float) -> bool:
    """Return whether engines are too far away for holding."""
    return interval.away_s(now_s) >= TUNING.far_passes * interval.mean_forward_s


def place_far_away(
    queue: RequestQueue,
    instances: Instances,
    admissible: Admissible,
    eta: Eta,
    interval: IntervalController,
    now_s: float,
) -> Plan:
    """Return a plan that sends the oldest request that decode has room for to the DP rank of its
    earliest predicted finish.

    An instance gets no more than it computes during twice the latency and one pass: its reports
    show what it finished a latency ago, and a request arrives a latency later. The rest waits in
    the queue, where priorities and limits still count, until a report shows room. Without a report
    room is looked for again after a pass."""
    request = queue.oldest_of(admissible, TUNING.most_refused)
    if request is None:
        return Plan()
    pass_s = interval.mean_forward_s
    passes = 1 + math.ceil(2 * interval.away_s(now_s) / pass_s)
    roomy = [i for i in request.allowed_on(instances) if i.ranks.has_room_in(passes)]
    if not roomy:
        return Plan(wake_s=now_s + pass_s)
    instance, rank = eta.choose(request, roomy, now_s)
    reason = "at once: L_net is half a pass or more"
    return Plan([Placement(request, instance, rank)], reason=reason)
