"""Describes decisions of the default policy in the vocabulary of
:mod:`sglang_sbs.scheduling.reasons`. Changes only the notes on requests."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.explained.decisions import MOST_LOOKS, BatchRecord, look_at, note
from sglang_sbs.scheduling.policies.adaptive.openings import Openings
from sglang_sbs.scheduling.policies.adaptive.view import OpenPass, View
from sglang_sbs.scheduling.reasons import Term, WaitReason
from sglang_sbs.scheduling.request import Request

Costs = Mapping[str, Mapping[InstanceId, float]]
"""Predicted cost of requests in seconds, by request id and instance."""


def _reason_of(view: View, opening: OpenPass) -> str:
    if opening.instance.idle:
        return f"{opening.instance.id} idle"
    at = view.at
    ahead_ms = 1e3 * (at.free_at_s(opening.instance) - at.now_s)
    return f"{ahead_ms:.0f} ms before the predicted launch on {opening.instance.id}"


def explain(
    view: View, openings: Openings, opening: OpenPass, costs_s: Costs, *, recorded: bool
) -> tuple[str, BatchRecord | None]:
    """Return the reason of a dispatch, as event logs have it, and its record with the state of the
    chosen instance and of those that start first (None unless ``recorded``)."""
    reason = _reason_of(view, opening)
    return reason, _record(view, openings, opening, costs_s) if recorded else None


def _record(view: View, openings: Openings, opening: OpenPass, costs_s: Costs) -> BatchRecord:
    starts, launch_s = view.starts, openings.begins.begin_s(opening.instance)
    first = starts.soonest(MOST_LOOKS)
    looks = tuple([look_at(view.instances[number], start_s) for start_s, _, number in first])
    if all(look.instance != opening.instance.id for look in looks):
        looks = (*looks[:-1], look_at(opening.instance, launch_s))
    term = Term.SOONEST if looks[0].instance == opening.instance.id else Term.FIRST_OPEN
    term = Term.OVERDUE if view.overdue else term
    return BatchRecord(
        view.at.now_s,
        opening.kind,
        Term.ONLY_ONE if len(view.instances) == 1 else term,
        looks,
        len(view.instances),
        len(view.queue),
        launch_s,
        costs_s=costs_s,
    )


def note_opening(request: Request, view: View | None, now_s: float) -> None:
    """Note on a request that arrived and was not placed which instance is expected to be free
    first. ``view``: snapshot of the decision; None while requests leave at once."""
    if view is None:
        note(request, WaitReason.NOT_YET, now_s)
    else:
        instance = next(view.starts.in_order())
        note(request, WaitReason.NOT_YET, now_s, instance.id, view.at.free_at_s(instance))
