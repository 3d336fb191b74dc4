"""Forecasts the contents of a prefill instance's next passes, and the cost of one more request
there.

Why
---
With prompts of several chunks, dividing the queue by tokens is not enough. The rank with the most
attention pairs sets the length of a pass. So short prompts that share passes with the last chunks
of a long one wait for seconds, though another instance would have computed them in a fraction of
that. A long prompt makes as many passes of its instance longer as it has chunks, and does least
harm where passes are long anyway.

A rank computes its prompts first come first served, a chunk per pass. So the requests at a rank
determine which pass computes which part of which prompt, and the forward model predicts the lengths
of the passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import islice
from typing import NamedTuple

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.paging import paged
from sglang_sbs.scheduling.policies.idle_turns import whose_turn
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.completion import PassFormula, attention_pairs, cut, likely_ranks
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.request import Request


class Home(NamedTuple):
    instance: InstanceId
    rank: int


class Terms(NamedTuple):
    """Weights in the cost of a request (:meth:`PassForecast.cost_s`)."""

    waiting_per_s: float = 0.0
    """Requests per second that are expected at the instance and wait for the end of a pass."""
    pass_s: float = 0.0
    """Mean length of a pass, in seconds. A longer pass delays at least the requests that arrive in
    this time."""
    again_weight: float = 0.0
    """Weight of a second in which tokens are recomputed that another rank has cached."""
    impatience: float = 1.0
    """Weight of a second until the request's own completion, the same at every instance."""


class _FuturePass:
    """Predicted contents and length of a pass that has not started."""

    __slots__ = ("ends", "length_s", "owner", "pairs", "slowest_s", "tokens", "tokens_per_rank")

    def __init__(self, dp_size: int, owner: object) -> None:
        self.owner = owner
        """The forecast that may change this object; others copy it first."""
        self.tokens_per_rank = [0] * dp_size
        self.pairs = [0.0] * dp_size
        self.tokens = 0
        """Tokens in the pass, all ranks together."""
        self.slowest_s = 0.0
        """Seconds of the rank that the others wait for (:meth:`.PassFormula.rank_s`)."""
        self.ends = 0.0
        """Sum of the weights of the prompts that end in it."""
        self.length_s = 0.0

    def copy(self, owner: object) -> _FuturePass:
        forecast = _FuturePass.__new__(_FuturePass)
        forecast.owner = owner
        forecast.tokens_per_rank, forecast.pairs = self.tokens_per_rank.copy(), self.pairs.copy()
        forecast.tokens, forecast.slowest_s = self.tokens, self.slowest_s
        forecast.ends, forecast.length_s = self.ends, self.length_s
        return forecast

    def with_s(
        self, formula: PassFormula, rank: int, tokens: int, pairs: float, load_s: float
    ) -> tuple[float, float]:
        """Return the length of the pass with more tokens and attention pairs on a rank, and then
        the time of its slowest rank, in seconds. ``load_s``: time to load fetched KV to the
        device."""
        own_s = load_s + formula.rank_s(
            self.tokens_per_rank[rank] + tokens, self.pairs[rank] + pairs
        )
        slowest_s = max(own_s, self.slowest_s)
        mean_tokens = (self.tokens + tokens) / len(self.pairs)
        return formula.pass_s(mean_tokens, slowest_s), slowest_s

    def add(
        self, formula: PassFormula, rank: int, tokens: int, pairs: float, load_s: float
    ) -> None:
        self.length_s, self.slowest_s = self.with_s(formula, rank, tokens, pairs, load_s)
        self.tokens_per_rank[rank] += tokens
        self.pairs[rank] += pairs
        self.tokens += tokens


