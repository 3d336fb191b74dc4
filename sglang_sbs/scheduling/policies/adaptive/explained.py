"""Puts a decision of the default policy into the words of
:mod:`sglang_sbs.scheduling.reasons`. Changes nothing but the notes on requests."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_sbs.scheduling.explained.decisions import MOST_LOOKS, Batch, look_at, note
from sglang_sbs.scheduling.policies.adaptive.cache_affinity import BatchAffinity
from sglang_sbs.scheduling.policies.adaptive.decision import Decision
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.reasons import Opening, Term, WaitReason
from sglang_sbs.scheduling.request import Request

_EPSILON_S = 1e-9


def opening_of(instance: PrefillInstance, one: Decision) -> Opening:
    """Why the instance may get a batch now."""
    if one.under_way > 1:
        return Opening.FAR_AWAY
    if instance.id in one.starts.in_time:
        return Opening.JOINS
    if instance in one.ahead:
        return Opening.AHEAD
    if instance.idle:
        return Opening.IDLE
    if one.at.forms_at_s(instance) - one.at.now_s <= one.whole_s + _EPSILON_S:
        return Opening.ABOUT_TO_END
    return Opening.FULL_AHEAD


def batch_of(instance: PrefillInstance, one: Decision) -> Batch:
    """What is known of the instance that gets a batch, and of those that start first."""
    launch_s = one.starts.begin_s(instance)
    first = one.starts.soonest(MOST_LOOKS)
    looks = tuple([look_at(one.instances[number], start_s) for start_s, _, number in first])
    if all(look.instance != instance.id for look in looks):
        looks = (*looks[:-1], look_at(instance, launch_s))
    term = Term.SOONEST if looks[0].instance == instance.id else Term.FIRST_OPEN
    if len(one.instances) == 1:
        term = Term.ONLY_ONE
    elif one.overdue:
        term = Term.OVERDUE
    return Batch(
        one.at.now_s,
        opening_of(instance, one),
        term,
        looks,
        len(one.instances),
        len(one.queue),
        launch_s,
        costs_s=one.costs_s,
    )


def note_opening(request: Request, one: Decision, now_s: float) -> None:
    """It has just arrived, and no instance could take it: which one was expected to be ready
    first."""
    soonest = one.soonest
    if soonest is None:
        note(request, WaitReason.NOT_YET, now_s)
    else:
        note(request, WaitReason.NOT_YET, now_s, soonest.id, one.at.free_at_s(soonest))


def note_left(left: Iterable[Request], reason: WaitReason, now_s: float) -> None:
    """A batch leaves without these."""
    for request in left:
        if request.waits_for is not reason:
            note(request, reason, now_s)


def note_skipped(
    request: Request, reason: WaitReason, one: Decision, affinity: BatchAffinity
) -> None:
    """A batch is formed for an instance, and the request is left for another one, or for later."""
    now_s = one.at.now_s
    home = None if one.home_of is None else one.home_of.get(request.rid)
    if reason is WaitReason.BETTER_ELSEWHERE and home is not None:
        costs_s = one.costs_s.get(request.rid, {})
        here_s = costs_s.get(affinity.instance)
        gain_s = None if here_s is None else here_s - costs_s[home.instance]
        note(request, reason, now_s, home.instance, gain_s=gain_s)
    elif reason is WaitReason.BETTER_ELSEWHERE:
        instance, gain_s = affinity.better_for(request)
        note(request, reason, now_s, instance, gain_s=gain_s)
    elif reason is WaitReason.PREFIX_COMING:
        coming = max(request.upcoming, key=lambda each: each.tokens, default=None)
        instance, until_s = ("", None) if coming is None else (coming.instance, coming.visible_s)
        note(request, reason, now_s, instance or affinity.instance, until_s)
    else:
        note(request, reason, now_s)
