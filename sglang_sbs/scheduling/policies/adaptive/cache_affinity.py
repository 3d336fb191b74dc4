"""Weighs cached prefixes when a batch is formed for an instance.

A :class:`CacheAffinity` holds for all decisions at one moment. Each batch that is tried at that
moment has a :class:`BatchAffinity`.

The cost of a rank is the time until the request would be done there (:class:`.NextPass`), plus the
delay of others. ``x`` uncached tokens take ``x * slope / dp`` of an instance's time, and their
attention likewise. That delays every request that arrives while the instance catches up, and more
so at a higher load. So an idle cluster recomputes prefixes, and a busy one waits for them. All
requests that share a prefix share the cost of having it in one more place. No request waits for a
prefix of less than ``Tuning.least_hit_share`` of a chunk.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.paging import paged
from sglang_sbs.scheduling.policies.adaptive.lineup import Moment
from sglang_sbs.scheduling.policies.adaptive.pass_forecast import Home
from sglang_sbs.scheduling.policies.adaptive.view import OpenPass, View
from sglang_sbs.scheduling.policies.pbaa import first_part
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.completion import NextPass, attention_pairs, likely_ranks
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.prefix.places import Upcoming, shared_blocks
from sglang_sbs.scheduling.reasons import WaitReason
from sglang_sbs.scheduling.request import Request

Better = tuple[InstanceId, float | None, float | None]
"""Instance for which a request waits (empty: none), time until which it waits, on the scheduler's
clock (None: unknown), and how many seconds less it is predicted to cost there (None: unknown)."""


class _Best(NamedTuple):
    """Instance and DP rank where a request costs least. ``cost_s``: time at which it would be done,
    plus the weighted delay of others."""

    cost_s: float
    instance: InstanceId
    rank: int


class _Coming(NamedTuple):
    """Cached answer of :meth:`CacheAffinity.is_coming`: whether it pays to wait for the ranks that
    are computing a part of a prompt (``upcoming``)."""

    upcoming: tuple[Upcoming, ...]
    pays: bool


_NOTHING_COMES = _Coming((), pays=False)


class CacheAffinity:
    """Ranks the instances for each request at one moment; shared by all batches tried then."""

    def __init__(
        self,
        at: Moment,
        by_id: Mapping[InstanceId, PrefillInstance],
        first: PrefillInstance,
        *,
        load: float,
    ) -> None:
        """
        Args:
            by_id: all instances that are up.
            first: instance that starts first of those that a batch could go to.
            load: share of the cluster's time in use, below 1, including waiting requests.
        """
        self.at = at
        self._by_id = by_id
        self._first = first
        self._weight = TUNING.again_weight * load**2 / (1 - load)
        self._next_passes: dict[InstanceId, NextPass] = {}
        """Next passes including requests that were left for them, by instance."""
        self._plain: dict[InstanceId, NextPass] = {}
        """Next passes without requests left for them, by instance, until :meth:`starts_with`."""
        self._best: dict[str, _Best] = {}
        self._wanted: set[InstanceId] = set()
        self._coming: dict[str, _Coming] = {}
        self.wake_s = math.inf
        """Earliest time at which an awaited prefix will be cached; infinity: none is awaited."""
        self._sharing: defaultdict[int | None, set[str]] = defaultdict(set)
        """Ids of the requests that :meth:`look_at` has counted, by the cached prefix they share."""
        self.deferred = 0
        """Number of times that a request was left for another instance, or for a prefix that is
        being computed."""

    def starts_with(self, first: PrefillInstance) -> None:
        """Set the instance that starts first of those that the next batch could go to."""
        self._first = first
        self._plain = {}

    def defer(self) -> None:
        """Count a request that was left for another instance or a prefix (:attr:`deferred`)."""
        self.deferred += 1

    def next_pass(self, instance: PrefillInstance) -> NextPass:
        """Return the pass that a request sent now would be in, behind the requests that were left
        for it at this moment. All calls at this moment return the same object."""
        return self._next_passes.setdefault(instance.id, self.peek(instance))

    def peek(self, instance: PrefillInstance) -> NextPass:
        """Return the same as :meth:`next_pass`, for reading only: no request may be added to it,
        because later calls may return another object."""
        known = self._next_passes.get(instance.id) or self._plain.get(instance.id)
        if known is None:
            known = self._plain[instance.id] = instance.next_pass(self.at.starts_s(instance)[0])
        return known

    def look_at(self, request: Request) -> None:
        """Count a waiting request with those that share its cached prefix, among which the cost of
        recomputing the prefix is divided."""
        if request.hits.best_tokens:
            self._sharing[request.cached_until].add(request.rid)

    def on_dispatched(self, instance: PrefillInstance) -> None:
        """Forget the next pass of an instance for which a batch leaves, because another decision
        follows at the same moment."""
        self._next_passes.pop(instance.id, None)
        self._plain.pop(instance.id, None)

    def is_wanted(self, instance: PrefillInstance) -> bool:
        """Return whether some request costs least at this instance because of its cache."""
        return instance.id in self._wanted

    def is_coming(self, request: Request) -> bool:
        """Return whether a request should wait for a rank that is computing a part of its prefix
        for another request."""
        known = self._coming.get(request.rid, _NOTHING_COMES)
        if request.upcoming != known.upcoming:
            known = _Coming(request.upcoming, self._is_coming(request))
            self._coming[request.rid] = known
        return known.pays

    def _is_coming(self, request: Request) -> bool:
        least_s = self.best_for(request).cost_s
        for coming in request.upcoming:
            at = self._by_id.get(coming.instance)
            gain = coming.tokens - request.hits.best_tokens
            if at is None or gain < TUNING.least_hit_share * at.chunk_tokens:
                continue
            there = self.next_pass(at)
            start_s = max(coming.visible_s, there.start_s)
            if start_s + self.cost_s(request, there, coming.rank, coming.tokens, 0) < least_s:
                # Not now: at the same moment nothing would be decided anew.
                later_s = max(coming.visible_s, self.at.now_s + TUNING.beyond_s)
                self.wake_s = min(self.wake_s, later_s)
                return True
        return False

    def best_for(self, request: Request) -> _Best:
        """Return the best place for a request, on the first instance or one with a part of the
        prompt cached. In the latter case the request is added to that instance's next pass."""
        best = self._best.get(request.rid)
        if best is None:
            hits = request.hits.by_instance
            near = {self._first.id, *hits} & self._by_id.keys()
            best = min([self.best_on(request, self._by_id[name]) for name in near])
            self._best[request.rid] = best
            if best.instance in hits:
                self._wanted.add(best.instance)
                left = request.prompt_tokens - hits[best.instance][best.rank]
                self.next_pass(self._by_id[best.instance]).add(best.rank, left)
        return best

    def best_on(self, request: Request, instance: PrefillInstance) -> _Best:
        """Return the best rank of an instance; the instance's next pass is kept
        (:meth:`next_pass`)."""
        return self._best_in(request, self.next_pass(instance), instance.id)

    def glance(self, request: Request, instance: PrefillInstance) -> _Best:
        """Return the best rank of an instance without keeping its next pass (:meth:`peek`)."""
        return self._best_in(request, self.peek(instance), instance.id)

    def _best_in(self, request: Request, there: NextPass, name: InstanceId) -> _Best:
        costs = [
            (self.cost_s(request, there, d, request.hit_tokens(name, d)), d != there.emptiest, d)
            for d in likely_ranks(there.ahead_tokens, request.hits.by_instance.get(name))
        ]
        best_s, _, rank = min(costs)
        return _Best(there.start_s + best_s, name, rank)

    def cost_s(
        self, request: Request, there: NextPass, rank: int, cached: int, ahead: int | None = None
    ) -> float:
        """Return the seconds from the start of the pass until a request is done on a rank with
        ``cached`` tokens of it, plus the weighted delay of others. Recomputed tokens are cached
        there afterwards, so their cost is divided among the requests that share them. ``ahead``:
        charged tokens ahead of it; None: those of ``there``."""
        done_s = there.done_s(rank, request.prompt_tokens - cached, cached, ahead)
        again = request.prompt_tokens - cached - request.uncached_tokens
        if not again:
            return done_s
        formula, ranks = there.formula, len(there.ahead_tokens)
        attention_s = formula.rank_s(0, attention_pairs(again, cached))
        again_s = (formula.slope_s() * again + attention_s) / ranks
        sharing = self._sharing.get(request.cached_until, ())
        return done_s + self._weight * again_s / max(1, len(sharing))


