"""Decides when and for which passes a batch may leave: a pass that may get a batch now is *open*.
Must not know which requests go where."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from sglang_sbs.scheduling.policies.adaptive.lineup import Begins
from sglang_sbs.scheduling.policies.adaptive.view import OpenPass, View
from sglang_sbs.scheduling.policies.idle_turns import whose_turn
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.instance import Instances, PrefillInstance
from sglang_sbs.scheduling.reasons import Opening
from sglang_sbs.scheduling.request import Request


class Openings(NamedTuple):
    """The passes that a batch may leave for now, the most urgent first."""

    passes: Mapping[PrefillInstance, OpenPass]
    wake_s: float
    """Time when the next pass opens, or the next decision is due; infinity: none known."""
    begins: Begins
    """When the pass of each instance begins that a batch sent now could be in."""
    any: bool
    """Whether any pass was found open, including passes dropped from ``passes`` since, or requests
    may leave early (:meth:`.LongPrompts.leave_early`)."""


class OpenSoFar:
    """Collects the passes that are open now, and the time when the next one opens."""

    def __init__(self, now_s: float, wake_s: float = math.inf) -> None:
        """``wake_s``: the next decision is no later than this."""
        self._latest_s = now_s + TUNING.epsilon_s
        self.open: list[OpenPass] = []
        self.wake_s = wake_s

    def add(self, opens_s: float, a_pass: OpenPass) -> None:
        """Add a pass that opens at ``opens_s``: to :attr:`open` if that is now or past, otherwise
        only its time, to :attr:`wake_s`."""
        if opens_s <= self._latest_s:
            self.open.append(a_pass)
        else:
            self.wake_s = min(self.wake_s, opens_s)


def open_passes(view: View) -> Openings:
    """Find the passes that a batch may leave for now, and the time when the next opens (step 2 of a
    decision)."""
    at, starts = view.at, view.starts
    found = OpenSoFar(at.now_s, math.inf if view.overdue else view.hold_until_s)
    _add_near(view, found)
    joins = {p.instance: p for p in found.open if p.kind is Opening.JOINS}
    begins = Begins(starts, joins)
    ahead = _ahead(view)
    any_open = bool(found.open or ahead.open or view.early)
    passes, looking = _idle_in_turn(found.open, next(iter(view.queue))), ahead.open
    wake_s = min(found.wake_s, ahead.wake_s)
    if view.by_forecast:
        looking = []  # prompts of several chunks keep every pass full
    elif not (view.overdue or view.learned.lineup.all_idle):
        passes, apart_s = _spaced(view, passes, begins)
        wake_s = min(wake_s, apart_s - at.latency_s)
    # Requests that join the batch on its way to the pass keep their reason and limit.
    looking = [joins.get(p.instance, p)._replace(passes=p.passes) for p in looking]
    # An instance may be in both lists. It keeps its place of the first, and looks ahead.
    opened = {a_pass.instance: a_pass for a_pass in (*looking, *passes, *looking)}
    return Openings(opened, wake_s, begins, any_open)


def _add_near(view: View, found: OpenSoFar) -> None:
    """Add the next pass of each instance."""
    capacity_of, starts = view.learned.offered.capacity_of, view.starts
    patience_tokens = 0.0 if view.urgent else TUNING.slack * view.queue.tokens
    ahead_tokens = 0.0
    is_long = True

    def limit_s() -> float:
        """Return the start after which instances need no look: they open later than the next
        decision is due."""
        soonest_s = max(view.at.now_s, found.wake_s)
        return math.inf if is_long else soonest_s + view.lead_s + TUNING.beyond_s

    for start_s, _, number in starts.until(limit_s):
        instance = view.instances[number]
        ahead_tokens += capacity_of(instance)
        is_long = patience_tokens >= ahead_tokens
        found.add(*_opening(view, instance, start_s, is_long))


def has_room(instance: PrefillInstance) -> bool:
    """Return whether the next pass of an instance has room, and is not about to start."""
    return instance.ranks.has_room and not instance.launching


def _opening(
    view: View, instance: PrefillInstance, start_s: float, is_long: bool
) -> tuple[float, OpenPass]:
    """Return when a pass of the instance opens for a batch, and the pass with the reason; infinity:
    not before the instance's state changes. ``start_s``: start of a batch sent now. ``is_long``:
    the queue fills this pass and all passes that start before it."""
    at = view.at
    if not has_room(instance):
        return math.inf, OpenPass(instance, Opening.ABOUT_TO_END)
    if instance.ranks.has_flight and not is_long:
        # A pass gets one batch, unless more waits than it holds.
        return _joining(view, instance)
    if instance.idle:
        return at.now_s, OpenPass(instance, Opening.IDLE)
    if is_long:
        return at.now_s, full_ahead(view, instance)
    forms_s = at.forms_at_s(instance)
    if forms_s < at.arrives_s:
        forms_s = start_s  # too late for that pass
    return forms_s - view.lead_s, OpenPass(instance, Opening.ABOUT_TO_END)


def full_ahead(view: View, instance: PrefillInstance) -> OpenPass:
    """Return the next pass of an instance that gets a batch now, however late it starts. If it is
    about to start, that is the reason."""
    left_s = view.at.forms_at_s(instance) - view.at.now_s
    is_near = left_s <= view.lead_s + TUNING.epsilon_s
    return OpenPass(instance, Opening.ABOUT_TO_END if is_near else Opening.FULL_AHEAD)


def _joining(view: View, instance: PrefillInstance) -> tuple[float, OpenPass]:
    """Return when single requests may follow the batch that is on its way to the instance, and the
    pass with the number of requests that still reach it. They may once a batch could leave for the
    pass; infinity: not before the instance's state changes."""
    at, interval = view.at, view.learned.interval
    now_s = at.now_s
    never = OpenPass(instance, Opening.JOINS, 0)
    if len(view.queue) > TUNING.most_joining:
        return math.inf, never
    left_s = at.forms_at_s(instance) - now_s
    if left_s > view.lead_s + TUNING.epsilon_s:
        return now_s + left_s - view.lead_s, never
    # A request that joins leaves alone. If it comes late, it is one request in the next pass.
    batch_s = max(0.0, instance.left_s - now_s)
    spare_s = left_s - interval.lone_s - batch_s - interval.serial_s
    if spare_s < 0 or instance.last_dispatch_s >= now_s:
        return math.inf, never
    reach = 1 + spare_s / max(TUNING.epsilon_s, interval.serial_s)
    return now_s, OpenPass(instance, Opening.JOINS, reach)


