"""Places a batch on the DP ranks of its instance. Must not know when a batch leaves, or how the
queue is divided."""

from __future__ import annotations

from sglang_sbs.scheduling.explained.decisions import note
from sglang_sbs.scheduling.policies.adaptive.batch import Batch
from sglang_sbs.scheduling.policies.adaptive.division import Requests
from sglang_sbs.scheduling.policies.adaptive.view import View
from sglang_sbs.scheduling.policies.pbaa import place_fitting, top_up
from sglang_sbs.scheduling.policies.policy import Placement
from sglang_sbs.scheduling.reasons import WaitReason
from sglang_sbs.scheduling.request import uncached_tokens_of


def place(view: View, batch: Batch) -> tuple[list[Placement], Requests]:
    """Place a batch on DP ranks (step 6 of a decision). Returns the placements, and the requests
    that do not leave now; notes on these why they wait."""
    target, instance = batch.target, batch.opening.instance
    allocation = place_fitting(batch.head, target, batch.affinity.rank_of)
    if allocation.placed:
        _note_left(allocation.left, WaitReason.DOES_NOT_FIT, view.at.now_s)
        _note_left(batch.rest, WaitReason.SHARE_FULL, view.at.now_s)
    chosen_tokens = uncached_tokens_of(batch.head) + uncached_tokens_of(batch.rest)
    others_tokens = view.queue.tokens - chosen_tokens
    candidates = allocation._replace(left=allocation.left + batch.rest)
    allocation = top_up(candidates, target, batch.keep_tokens - others_tokens)
    return [Placement(r, instance, rank) for r, rank in allocation.placed], allocation.left


def _note_left(left: Requests, reason: WaitReason, now_s: float) -> None:
    """Note on requests that a batch leaves without why they wait."""
    for request in left:
        if request.waits_for is not reason:
            note(request, reason, now_s)
