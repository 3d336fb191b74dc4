"""Chooses the batch of an open pass and places it on the DP ranks. Must not know when a batch
leaves, or how the queue is divided."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sglang_sbs.scheduling.explained.decisions import note
from sglang_sbs.scheduling.paging import paged
from sglang_sbs.scheduling.policies.adaptive.cache_affinity import BatchAffinity, CacheAffinity
from sglang_sbs.scheduling.policies.adaptive.division import Division, Requests
from sglang_sbs.scheduling.policies.adaptive.view import OpenPass, View
from sglang_sbs.scheduling.policies.pbaa import place_fitting, top_up
from sglang_sbs.scheduling.policies.policy import Placement
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.reasons import WaitReason
from sglang_sbs.scheduling.request import Request, uncached_tokens_of


class Batch(NamedTuple):
    """The requests that are chosen for an open pass, in the order of the queue."""

    opening: OpenPass
    affinity: BatchAffinity
    c_avail: Sequence[int]
    places: Sequence[int] | None
    keep_tokens: float
    """A prompt is split to fill the pass only if more waits than this."""
    head: Requests
    rest: Requests
    """Requests that wait for later passes, unless the pass has a hole for a part of one."""


def rank_by_affinity(
    view: View, passes: Sequence[OpenPass], last: CacheAffinity | None
) -> CacheAffinity:
    """Step 4: where each request is best off. All batches that leave at one moment share the
    ranking, so it is the ``last`` one if that was of this moment."""
    learned = view.learned
    first = passes[0].instance if passes else view.instances[0]
    if last is None or last.at.now_s != view.at.now_s:
        load = learned.offered.load_with(view.queue.tokens)
        last = CacheAffinity(view.at, learned.lineup.by_id, first, load=load)
    last.starts_with(first)
    return last


def choose(view: View, division: Division, moment: CacheAffinity) -> Iterator[Batch]:
    """Step 5: a batch for one open pass after the other, until one is placed."""
    tried = 0
    tries_all = view.learned.long.uneven_chunks or view.by_forecast
    for opening in division.passes:
        if tried < TUNING.most_tried or tries_all or moment.is_wanted(opening.instance):
            batch, is_forbidden = _batch_for(view, division, moment, opening)
            tried += not is_forbidden
            if batch.head or batch.rest:
                head, rest = division.part(opening, batch.head, batch.rest)
                yield batch._replace(head=head, rest=rest)


def _batch_for(
    view: View, division: Division, moment: CacheAffinity, opening: OpenPass
) -> tuple[Batch, bool]:
    """The requests that fit into the pass, with those of which a part might, and whether nothing
    that waits may go to the instance."""
    instance, queue = opening.instance, view.queue
    affinity = division.affinity(moment, instance)
    c_avail, places = instance.ranks.c_avail(opening.passes), instance.ranks.places(opening.passes)
    keep_tokens = _keep_tokens(view, opening)
    filters = _Filters(view, affinity, opening)
    room = sum([max(0, free) for free in c_avail])
    most = min(opening.joins_left, math.inf if places is None else sum(places))
    parts = 1 + (queue.tokens > keep_tokens)
    most_tokens, most_requests = parts * room, parts * most
    head: Requests = []
    rest: Requests = []
    taken = 0
    is_full = most_tokens <= 0 or most_requests <= 0
    for request in queue.in_order():
        if is_full:
            break
        left = filters.skip(request)
        if left is None:
            (head if taken < room and len(head) < most else rest).append(request)
            taken += paged(request.uncached_tokens_on(instance.id), instance.page)
            is_full = taken >= most_tokens or len(head) + len(rest) >= most_requests
            continue
        is_full = filters.exhausted
        if left is not request.waits_for:
            where, until_s, gain_s = affinity.better_for(request, left)
            note(request, left, view.at.now_s, where, until_s, gain_s)
    batch = Batch(opening, affinity, c_avail, places, keep_tokens, head, rest)
    return batch, filters.forbidden == len(queue)


def _keep_tokens(view: View, opening: OpenPass) -> float:
    """Splitting a prompt costs it a pass. That pays when more is left than the others can take;
    under overlap scheduling only when the rest, which runs at once and all but alone, does not
    matter."""
    if view.urgent:
        return math.inf  # the rest would be formed at once, without the batch after it
    offered, instance = view.learned.offered, opening.instance
    all_tokens = offered.capacity_tokens
    keep_tokens = all_tokens - instance.ranks.capacity_of(offered.mean_tokens)
    return keep_tokens + instance.overlap * all_tokens


class _Filters:
    """Which requests of the queue may be in a batch."""

    def __init__(self, view: View, affinity: BatchAffinity, opening: OpenPass) -> None:
        # In attributes of its own, as each waiting request is looked at.
        self._instances, self._admissible = view.instances, view.admissible
        self._affinity = affinity
        self._instance = opening.instance
        self._long = view.learned.long
        self._all_suit = view.overdue or not self._long.uneven_chunks
        # Whatever was predicted, no request is left for another instance longer than this.
        self._patient_s = view.at.now_s + TUNING.epsilon_s - view.learned.hold_s
        self._refused = 0
        self.forbidden = 0
        """Requests that must not go to the instance."""

    @property
    def exhausted(self) -> bool:
        """Whether the decision has looked at enough requests that it cannot take."""
        return (
            self._affinity.deferred >= TUNING.most_deferred or self._refused >= TUNING.most_refused
        )

    def skip(self, request: Request) -> WaitReason | None:
        """Why a request cannot be in the batch; None: it can."""
        if request.exclude and not request.may_use(self._instance, self._instances):
            self.forbidden += 1
            return WaitReason.EXCLUDED
        if not self._admissible(request):
            self._refused += 1
            return WaitReason.NO_DECODE_ROOM
        if not self._all_suit:
            one_pass = self._long.in_one_pass(request, self._instance, self._instances)
            if one_pass and self._affinity.is_sooner_on(one_pass, request):
                return WaitReason.DOES_NOT_FIT
        if request.arrived_s <= self._patient_s:
            return None
        return self._affinity.skip(request)


def place(view: View, batch: Batch) -> tuple[list[Placement], Requests]:
    """Step 6: the requests of a batch on DP ranks, and those that it leaves behind."""
    instance, affinity = batch.opening.instance, batch.affinity
    allocation = place_fitting(
        batch.head,
        batch.c_avail,
        instance.chunk_tokens,
        affinity.hits_of,
        affinity.rank_of,
        [rank.received_tokens for rank in instance.ranks],
        instance.page,
        batch.places,
    )
    if allocation.placed:
        _note_left(allocation.left, WaitReason.DOES_NOT_FIT, view.at.now_s)
        _note_left(batch.rest, WaitReason.SHARE_FULL, view.at.now_s)
    chosen_tokens = uncached_tokens_of(batch.head) + uncached_tokens_of(batch.rest)
    allocation = top_up(
        allocation._replace(left=allocation.left + batch.rest),
        batch.c_avail,
        instance.chunk_tokens,
        keep_tokens=batch.keep_tokens - (view.queue.tokens - chosen_tokens),
        hits_of=affinity.hits_of,
        page=instance.page,
        places=batch.places,
    )
    return [Placement(r, instance, rank) for r, rank in allocation.placed], allocation.left


def _note_left(left: Requests, reason: WaitReason, now_s: float) -> None:
    """A batch leaves without these requests."""
    for request in left:
        if request.waits_for is not reason:
            note(request, reason, now_s)
