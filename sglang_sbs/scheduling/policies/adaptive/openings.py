"""When and where a batch may leave: which passes are open at a moment, the most urgent first. Must
not know which requests go where."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import compress
from typing import NamedTuple

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.policies.adaptive.lineup import Begins
from sglang_sbs.scheduling.policies.adaptive.view import OpenPass, View
from sglang_sbs.scheduling.policies.idle_turns import whose_turn
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.instance import Instances, PrefillInstance
from sglang_sbs.scheduling.reasons import Opening
from sglang_sbs.scheduling.request import Request


class Openings(NamedTuple):
    """The passes that a batch may leave for now, the most urgent first."""

    passes: list[OpenPass]
    wake_s: float
    """When the next one opens."""
    begins: Begins
    """When passes begin that a batch could be in."""
    early: bool
    """Caches settle where requests go, and some engine forms its next pass ahead: requests for it
    may leave before a batch could."""
    any: bool
    """Whether a pass is open, or would be if prompts of several chunks did not keep it full."""


def open_passes(view: View) -> Openings:
    """Step 2: when a batch may leave, and for which passes."""
    wake_s = math.inf if view.overdue else view.hold_until_s
    if view.passes_away > 1:
        found = _far_away(view)
    else:
        found, wake_s = _near(view, wake_s)
    joins = {
        a_pass.instance.id: a_pass.joins_left for a_pass in found if a_pass.kind is Opening.JOINS
    }
    begins = Begins(view.starts, joins)
    ahead, due_s = _ahead(view)
    wake_s = min(wake_s, due_s)
    early = view.by_forecast and view.learned.long.leave_early(view.instances)
    if not (found or ahead or early):
        return Openings([], wake_s, begins, early, any=False)
    found = _idle_in_turn(found, next(iter(view.queue)))
    if view.by_forecast:
        ahead = []  # prompts of several chunks keep every pass full
    elif not (view.overdue or view.passes_away > 1 or view.learned.lineup.all_idle):
        found, apart_s = _spaced(view, found, begins)
        wake_s = min(wake_s, apart_s - view.at.latency_s)
    looking = [*_looking_ahead(view, ahead, joins)]
    # An instance may be in both lists. It keeps its place of the first, and looks ahead.
    passes = {a_pass.instance: a_pass for a_pass in (*looking, *found, *looking)}
    return Openings([*passes.values()], wake_s, begins, early, any=True)


def _far_away(view: View) -> list[OpenPass]:
    """Every instance with room: where the way takes a pass or more, nothing is held."""
    passes = view.passes_away
    far = [instance for instance in view.in_order() if instance.ranks.has_room_in(passes)]
    return [OpenPass(instance, Opening.FAR_AWAY, passes=passes) for instance in far]


def _near(view: View, wake_s: float) -> tuple[list[OpenPass], float]:
    """The open passes, and when the next one opens. ``wake_s``: the next decision is no later than
    this."""
    now_s, capacity_of = view.at.now_s, view.learned.offered.capacity_of
    patience_tokens = 0.0 if view.urgent else TUNING.slack * view.queue.tokens
    found: list[OpenPass] = []
    ahead_tokens = 0.0
    is_long = True

    def limit_s() -> float:
        """An instance that starts later is open later, and wakes nobody sooner."""
        return math.inf if is_long else max(now_s, wake_s) + view.lead_s + TUNING.beyond_s

    for start_s, _, number in view.starts.until(limit_s):
        instance = view.instances[number]
        ahead_tokens += capacity_of(instance)
        is_long = patience_tokens >= ahead_tokens
        opens_s, kind, joins_left = _opening(view, instance, start_s, is_long)
        if opens_s <= now_s + TUNING.epsilon_s:
            found.append(OpenPass(instance, kind, joins_left))
        else:
            wake_s = min(wake_s, opens_s)
    return found, wake_s


def may_take(instance: PrefillInstance, long_queue: bool) -> bool:
    """Whether a batch could go to an instance before its next report. A pass gets one batch, unless
    more waits than it holds. Single requests may still follow that batch."""
    if instance.ranks.has_flight and not long_queue:
        return False
    return instance.ranks.has_room and not instance.launching


def _opening(
    view: View, instance: PrefillInstance, start_s: float, is_long: bool
) -> tuple[float, Opening, float]:
    """When a pass of the instance opens, why, and how many requests it still takes. ``is_long``:
    more waits than all passes can hold that start before this one, and this one."""
    now_s, never_s = view.at.now_s, math.inf
    if may_take(instance, is_long):
        if instance.idle:
            return now_s, Opening.IDLE, math.inf
        if is_long:
            return now_s, Opening.FULL_AHEAD, math.inf
        forms_s = view.at.forms_at_s(instance)
        if forms_s < view.at.arrives_s:
            forms_s = start_s  # too late for that pass
        return forms_s - view.lead_s, Opening.ABOUT_TO_END, math.inf
    is_followed = instance.ranks.has_flight and instance.ranks.has_room and bool(instance.passes)
    if not is_followed or len(view.queue) > TUNING.most_joining:
        return never_s, Opening.JOINS, 0.0
    # What came after the batch may join it, once a batch could leave for that pass.
    left_s = view.at.forms_at_s(instance) - now_s
    if left_s > view.lead_s + TUNING.epsilon_s:
        return now_s + left_s - view.lead_s, Opening.JOINS, 0.0
    # A request that joins leaves alone. If it comes late, it is one request in the next pass.
    interval = view.learned.interval
    batch_s = max(0.0, instance.left_s - now_s)
    spare_s = left_s - interval.lone_s - batch_s - interval.serial_s
    opens_s = now_s if instance.last_dispatch_s < now_s and spare_s >= 0 else never_s
    return opens_s, Opening.JOINS, 1 + spare_s / max(TUNING.epsilon_s, interval.serial_s)


def _ahead(view: View) -> tuple[list[PrefillInstance], float]:
    """The instances that get a batch for the pass after their next, and when the next one does."""
    learned, queue = view.learned, view.queue
    lineup, mean_tokens = learned.lineup, learned.offered.mean_tokens
    if view.urgent or not lineup.overlap or queue.tokens < lineup.room_tokens:
        return [], math.inf
    return lookahead(view.instances, queue.tokens, mean_tokens, view.lead_s, view.at.now_s)


def lookahead(
    instances: Instances,
    queue_tokens: int,
    mean_tokens: float,
    lead_s: float,
    now_s: float,
) -> tuple[list[PrefillInstance], float]:
    """The instances that get a batch now for the pass after their next one, and when the next
    instance does.

    An engine with overlap scheduling forms the batch of a pass when the pass before it *starts*, if
    anything waits by then, and launches it without a gap. Requests that come later wait until that
    pass *ends*, and the device is idle while the engine takes them in: 20 to 30 ms on the CPU
    cluster, 6 % of the time at saturation. Late binding wants the second, as it knows more by then.
    With more waiting in the router than all instances can take in their next passes there is
    nothing to be known: the batch runs in that pass whenever it leaves.

    Args:
        queue_tokens: uncached tokens that wait in the router.
        mean_tokens: mean length of a request.
        lead_s: how long a batch is on its way, with its margin.
    """
    capacities = [instance.ranks.capacity_of(mean_tokens) for instance in instances]
    if queue_tokens < min(capacities):
        return [], math.inf
    pairs = list(zip(instances, capacities, strict=True))
    rooms = [max(0, tokens - instance.ranks.charged_tokens) for instance, tokens in pairs]
    room_tokens = sum(rooms)
    opens = [
        (instance.passes[0].end_s - lead_s, instance)
        for (instance, tokens), room in zip(pairs, rooms, strict=True)
        # The others take what they have room for, and this one takes a whole pass.
        if queue_tokens >= tokens + room_tokens - room and _lacks_batch(instance, tokens)
    ]
    latest_s = now_s + TUNING.epsilon_s
    due_s = min([open_s for open_s, _ in opens if open_s > latest_s], default=math.inf)
    return [instance for open_s, instance in opens if open_s <= latest_s], due_s


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


def _looking_ahead(
    view: View, ahead: list[PrefillInstance], joins: Mapping[InstanceId, float]
) -> Iterator[OpenPass]:
    for instance in ahead:
        kind = Opening.AHEAD if view.passes_away == 1 else Opening.FAR_AWAY
        kind = Opening.JOINS if instance.id in joins else kind
        passes = max(view.passes_away, 1 + (len(instance.passes) == 1))
        yield OpenPass(instance, kind, joins.get(instance.id, math.inf), passes)


def _idle_in_turn(passes: list[OpenPass], oldest: Request) -> list[OpenPass]:
    """Idle instances would all start at once. Of those that have as much of the oldest request
    cached, the one whose turn it is comes first."""
    idle = [a_pass.instance for a_pass in passes if a_pass.instance.idle]
    if len(idle) < 2:
        return passes
    tokens = [oldest.uncached_tokens_on(instance.id) for instance in idle]
    most = min(tokens) + TUNING.least_hit_share * idle[0].chunk_tokens
    equal = [instance for instance, left in zip(idle, tokens, strict=True) if left <= most]
    first = whose_turn(equal, min(tokens))
    return sorted(passes, key=lambda a_pass: a_pass.instance is not first)


def _spaced(view: View, passes: list[OpenPass], begins: Begins) -> tuple[list[OpenPass], float]:
    """Soft stagger: the passes that begin far enough from all that are planned, and when the first
    of the others would. Far enough is the length of a pass over the number of instances. That
    length comes from the model and the arrival rate, not from measured times, which would feed back
    into themselves. A request that joins a batch starts with it."""
    learned = view.learned
    share_s = learned.offered.pass_s / len(view.instances)
    if TUNING.slack * view.queue.tokens >= max(1.0, learned.offered.token_rate * share_s):
        return passes, math.inf
    # An instance that falls idle meanwhile would start with a part of the next batch.
    apart_s = learned.lead.whole * share_s
    begin_s = [begins.begin_s(a_pass.instance) for a_pass in passes]
    free_s = [learned.planned.first_apart(at_s, apart_s) for at_s in begin_s]
    waits = [
        after_s > at_s and not a_pass.instance.ranks.backlog_tokens
        for a_pass, at_s, after_s in zip(passes, begin_s, free_s, strict=True)
    ]
    due_s = min(compress(free_s, waits), default=math.inf)
    return [a_pass for a_pass, wait in zip(passes, waits, strict=True) if not wait], due_s