def _ahead(view: View) -> OpenSoFar:
    """Return the passes that :func:`lookahead` finds; none if no engine has overlap scheduling, the
    next passes can take the whole queue, or an urgent request may come. Arrivals
    within a dispatch lead do not count: they wait because of the way to the engine, not for want of
    room."""
    learned = view.learned
    tokens = view.queue.tokens - round(learned.offered.token_rate * view.lead_s)
    if view.urgent or not learned.lineup.overlap or tokens < learned.lineup.room_tokens:
        return OpenSoFar(view.at.now_s)
    mean_tokens = learned.offered.mean_tokens
    return lookahead(view.instances, tokens, mean_tokens, view.lead_s, view.at.now_s)


def lookahead(
    instances: Instances,
    queue_tokens: int,
    mean_tokens: float,
    lead_s: float,
    now_s: float,
) -> OpenSoFar:
    """Return the passes that should get a batch although an earlier pass of the instance has not
    ended, and when the next such pass opens.

    An engine with overlap scheduling forms the batch of a pass when the previous pass *starts*, if
    any request waits by then, and launches it without a gap. Later requests wait until that pass
    *ends*, and the device is idle while the engine accepts them: 20 to 30 ms on the CPU cluster,
    6 % of the time at saturation. Usually the later time is better, because more requests have
    arrived. It gains nothing if more requests wait in the router than all instances can take in
    their next passes: the batch runs in the same pass in either case.

    Args:
        queue_tokens: uncached tokens that wait in the router for want of room.
        mean_tokens: mean length of a request.
        lead_s: dispatch lead of a batch.
    """
    capacities = [instance.ranks.capacity_of(mean_tokens) for instance in instances]
    pairs = list(zip(instances, capacities, strict=True))
    rooms = [max(0, tokens - instance.ranks.charged_tokens) for instance, tokens in pairs]
    room_tokens = sum(rooms)
    found = OpenSoFar(now_s)
    for (instance, tokens), room in zip(pairs, rooms, strict=True):
        # The others take what they have room for, and this one takes a whole pass.
        if queue_tokens >= tokens + room_tokens - room and _lacks_batch(instance, tokens):
            passes = 1 + (len(instance.passes) == 1)
            opens_s = instance.passes[0].end_s - lead_s
            found.add(opens_s, OpenPass(instance, Opening.AHEAD, passes=passes))
    return found


def _lacks_batch(instance: PrefillInstance, capacity_tokens: float) -> bool:
    """Return whether the instance should get another batch before its running pass ends. With one
    pass running, the next must have requests already, and room must remain in the pass after it.
    With a second pass queued, no request may be waiting for the third."""
    if not instance.overlap:
        return False
    if len(instance.passes) == 1:
        return 0 < instance.ranks.charged_tokens < TUNING.most_filled * capacity_tokens
    return len(instance.passes) == 2 and not instance.ranks.charged_tokens


def _idle_in_turn(passes: list[OpenPass], oldest: Request) -> list[OpenPass]:
    """Return the passes with an idle instance's first, so that idle instances take turns: the next
    in turn among those that have as much of the oldest request cached. Unchanged if fewer than two
    are idle."""
    tokens = {
        a_pass.instance: oldest.uncached_tokens_on(a_pass.instance.id)
        for a_pass in passes
        if a_pass.instance.idle
    }
    if len(tokens) < 2:
        return passes
    least = min(tokens.values())
    most = least + TUNING.least_hit_share * next(iter(tokens)).chunk_tokens
    first = whose_turn([instance for instance, own in tokens.items() if own <= most], least)
    return sorted(passes, key=lambda a_pass: a_pass.instance is not first)


def _spaced(view: View, passes: list[OpenPass], begins: Begins) -> tuple[list[OpenPass], float]:
    """Soft stagger: return the passes that begin far enough from every planned start, and the time
    when the first of the others would.

    Far enough is the steady-state pass time divided by the number of instances. It comes from the
    model and the arrival rate, because measured times would feed back into themselves. A request
    that joins a batch starts with it. If the queue exceeds what arrives between two starts, all
    passes are returned, and infinity."""
    learned = view.learned
    share_s = learned.offered.pass_s / len(view.instances)
    if TUNING.slack * view.queue.tokens >= max(1.0, learned.offered.token_rate * share_s):
        return passes, math.inf
    # An instance that falls idle meanwhile would start with a part of the next batch.
    apart_s = learned.lead.whole * share_s
    spaced: list[OpenPass] = []
    due_s = math.inf
    for a_pass in passes:
        begin_s = begins.begin_s(a_pass.instance)
        free_s = learned.planned.first_apart(begin_s, apart_s)
        if free_s > begin_s and not a_pass.instance.ranks.backlog_tokens:
            due_s = min(due_s, free_s)
        else:
            spaced.append(a_pass)
    return spaced, due_s
