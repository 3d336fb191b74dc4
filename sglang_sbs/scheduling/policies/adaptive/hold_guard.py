"""Switches holding off where batches do not arrive whole; requests then leave at once.

The requests of a batch are sent at the same moment. On a host without spare CPU, or behind one
serial intake, the last of n requests is accepted n times later than a lone one. Then the launch
splits the batch, and the dispatch lead (:mod:`.dispatch_lead`) grows. When the lead exceeds the
latency of a lone request by ``Tuning.guard_enter_passes``, holding costs more than it gains. The
guard then switches to immediate placement by predicted finish (``eta``), but only below
``Tuning.guard_most_load``.

Without batches there is no evidence that batches would arrive whole again. So holding is tried
again after a while, and after twice as long each time that the trial fails.
"""

from __future__ import annotations

import math

from sglang_sbs.scheduling.paging import paged
from sglang_sbs.scheduling.policies.immediate import Eta
from sglang_sbs.scheduling.policies.pbaa import first_part
from sglang_sbs.scheduling.policies.policy import Admissible, Placement, Plan
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.instance import Instances, PrefillInstance
from sglang_sbs.scheduling.queue.request import RequestQueue
from sglang_sbs.scheduling.request import Request


class HoldGuard:
    """Decides whether requests may be held. Times are seconds on the scheduler's clock."""

    def __init__(self) -> None:
        self.on = False
        """Whether the guard is on, so holding is off."""
        self._until_s = -math.inf
        self._off_s = TUNING.guard_first_s

    def update(self, excess_passes: float, split_passes: float, now_s: float) -> bool:
        """Switch holding off or on. ``excess_passes``: dispatch lead minus the latency of a lone
        request, in mean pass times; ``split_passes``: the same for the lead's estimate from split
        batches. Returns True if holding is tried again from now on: then forget the lead."""
        if self.on:
            self.on = now_s < self._until_s
            return not self.on
        fails = excess_passes > TUNING.guard_enter_passes
        off_s = TUNING.guard_first_s
        if now_s - self._until_s < TUNING.guard_trial_s:  # holding is on trial
            fails = (
                excess_passes > TUNING.guard_trial_passes
                or split_passes > TUNING.guard_trial_split_passes
            )
            off_s = min(2 * self._off_s, TUNING.guard_most_s)
        if fails:
            self.on, self._off_s, self._until_s = True, off_s, now_s + off_s
        return False


def place_at_once(
    queue: RequestQueue, instances: Instances, admissible: Admissible, eta: Eta, now_s: float
) -> Plan:
    """Return a plan that sends the oldest request that decode has room for to the DP rank of its
    earliest predicted finish.

    With overlap scheduling, two kinds of instances are excluded: those with a pass queued behind
    the running one, and those without room for the request in the next pass. On these the request
    would wait for two passes, and the engine would form each batch a pass ahead from then on.
    (SGLang's ``event_loop_overlap_disagg_prefill`` stops doing so when an iteration finds no
    request.) Waiting in the router costs nothing until the queued pass starts. Younger requests
    wait behind the oldest, so that short ones do not take its room again and again.
    """
    request = queue.oldest_of(admissible, TUNING.most_refused)
    if request is None:
        return Plan()
    ready_s = {
        instance: _ready_s(instance, request, now_s) for instance in request.allowed_on(instances)
    }
    ready = [instance for instance, at_s in ready_s.items() if at_s <= now_s]
    if not ready:
        return Plan(wake_s=min(ready_s.values()))
    instance, rank = eta.choose(request, ready, now_s)
    reason = "at once: batches do not arrive whole"
    return Plan([Placement(request, instance, rank)], reason=reason)


def _ready_s(instance: PrefillInstance, request: Request, now_s: float) -> float:
    """Return the time from which a request may be sent to an instance if no report comes before.
    The report that the running pass has ended usually does."""
    if not instance.overlap:
        return now_s
    need = paged(request.uncached_tokens_on(instance.id), instance.page)
    passes = instance.passes
    if len(passes) < 2 and max(instance.ranks.c_avail()) >= first_part(need, instance.chunk_tokens):
        return now_s
    forms_s = passes[0].end_s if passes else instance.last_dispatch_s
    return forms_s + TUNING.late_report_s