def rank_by_affinity(
    view: View, passes: Sequence[OpenPass], last: CacheAffinity | None
) -> CacheAffinity:
    """Return the ranking of instances by cached prefixes at this moment (step 4 of a decision).
    That is ``last``, updated, if it is of the same moment, because all batches that leave at one
    moment share it."""
    learned, waiting_tokens = view.learned, view.queue.tokens
    first = passes[0].instance if passes else view.instances[0]
    if last is None or last.at.now_s != view.at.now_s:
        load = learned.offered.load_with(waiting_tokens)
        last = CacheAffinity(view.at, learned.lineup.by_id, first, load=load)
    last.starts_with(first)
    return last


class BatchAffinity:
    """Decides by cached prefixes which requests belong in a batch that is tried for an instance,
    and on which rank."""

    def __init__(self, moment: CacheAffinity, instance: PrefillInstance) -> None:
        self._moment = moment
        self._instance = instance
        self._least_tokens = TUNING.least_hit_share * instance.chunk_tokens
        """No request waits for a prefix of fewer tokens."""
        self._taken: dict[int, list[Request]] = {}
        """Requests in the batch so far, by their first block."""
        self.deferred = 0

    def skip(self, request: Request) -> WaitReason | None:
        """Return why a request should not be in this batch: more of it is cached at another
        instance, or a rank is computing a part of it. None: it belongs in the batch."""
        if not request.blocks:
            return None
        twins = self._taken.setdefault(request.blocks[0], [])
        if self._is_elsewhere(request):
            left = WaitReason.BETTER_ELSEWHERE
        elif self._moment.is_coming(request) or (twins and self._is_taken(request, twins)):
            left = WaitReason.PREFIX_COMING
        else:
            twins.append(request)
            return None
        self.deferred += 1
        self._moment.defer()
        return left

    def better_for(self, request: Request, left: WaitReason) -> Better:
        """Return what a request waits for that was left for this reason: instance, time and gain
        (:data:`Better`)."""
        if left is WaitReason.BETTER_ELSEWHERE:
            return self._elsewhere(request)
        if left is WaitReason.PREFIX_COMING:
            coming = max(request.upcoming, key=lambda upcoming: upcoming.tokens, default=None)
            if coming is not None:
                return coming.instance, coming.visible_s, None
            return self._instance.id, None, None
        return "", None, None

    def is_sooner_on(self, instances: Sequence[PrefillInstance], request: Request) -> bool:
        """Return whether a request is predicted to be done sooner on one of these instances."""
        moment = self._moment
        here_s = moment.glance(request, self._instance).cost_s
        return here_s > min([moment.glance(request, other).cost_s for other in instances])

    def _elsewhere(self, request: Request) -> Better:
        home = self._moment.best_for(request)
        here = self._moment.glance(request, self._instance)
        return home.instance, None, here.cost_s - home.cost_s

    def _is_elsewhere(self, request: Request) -> bool:
        """Return whether a request costs least at another instance that has a part of it cached,
        and that saves enough tokens to wait for."""
        here, moment = self._instance.id, self._moment
        moment.look_at(request)
        gain = request.uncached_tokens_on(here) - request.uncached_tokens
        if gain < self._least_tokens:
            return False
        home = moment.best_for(request).instance
        # Where nothing of it is cached, one instance is as good as the other.
        return home != here and home in request.hits.by_instance

    def rank_of(self, request: Request, capacity: Sequence[int]) -> int | None:
        """Return the rank for a request with a part cached at this instance; None: it should wait.
        ``capacity``: C_avail of the ranks, minus the requests already in the batch."""
        here = self._instance
        hits = request.hits.by_instance[here.id]
        best = self._best_rank(request, hits, capacity)
        need = request.prompt_tokens - hits[best]
        # With most of it cached there, waiting for another pass would only lose its place.
        first_tokens = first_part(paged(need, here.page), here.chunk_tokens)
        if capacity[best] >= first_tokens or hits[best] > need:
            return best
        return None

    def _best_rank(self, request: Request, hits: Sequence[int], capacity: Sequence[int]) -> int:
        """Return the rank where a request would cost least; of equal ones the emptiest."""
        here = self._instance
        there = self._moment.next_pass(here)
        ahead = [here.chunk_tokens - free for free in capacity]

        def cost(d: int) -> tuple[float, float]:
            done_s = self._moment.cost_s(request, there, d, hits[d], ahead[d])
            if fetch_s := request.fetch_tokens(here.id, d) * TUNING.fetch_token_s:
                # Passes begin without the request until what it fetches is there.
                pass_s = here.next_pass_s()
                done_s += math.ceil(fetch_s / pass_s) * pass_s if here.passes else fetch_s
            return done_s, -capacity[d]

        return min(likely_ranks(ahead, hits, request.hits.to_fetch.get(here.id)), key=cost)

    def _is_taken(self, request: Request, twins: Sequence[Request]) -> bool:
        """Return whether a request should be in the next batch instead, which will find a prefix
        cached that a request of this batch (``twins``) computes."""
        moment = self._moment
        here = moment.next_pass(self._instance)
        least_s = moment.best_on(request, self._instance).cost_s
        most = (request.prompt_tokens - 1) // request.block_tokens
        for twin in twins[: TUNING.most_twins]:
            tokens = shared_blocks(request.blocks, twin.blocks, most) * request.block_tokens
            gain = tokens - request.hits.best_tokens
            if gain >= self._least_tokens:
                rank = here.emptiest
                after_s = here.start_s + here.done_s(rank, twin.prompt_tokens, ahead=0)
                if after_s + moment.cost_s(request, here, rank, tokens, 0) < least_s:
                    return True
        return False