class PassForecast:
    """Forecast of an instance's passes, beginning with the next one that starts."""

    def __init__(self, instance: PrefillInstance) -> None:
        """Forecast the passes that compute the requests now at the instance. To add further
        requests, use a :meth:`fork`."""
        self.instance = instance
        self.version = instance.ranks.version
        self._start_s = 0.0
        self._passes: list[_FuturePass] = []
        self._empty = _FuturePass(instance.dp_size, None)
        self._ahead: list[int] = []
        """Charged tokens per rank ahead of the next request, with the unused tokens of passes that
        are full by their number of requests."""
        self._requests = [0] * instance.dp_size
        """Number of requests per rank in the pass in which a further request would begin."""
        for index, rank in enumerate(instance.ranks):
            left = rank.backlog_tokens
            self._ahead.append(0)
            for prompt in rank.prompts.values():
                part = min(left, prompt.left_tokens)
                if part > 0:
                    self._lay(index, part, prompt.context_tokens, self._weight_of(prompt.tokens))
                    left -= part
            if left > 0:
                self._lay(index, left, 0, 1.0)

    def fork(self, start_s: float, *, closed: bool) -> PassForecast:
        """Return a copy to which requests can be added. ``start_s``: start of the next pass.
        ``closed``: that pass cannot take requests sent now."""
        forked = PassForecast.__new__(PassForecast)
        forked.instance, forked.version, forked._start_s = self.instance, self.version, start_s
        forked._passes, forked._requests = self._passes.copy(), self._requests.copy()
        forked._empty = self._empty
        forked._ahead = self._ahead.copy()
        if closed and forked._passes:
            forked._ahead = [max(ahead, self.instance.chunk_tokens) for ahead in forked._ahead]
        return forked

    @property
    def idle(self) -> bool:
        """Whether the instance is idle, and no request was added to this forecast."""
        return self.instance.idle and not self._passes

    @property
    def full(self) -> bool:
        """Whether the next pass has no room for a further request on any rank."""
        return min(self._ahead) >= self.instance.chunk_tokens

    def cost_s(self, request: Request, terms: Terms) -> float:
        """Return the cost of a request on its best rank, in weighted seconds: the time until it is
        computed, the delay of others, and recomputed tokens (``terms``)."""
        return min([self._cost_on_s(request, rank, terms) for rank in self._ranks_for(request)])

    def _ranks_for(self, request: Request) -> set[int]:
        name, hits = self.instance.id, request.hits
        return likely_ranks(self._ahead, hits.by_instance.get(name), hits.to_fetch.get(name))

    def _begins_at(self, rank: int, fetched: int) -> tuple[int, float]:
        """Return the tokens ahead of a request on a rank that first fetches a part of the prompt
        from storage, and the seconds that the fetch takes beyond all forecast passes. ``fetched``:
        tokens from storage."""
        at = self._ahead[rank]
        left_s = fetched * TUNING.fetch_token_s
        # A rank begins to fetch when it takes the request in, which is when it forms a pass.
        passes = 0
        while left_s > 0 and passes < len(self._passes):
            left_s -= self._passes[passes].length_s
            passes += 1
        return max(at, passes * self.instance.chunk_tokens), max(0.0, left_s)

    def _cost_on_s(self, request: Request, rank: int, terms: Terms) -> float:
        instance, passes = self.instance, self._passes
        formula, chunk = instance.model.formula, instance.chunk_tokens
        fetched = request.fetch_tokens(instance.id, rank)
        at, fetch_s = self._begins_at(rank, fetched)
        first, known = at // chunk, len(passes)
        done_s = self._start_s + fetch_s + sum([a_pass.length_s for a_pass in passes[:first]])
        ends = sum([a_pass.ends for a_pass in passes[first:]])
        delays_s = 0.0
        load_s = fetched * TUNING.load_token_s
        cached = request.hit_tokens(instance.id, rank)
        uncached = request.prompt_tokens - cached
        waiting_per_s, mean_pass_s = terms.waiting_per_s, terms.pass_s
        if first > known >= TUNING.most_forecast:
            done_s += (first - known) * passes[-1].length_s
        left, context = uncached, cached
        most = max(0, TUNING.most_forecast - first)
        for index, part, pairs in islice(cut(at, uncached, cached, chunk), most):
            a_pass = passes[index] if index < known else self._empty
            length_s, _ = a_pass.with_s(formula, rank, part, pairs, load_s)
            waiting = waiting_per_s * max(length_s, mean_pass_s)
            delays_s += (length_s - a_pass.length_s) * (ends + waiting)
            ends -= a_pass.ends
            done_s += length_s
            load_s = 0.0
            left, context = left - part, context + part
        if left:
            # All passes of the rest are as long as the one in its middle.
            pairs = attention_pairs(chunk, context + max(0, left - chunk) // 2)
            length_s, _ = self._empty.with_s(formula, rank, chunk, pairs, load_s)
            more_s = left / chunk * length_s
            done_s += more_s
            delays_s += more_s * waiting_per_s * max(length_s, mean_pass_s)
        again = uncached - request.uncached_tokens
        again_s = terms.again_weight * again / instance.tokens_per_s
        weight = terms.impatience * self._weight_of(request.uncached_tokens)
        return done_s * weight + delays_s + again_s

    def add(self, request: Request, terms: Terms) -> Home:
        """Add a request on its best rank, and return this instance and the rank."""
        rank = min(self._ranks_for(request), key=lambda d: self._cost_on_s(request, d, terms))
        cached = request.hit_tokens(self.instance.id, rank)
        weight = self._weight_of(request.uncached_tokens)
        fetched = request.fetch_tokens(self.instance.id, rank)
        self._ahead[rank], _ = self._begins_at(rank, fetched)
        self._lay(
            rank, request.prompt_tokens - cached, cached, weight, fetched * TUNING.load_token_s
        )
        return Home(self.instance.id, rank)

    def _weight_of(self, tokens: int) -> float:
        return 1 + TUNING.chunk_weight * ((tokens - 1) // self.instance.chunk_tokens)

    def _lay(
        self, rank: int, tokens: int, context: int, weight: float, load_s: float = 0.0
    ) -> None:
        instance, chunk = self.instance, self.instance.chunk_tokens
        at = self._ahead[rank]
        ahead = at + paged(tokens, instance.page)
        if instance.prefill_max_requests:
            # A request that is cut is the first of the pass that it ends in.
            own = self._requests[rank] if ahead // chunk == at // chunk else 0
            own += ahead % chunk > 0
            if own >= instance.prefill_max_requests:
                ahead, own = (ahead // chunk + 1) * chunk, 0
            self._requests[rank] = own
        self._ahead[rank] = ahead
        most = TUNING.most_forecast
        parts = cut(at, tokens, context, chunk)
        for index, part, pairs in islice(parts, max(0, most - at // chunk)):
            self._own(index).add(instance.model.formula, rank, part, pairs, load_s)
            load_s = 0.0
        last = self._own(min((at + tokens - 1) // chunk, most - 1))
        last.ends += weight

    def _own(self, index: int) -> _FuturePass:
        """Return the pass at this position (0: the next one) for changes. A pass shared with other
        forecasts is copied first."""
        passes = self._passes
        while len(passes) <= index:
            passes.append(_FuturePass(self.instance.dp_size, self))
        if passes[index].owner is not self:
            passes[index] = passes[index].copy(self)
        return passes[index]


def homes(
    nearest: Sequence[InstanceId],
    others: Set[InstanceId],
    forecasts: Mapping[InstanceId, PassForecast],
    requests: Iterable[Request],
    terms_of: Callable[[Request], Terms],
    may_go: Callable[[Request, PrefillInstance], bool],
) -> tuple[dict[str, Home], dict[str, dict[InstanceId, float]]]:
    """Return the place where each request costs least, behind the requests before it and as if all
    left now, and its cost in seconds on each instance that was compared; both by request id.

    Args:
        nearest: instances that any request could go to, best first where they cost the same.
        others: further instances, compared only for requests of which they have a part cached.
        forecasts: forecast of each of these instances; gets the requests added.
        requests: in the order in which they are placed. Once the next passes of ``nearest`` are all
            full, later ones are left out.
        terms_of: weights for a request that shares its prefix with no other.
        may_go: whether a request is allowed on an instance.
    """
    chosen: dict[str, Home] = {}
    costs_s: dict[str, dict[InstanceId, float]] = {}
    near = [forecasts[name] for name in nearest]
    sharing: Counter[int | None] = Counter()
    for request in islice(requests, TUNING.most_planned):
        if all(forecast.full for forecast in near):
            break
        hits = request.hits.by_instance
        holders = sorted(hits.keys() & others, key=lambda name: (-max(hits[name]), name))
        names = [*nearest, *holders[: TUNING.most_holders]]
        allowed = [forecasts[name] for name in names if may_go(request, forecasts[name].instance)]
        if allowed:
            sharing[request.cached_until] += 1
            terms = terms_of(request)
            # Tokens computed again are cached there afterwards, so all that share them pay a part.
            weight = terms.again_weight / sharing[request.cached_until]
            terms = terms._replace(again_weight=weight)
            own_s = {there.instance.id: there.cost_s(request, terms) for there in allowed}
            cheapest = forecasts[min(own_s, key=own_s.__getitem__)]
            costs_s[request.rid] = own_s
            chosen[request.rid] = _in_turn(cheapest, allowed, request).add(request, terms)
    return chosen, costs_s


def _in_turn(
    cheapest: PassForecast, allowed: Iterable[PassForecast], request: Request
) -> PassForecast:
    """Return the cheapest instance's forecast. If that instance is idle, return the next in turn
    among idle ones that have no less of the prompt cached and need not fetch it from storage."""
    if not cheapest.idle:
        return cheapest
    tokens = request.uncached_tokens_on(cheapest.instance.id)

    def is_equal(forecast: PassForecast) -> bool:
        name = forecast.instance.id
        fetches = name in request.hits.to_fetch
        return forecast.idle and not fetches and request.uncached_tokens_on(name) <= tokens

    equal = {
        forecast.instance: forecast
        for forecast in allowed
        if forecast is cheapest or is_equal(forecast)
    }
    return equal[whose_turn([*equal], tokens)]
