"""When a batch is to wait in the engine before the pass in front of it has even started.

An engine with overlap scheduling forms the batch of a pass when the pass before it *starts*, if
anything waits by then, and launches it without a gap. What comes later it takes in when that pass
*ends*, and the device is idle while it does: 20 to 30 ms on the CPU cluster, 6 % of the time at
saturation. Late binding wants the second, as it knows more by then. With more waiting in the router
than all instances can take in their next passes there is nothing to be known: the batch runs in
that pass whenever it leaves.
"""

from __future__ import annotations

import math

from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.instance import Instances, PrefillInstance


def lookahead(
    instances: Instances,
    queue_tokens: int,
    mean_tokens: float,
    lead_s: float,
    now_s: float,
) -> tuple[list[PrefillInstance], float]:
    """The instances that get a batch now for the pass after their next one, and when the next
    instance does.

    Args:
        queue_tokens: uncached tokens that wait in the router.
        mean_tokens: mean length of a request.
        lead_s: how long a batch is on its way, with its margin.
    """
    capacities = [one.ranks.capacity_of(mean_tokens) for one in instances]
    if queue_tokens < min(capacities):
        return [], math.inf
    pairs = list(zip(instances, capacities, strict=True))
    rooms = [max(0, tokens - one.ranks.charged_tokens) for one, tokens in pairs]
    room_tokens = sum(rooms)
    opens = [
        (one.passes[0].end_s - lead_s, one)
        for (one, tokens), room in zip(pairs, rooms, strict=True)
        # The others take what they have room for, and this one takes a whole pass.
        if queue_tokens >= tokens + room_tokens - room and _lacks_batch(one, tokens)
    ]
    latest_s = now_s + TUNING.epsilon_s
    due_s = min([open_s for open_s, _ in opens if open_s > latest_s], default=math.inf)
    return [one for open_s, one in opens if open_s <= latest_s], due_s


def _lacks_batch(instance: PrefillInstance, capacity_tokens: float) -> bool:
    """Whether the batch that is formed at the end of its running pass lacks something: the one
    after the next if the next waits already, else the one after the pass that is queued."""
    if not instance.overlap:
        return False
    if len(instance.passes) == 1:
        return 0 < instance.ranks.charged_tokens < TUNING.most_filled * capacity_tokens
    return len(instance.passes) == 2 and not (
        instance.ranks.charged_tokens or instance.ranks.has_flight
    )
