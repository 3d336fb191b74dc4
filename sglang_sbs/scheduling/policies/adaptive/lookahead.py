"""When a batch is to wait in the engine before the pass in front of it has even started.

An engine with overlap scheduling forms the batch of a pass when the pass before it *starts*, if
anything waits by then, and launches it without a gap. What comes later it takes in when that pass
*ends*, and the device is idle while it does: 20 to 30 ms on the CPU cluster, 6 % of the time at
saturation. Late binding wants the second, as it knows more by then. With more waiting in the router
than all instances can take in their next passes there is nothing to be known: the batch runs in
that pass whenever it leaves.
"""

from __future__ import annotations

from sglang_sbs.scheduling.prefill.instance import Instances, PrefillInstance

_EPSILON_S = 1e-9


def lookahead(
    instances: Instances,
    queue_tokens: int,
    mean_tokens: float,
    lead_s: float,
    now_s: float,
) -> tuple[list[PrefillInstance], float | None]:
    """The instances that should get a batch now, for the pass after their next, and when the next
    one is due. ``queue_tokens``: uncached, waiting in the router; ``mean_tokens``: of a request;
    ``lead_s``: how long a batch takes to be there, with its margin."""
    capacities = [one.capacity_of(mean_tokens) for one in instances]
    if queue_tokens < min(capacities):
        return [], None
    rooms = [
        max(0, tokens - one.charged_tokens)
        for one, tokens in zip(instances, capacities, strict=True)
    ]
    room_tokens = sum(rooms)
    found: list[PrefillInstance] = []
    due_s: float | None = None
    for one, tokens, its_room_tokens in zip(instances, capacities, rooms, strict=True):
        needed_tokens = tokens + room_tokens - its_room_tokens
        if queue_tokens < needed_tokens or not _wants_one(one, tokens):
            continue
        open_s = one.passes[0].end_s - lead_s
        if open_s <= now_s + _EPSILON_S:
            found.append(one)
        elif due_s is None or open_s < due_s:
            due_s = open_s
    return found, due_s


def _wants_one(instance: PrefillInstance, capacity_tokens: float) -> bool:
    """Whether the batch that is formed at the end of its running pass lacks something: the one
    after the next if the next waits already, else the one after the pass that is queued."""
    if not instance.overlap:
        return False
    if len(instance.passes) == 1:
        return 0 < instance.charged_tokens < 1.5 * capacity_tokens  # nearer to one pass than to two
    return len(instance.passes) == 2 and not (instance.charged_tokens or instance.has_flight)
