"""What a cached prefix is worth when a batch is formed for one instance.

Owns the choice between computing a prefix again and waiting for where it is cached, among instances
and among the DP ranks of one. Must not know the queue, the trigger or how hits are found.

Each rank is judged by when the request would be done there, plus what its computation costs others:
``x`` uncached tokens take ``x * slope / dp`` of an instance's time (and their attention likewise),
which delays everybody who waits for that instance and, at load ``rho``, ``1 / (1 - rho)`` requests
that are still to come. So prefixes are computed again on an idle cluster, and rather waited for
when a queue would pay for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_sbs.scheduling.pbaa import first_part
from sglang_sbs.scheduling.prefill_instance import PrefillInstance
from sglang_sbs.scheduling.prefix_index import shared_blocks
from sglang_sbs.scheduling.request import Request

RECOMPUTE_WEIGHT = 3.0
"""A second of computing again counts as so many: it is one rank's, and the barrier makes the others
wait for it. From replays of the Mooncake conversation trace (docs/cache.md): 1 to 30 differ by some
percent of the mean TTFT, less computes more tokens twice."""


class CacheAffinity:
    """For one decision about one instance."""

    def __init__(
        self,
        instance: PrefillInstance,
        instances: Sequence[PrefillInstance],
        start_of: Callable[[PrefillInstance], float],
        *,
        load: float,
        waiting: int,
    ) -> None:
        """
        Args:
            instance: the one a batch is formed for.
            instances: all there are.
            start_of: predicted start of the pass a batch sent there now would be in.
            load: share of the cluster's time that is in use, below 1.
            waiting: requests that wait for a batch.
        """
        self._instance = instance
        self._instances = instances
        self._start_of = start_of
        self._delayed = 1 / (1 - load) + waiting / len(instances)
        self._promised: dict[tuple[str, int], int] = {}
        """Tokens of requests that were told to wait for a rank, in this decision."""
        self._taken: dict[int, list[Request]] = {}
        """Requests in this batch, by their first block."""
        self.wake_s: float | None = None
        """When something will be cached that a request was told to wait for."""

    def hits_of(self, request: Request) -> Sequence[int] | None:
        """L_hit(r, d) on the ranks of the instance; None if they have nothing of it."""
        return request.hits.by_instance.get(self._instance.id)

    def belongs_here(self, request: Request) -> bool:
        """Whether it should be in this batch, rather than wait for where more of it is cached, or
        for somebody who is computing the same.
        """
        if not request.blocks:
            return True
        here = self._instance
        twins = self._taken.get(request.blocks[0], ())
        elsewhere = request.uncached_tokens_on(here.id) > request.uncached_tokens
        if (elsewhere or twins or request.upcoming) and self._sooner_elsewhere(request, twins):
            return False
        self._taken.setdefault(request.blocks[0], []).append(request)
        return True

    def _sooner_elsewhere(self, request: Request, twins: Sequence[Request]) -> bool:
        hits = request.hits.by_instance
        here = self._instance
        least_s, _ = self._best(request, here, hits.get(here.id))
        for other in self._instances:
            of_other = hits.get(other.id)
            if other is here or of_other is None:
                continue
            other_s, rank = self._best(request, other, of_other)
            if other_s < least_s:
                key = (other.id, rank)
                left = request.prompt_tokens - of_other[rank]
                self._promised[key] = self._promised.get(key, 0) + left
                return True
        cached_tokens = request.prompt_tokens - request.uncached_tokens
        for twin in twins:
            # It will be found in the pass after this one.
            most = (request.prompt_tokens - 1) // request.block_tokens
            tokens = shared_blocks(request.blocks, twin.blocks, most) * request.block_tokens
            if tokens > cached_tokens:
                after_s = self._start_of(here) + self._pass_s(twin, here)
                if after_s + self._done_s(request, here, tokens, 0) < least_s:
                    return True
        by_id = {instance.id: instance for instance in self._instances}
        for one in request.upcoming:
            at = by_id.get(one.instance)
            if at is not None and one.tokens > cached_tokens:
                start_s = max(one.visible_s, self._start_of(at))
                if start_s + self._done_s(request, at, one.tokens, 0) < least_s:
                    known = (one.visible_s, self.wake_s)
                    self.wake_s = min(time_s for time_s in known if time_s is not None)
                    return True
        return False

    def rank_of(self, request: Request, capacity: Sequence[int]) -> int | None:
        """The rank of the instance for a request of which it has something; None: none now.

        ``capacity``: C_avail of the ranks, after what the batch holds already.
        """
        here = self._instance
        hits = request.hits.by_instance[here.id]
        backlog = [here.chunk_tokens - free for free in capacity]
        ranks = range(here.dp_size)
        best = min(ranks, key=lambda d: self._done_s(request, here, hits[d], backlog[d]))
        need = request.prompt_tokens - hits[best]
        # With most of it cached there, waiting for another pass would only lose its place.
        if capacity[best] >= first_part(need, here.chunk_tokens) or hits[best] > need:
            return best
        return None

    def _best(
        self, request: Request, instance: PrefillInstance, hits: Sequence[int] | None
    ) -> tuple[float, int]:
        start_s = self._start_of(instance)
        return min(
            (
                start_s
                + self._done_s(
                    request,
                    instance,
                    0 if hits is None else hits[d],
                    rank.backlog_tokens + self._promised.get((instance.id, d), 0),
                ),
                d,
            )
            for d, rank in enumerate(instance.ranks)
        )

    def _pass_s(self, request: Request, instance: PrefillInstance) -> float:
        """Until its prompt is computed, sent now."""
        uncached = request.uncached_tokens_on(instance.id)
        model = instance.model
        passes = -(-uncached // instance.chunk_tokens)
        fill = min(uncached, instance.chunk_tokens)
        alone_s = model.fixed_s + model.slope_s_per_token() * fill / instance.dp_size
        return passes * max(instance.next_pass_s(), alone_s + model.rank_s_per_token * fill)

    def _done_s(
        self, request: Request, instance: PrefillInstance, cached: int, backlog: int
    ) -> float:
        """From the start of the next pass until it is done, plus what that costs others."""
        model = instance.model
        chunk = instance.chunk_tokens
        uncached = request.prompt_tokens - cached
        attention_s = model.attention_s(uncached * (cached + uncached / 2))
        own_passes = -(-uncached // chunk)
        passes = -(-(backlog + uncached) // chunk)
        fill = min(chunk, backlog + uncached)
        slope_s = model.slope_s_per_token() / instance.dp_size
        pass_s = max(
            instance.next_pass_s(),
            model.fixed_s
            + (model.rank_s_per_token + slope_s) * fill
            + attention_s / max(1, own_passes),
        )
        others_s = (
            RECOMPUTE_WEIGHT * self._delayed * (slope_s * uncached + attention_s / instance.dp_size)
        )
        return passes * pass_s + others_s
