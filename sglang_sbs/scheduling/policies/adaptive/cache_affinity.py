"""What a cached prefix is worth when a batch is formed for one instance.

A :class:`CacheAffinity` belongs to one moment. Each batch that is tried at that moment has a
:class:`BatchAffinity`.

A rank is judged by when the request would be done there (:class:`.NextPass`), plus what its
computation costs others. ``x`` uncached tokens take ``x * slope / dp`` of an instance's time, and
their attention likewise. That delays every request that arrives while the instance catches up, and
more so at a higher load. So an idle cluster computes prefixes again, and a busy one waits for them.
All requests that share a prefix share the price of having it in one more place. No request waits
for less than ``Tuning.least_hit_share`` of a chunk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.paging import paged
from sglang_sbs.scheduling.policies.adaptive.lineup import Moment
from sglang_sbs.scheduling.policies.adaptive.pass_forecast import Home
from sglang_sbs.scheduling.policies.pbaa import first_part
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.completion import NextPass, attention_pairs, likely_ranks
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.prefix.places import Hits, Upcoming, shared_blocks
from sglang_sbs.scheduling.reasons import WaitReason
from sglang_sbs.scheduling.request import Request

Better = tuple[InstanceId, float | None, float | None]
"""Where a request waits for a pass, until when (the scheduler's clock), and how much less it is
predicted to cost there, seconds. Empty and None: unknown."""


class _Best(NamedTuple):
    """Where a request costs least, for itself and others, seconds."""

    cost_s: float
    instance: InstanceId
    rank: int


class CacheAffinity:
    """Where requests are best off at one moment, for all batches that are tried then."""

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
            by_id: all instances.
            first: see :meth:`starts_with`.
            load: share of the cluster's time in use, below 1, with what waits for a batch.
        """
        self.at = at
        self._by_id = by_id
        self._first = first
        self._weight = TUNING.again_weight * load**2 / (1 - load)
        self._next_passes: dict[InstanceId, NextPass] = {}
        self._best: dict[str, _Best] = {}
        self._wanted: set[InstanceId] = set()
        self._coming: dict[str, tuple[Sequence[Upcoming], bool]] = {}
        self.wake_s = math.inf
        """When something will be cached that a request waits for."""
        self._sharing: Counter[int | None] = Counter()
        """Requests that were looked at, by the prefix they share."""
        self._looked_at: set[str] = set()
        self._elsewhere: dict[str, Hits] = {}
        """Requests that were left for an instance that has some of them, and what was cached then.
        While that is so, each instance that has nothing of such a request leaves it."""
        self.deferred = 0
        """How often a request was left for another instance, or for one that computes the same."""

    def starts_with(self, first: PrefillInstance) -> None:
        """``first``: the instance that starts first of those that the next batch could go to."""
        self._first = first

    def defer(self) -> None:
        """A request was left, see :attr:`deferred`."""
        self.deferred += 1

    def leave(self, request: Request) -> None:
        """A request was left for an instance that has some of it cached."""
        self._elsewhere[request.rid] = request.hits

    def is_left(self, request: Request) -> bool:
        """Whether a request was left so, and nothing else of it has been cached since."""
        return self._elsewhere.get(request.rid) is request.hits

    def next_pass(self, instance: PrefillInstance, *, keep: bool = True) -> NextPass:
        """The pass that a request sent now would be in, behind the requests that were left for it
        at this moment. ``keep``: every later question at this moment gets the same object."""
        found = self._next_passes.get(instance.id)
        if found is None:
            found = instance.next_pass(self.at.starts_s(instance)[0])
            if keep:
                self._next_passes[instance.id] = found
        return found

    def look_at(self, request: Request) -> None:
        """Count a waiting request with those that share its prefix, if some of it is cached: what
        is computed again of it serves all of them."""
        if request.hits.best_tokens and request.rid not in self._looked_at:
            self._looked_at.add(request.rid)
            self._sharing[request.cached_until] += 1

    def on_dispatched(self, instance: PrefillInstance) -> None:
        """A batch leaves for the instance, and the next one is decided at the same moment."""
        self._next_passes.pop(instance.id, None)

    def is_wanted(self, instance: PrefillInstance) -> bool:
        """Whether a request waits for the instance."""
        return instance.id in self._wanted

    def is_coming(self, request: Request) -> bool:
        """Whether a request should wait for a rank that is computing some of it for another one."""
        if not request.upcoming:
            return False
        known = self._coming.get(request.rid)
        if known is None or known[0] != request.upcoming:
            known = self._coming[request.rid] = request.upcoming, self._is_coming(request)
        return known[1]

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
        """The best of the first instance and those that have some of the prompt cached."""
        best = self._best.get(request.rid)
        if best is None:
            hits = request.hits.by_instance
            others = (hits.keys() & self._by_id.keys()) - {self._first.id}
            near = [self._first, *[self._by_id[name] for name in others]]
            best = self._best[request.rid] = min([self.best_on(request, coming) for coming in near])
            if best.instance in hits:
                self._wanted.add(best.instance)
                left = request.prompt_tokens - hits[best.instance][best.rank]
                self.next_pass(self._by_id[best.instance]).add(best.rank, left)
        return best

    def best_on(self, request: Request, instance: PrefillInstance, *, keep: bool = True) -> _Best:
        """The best rank of an instance. ``keep``: see :meth:`next_pass`."""
        there = self.next_pass(instance, keep=keep)
        hits = request.hits.by_instance.get(instance.id)
        costs = [
            (self.cost_s(request, there, d, 0 if hits is None else hits[d]), d != there.emptiest, d)
            for d in likely_ranks(there.ahead_tokens, hits)
        ]
        best_s, _, rank = min(costs)
        return _Best(there.start_s + best_s, instance.id, rank)

    def cost_s(
        self, request: Request, there: NextPass, rank: int, cached: int, ahead: int | None = None
    ) -> float:
        """The time from the start of the pass until a request is done on a rank, plus the cost of
        that to others. Tokens that are computed again are cached there afterwards, so all requests
        that share them pay a part. ``ahead``: see :meth:`.NextPass.done_s`."""
        done_s = there.done_s(rank, request.prompt_tokens - cached, cached, ahead)
        again = request.prompt_tokens - cached - request.uncached_tokens
        if not again:
            return done_s
        formula, ranks = there.formula, len(there.ahead_tokens)
        attention_s = formula.rank_s(0, attention_pairs(again, cached))
        again_s = (formula.slope_s() * again + attention_s) / ranks
        return done_s + self._weight * again_s / max(1, self._sharing[request.cached_until])


class BatchAffinity:
    """The batch that is tried for one instance."""

    def __init__(self, moment: CacheAffinity, instance: PrefillInstance) -> None:
        self._moment = moment
        self._instance = instance
        self._least_tokens = TUNING.least_hit_share * instance.chunk_tokens
        """No request waits for less."""
        self._taken: dict[int, list[Request]] = {}
        """Requests in the batch, by their first block."""
        self.deferred = 0

    def hits_of(self, request: Request) -> Sequence[int] | None:
        """L_hit(r, d) on the ranks of the instance; None if they have nothing of it."""
        return request.hits.by_instance.get(self._instance.id)

    def skip(self, request: Request) -> WaitReason | None:
        """Why a request should not be in this batch: it waits for an instance where more of it is
        cached, or for a rank that is computing some of it. None: it belongs here."""
        if not request.blocks:
            return None
        twins = self._taken.setdefault(request.blocks[0], [])
        left = self._waits_for(request, twins)
        if left is not None:
            self.deferred += 1
            self._moment.defer()
        elif len(twins) < TUNING.most_twins:
            twins.append(request)
        return left

    def better_for(self, request: Request, left: WaitReason) -> Better:
        """What a request waits for that was left for this reason."""
        if left is WaitReason.BETTER_ELSEWHERE:
            return self._elsewhere(request)
        if left is WaitReason.PREFIX_COMING:
            coming = max(request.upcoming, key=lambda upcoming: upcoming.tokens, default=None)
            if coming is not None:
                return coming.instance, coming.visible_s, None
            return self._instance.id, None, None
        return "", None, None

    def is_sooner_on(self, instances: Sequence[PrefillInstance], request: Request) -> bool:
        """Whether a request is predicted to be done sooner on one of these instances."""
        moment = self._moment
        here_s = moment.best_on(request, self._instance, keep=False).cost_s
        return here_s > min([moment.best_on(request, x, keep=False).cost_s for x in instances])

    def _elsewhere(self, request: Request) -> Better:
        home = self._moment.best_for(request)
        here = self._moment.best_on(request, self._instance, keep=False)
        return home.instance, None, here.cost_s - home.cost_s

    def _waits_for(self, request: Request, twins: Sequence[Request]) -> WaitReason | None:
        if self._is_elsewhere(request):
            return WaitReason.BETTER_ELSEWHERE
        if self._moment.is_coming(request) or (twins and self._is_taken(request, twins)):
            return WaitReason.PREFIX_COMING
        return None

    def _is_elsewhere(self, request: Request) -> bool:
        """Whether a request is better off at another instance, which has some of it cached."""
        here, moment, hits = self._instance.id, self._moment, request.hits
        holds_none = here not in hits.by_instance and hits.best_tokens >= self._least_tokens
        if holds_none and moment.is_left(request):
            return True
        moment.look_at(request)
        gain = request.uncached_tokens_on(here) - request.uncached_tokens
        if gain < self._least_tokens:
            return False
        home = moment.best_for(request).instance
        # Where nothing of it is cached, one instance is as good as the other.
        is_better = home != here and home in hits.by_instance
        if is_better:
            moment.leave(request)
        return is_better

    def rank_of(self, request: Request, capacity: Sequence[int]) -> int | None:
        """The rank for a request of which the instance has some cached; None: it should wait.
        ``capacity``: C_avail of the ranks, after what the batch holds already."""
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
        """The rank where a request would be done first, and the emptiest of equal ones."""
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
        """Whether a request should be in the batch after this one, which finds what this one
        computes."""
        moment = self._moment
        here = moment.next_pass(self._instance)
        least_s = moment.best_on(request, self._instance).cost_s
        most = (request.prompt_tokens - 1) // request.block_tokens
        for twin in twins:
            tokens = shared_blocks(request.blocks, twin.blocks, most) * request.block_tokens
            gain = tokens - request.hits.best_tokens
            if gain >= self._least_tokens:
                rank = here.emptiest
                after_s = here.start_s + here.done_s(rank, twin.prompt_tokens, ahead=0)
                if after_s + moment.cost_s(request, here, rank, tokens, 0) < least_s:
                    return True
        return False


class ForecastAffinity(BatchAffinity):
    """The same where a forecast has decided where each request goes."""

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
        here_s = costs_s.get(self._instance.id)
        gain_s = None if here_s is None else here_s - costs_s[home.instance]
        return home.instance, None, gain_s

    def _best_rank(self, request: Request, hits: Sequence[int], capacity: Sequence[int]) -> int:
        if self._is_here(request):
            return self._homes[request.rid].rank
        return super()._best_rank(request, hits, capacity)
