"""Chooses the batch of an open pass. Must not know when a batch leaves, or how the queue is
divided."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from sglang_sbs.scheduling.explained.decisions import note
from sglang_sbs.scheduling.paging import paged
from sglang_sbs.scheduling.policies.adaptive.cache_affinity import BatchAffinity, CacheAffinity
from sglang_sbs.scheduling.policies.adaptive.division import Division, Requests
from sglang_sbs.scheduling.policies.adaptive.view import OpenPass, View
from sglang_sbs.scheduling.policies.pbaa import Target
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.reasons import WaitReason
from sglang_sbs.scheduling.request import Request


class Batch(NamedTuple):
    """Requests chosen for an open pass (``head``), in the order of the queue, and what their
    placement on DP ranks needs."""

    opening: OpenPass
    affinity: BatchAffinity
    target: Target
    keep_tokens: float
    """Prompts are split to fill the pass only while more tokens than this wait."""
    head: Requests
    rest: Requests
    """Requests that wait for later passes, unless a part of one fills a hole in this pass."""


def choose(view: View, division: Division, moment: CacheAffinity) -> Iterator[Batch]:
    """Yield a batch for each open pass in turn, as long as requests for it are found (step 5 of a
    decision). The caller stops when one is placed. ``moment``: cached prefixes at this moment."""
    tried = 0
    # An overdue request may go to any instance, whatever its forecast.
    tries_all = view.learned.long.uneven_chunks or (view.by_forecast and view.overdue)
    chosen = {home.instance for home in division.homes.values()}
    for opening in division.passes:
        wanted = opening.instance.id in chosen or moment.is_wanted(opening.instance)
        if tried < TUNING.most_tried or tries_all or wanted:
            affinity = division.affinity(moment, opening.instance)
            filters = _Filters(view, affinity, opening.instance)
            batch = _batch_for(view, filters, opening)
            tried += filters.forbidden < len(view.queue)
            if batch.head:
                head, rest = division.part(opening, batch.head, batch.rest)
                yield batch._replace(head=head, rest=rest)


def _batch_for(view: View, filters: _Filters, opening: OpenPass) -> Batch:
    """Return the batch of requests that fit into a pass (``head``), with those of which a part
    might (``rest``)."""
    target, keep_tokens = _target(opening), _keep_tokens(view, opening)
    may_split = view.queue.tokens > keep_tokens
    room = sum([max(0, free) for free in target.c_avail])
    most = min(opening.joins_left, sum(target.places))
    suitable = filters.suitable()
    head, taken = _take(suitable, opening.instance, room, most)
    rest: Requests = []
    if may_split:
        rest, _ = _take(suitable, opening.instance, 2 * room - taken, 2 * most - len(head))
    return Batch(opening, filters.affinity, target, keep_tokens, head, rest)


def _take(
    requests: Iterator[Request], instance: PrefillInstance, most_tokens: int, most: float
) -> tuple[Requests, int]:
    """Take requests until there are ``most`` of them, or they have ``most_tokens`` charged tokens
    on the instance. Returns them and their charged tokens."""
    taken: Requests = []
    tokens = 0
    while tokens < most_tokens and len(taken) < most:
        request = next(requests, None)
        if request is None:
            break
        taken.append(request)
        tokens += paged(request.uncached_tokens_on(instance.id), instance.page)
    return taken, tokens


def _target(opening: OpenPass) -> Target:
    """Return the ranks of the pass with their room. Of equally empty ranks, those that were sent
    the fewest tokens so far come first, so that all caches fill alike."""
    instance, ranks = opening.instance, opening.instance.ranks
    return Target(
        instance.id,
        ranks.c_avail(opening.passes),
        ranks.places(opening.passes),
        instance.chunk_tokens,
        instance.page,
        sorted(range(len(ranks)), key=lambda rank: ranks[rank].received_tokens),
    )


def _keep_tokens(view: View, opening: OpenPass) -> float:
    """Return the number of waiting tokens above which prompts are split to fill the pass. Below it
    a split would only cost a pass: the other instances can take the tokens in theirs. Under overlap
    scheduling a pass of all instances is added, because the rest of a split prompt gets a pass
    almost of its own. Infinity: never split."""
    if view.urgent:
        return math.inf  # the rest would be formed at once, without the batch after it
    offered, instance = view.learned.offered, opening.instance
    all_tokens = offered.capacity_tokens
    keep_tokens = all_tokens - instance.ranks.capacity_of(offered.mean_tokens)
    return keep_tokens + instance.overlap * all_tokens


class _Filters:
    """Decides which requests of the queue may be in a batch for one instance."""

    def __init__(self, view: View, affinity: BatchAffinity, instance: PrefillInstance) -> None:
        # In attributes of its own, as each waiting request is looked at.
        self._view, self._admissible, self._instances = view, view.admissible, view.instances
        self.affinity = affinity
        self._instance = instance
        # Whatever was predicted, no request is left for another instance longer than this.
        self._patient_s = view.at.now_s + TUNING.epsilon_s - view.learned.hold_s
        self._refused = 0
        self.forbidden = 0
        """Number of requests found that must not go to the instance."""

    def suitable(self) -> Iterator[Request]:
        """Yield the requests that may be in the batch, in the order of the queue, and note on the
        others why they wait. Stops when enough were left for other instances, or lack decode
        room."""
        for request in self._view.queue.in_order():
            left = self._skip(request)
            if left is None:
                yield request
                continue
            if left is not request.waits_for:
                where, until_s, gain_s = self.affinity.better_for(request, left)
                note(request, left, self._view.at.now_s, where, until_s, gain_s)
            if (
                self.affinity.deferred >= TUNING.most_deferred
                or self._refused >= TUNING.most_refused
            ):
                break

    def _skip(self, request: Request) -> WaitReason | None:
        """Return the reason why a request cannot be in the batch; None: it can."""
        if not request.may_use(self._instance, self._instances):
            self.forbidden += 1
            return WaitReason.EXCLUDED
        if not self._admissible(request):
            self._refused += 1
            return WaitReason.NO_DECODE_ROOM
        one_pass = self._view.in_one_pass(request, self._instance)
        if one_pass and self.affinity.is_sooner_on(one_pass, request):
            return WaitReason.DOES_NOT_FIT
        if request.arrived_s <= self._patient_s:
            return None
        return self.affinity.skip(request)