class ForecastAffinity(BatchAffinity):
    """A :class:`BatchAffinity` for decisions in which a forecast (:class:`.Forecast`) has already
    chosen each request's instance and rank (``homes``)."""

    def __init__(
        self,
        moment: CacheAffinity,
        instance: PrefillInstance,
        homes: Mapping[str, Home],
        costs_s: Mapping[str, Mapping[InstanceId, float]],
    ) -> None:
        super().__init__(moment, instance)
        self._homes = homes
        self._costs_s = costs_s

    def skip(self, request: Request) -> WaitReason | None:
        return super().skip(request) if self._is_here(request) else WaitReason.BETTER_ELSEWHERE

    def _is_here(self, request: Request) -> bool:
        home = self._homes.get(request.rid)
        return home is not None and home.instance == self._instance.id

    def _is_elsewhere(self, request: Request) -> bool:
        self._moment.look_at(request)
        return False

    def _elsewhere(self, request: Request) -> Better:
        home = self._homes.get(request.rid)
        if home is None:
            return super()._elsewhere(request)
        costs_s = self._costs_s[request.rid]
        home_s = costs_s[home.instance]
        return home.instance, None, costs_s.get(self._instance.id, home_s) - home_s

    def _best_rank(self, request: Request, hits: Sequence[int], capacity: Sequence[int]) -> int:
        if self._is_here(request):
            return self._homes[request.rid].rank
        return super()._best_rank(request, hits, capacity)
