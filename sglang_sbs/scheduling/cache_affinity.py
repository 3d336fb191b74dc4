"""What a cached prefix is worth when a batch is formed for one instance.

Owns the choice between computing a prefix again here and waiting for where it is cached. Must not
know the queue, the trigger or how hits are found.

Computing a prefix again costs the whole cluster time, waiting costs one request time. ``x`` tokens
on one DP rank take ``x * slope / dp`` of its instance, and at load ``rho`` every second of work
delays others by ``1 / (1 - rho)`` in all; against that stands the difference of the two predicted
completion times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_sbs.scheduling.prefill_instance import PrefillInstance
from sglang_sbs.scheduling.request import Request


class CacheAffinity:
    """For one decision about one instance."""

    def __init__(
        self,
        instance: PrefillInstance,
        instances: Sequence[PrefillInstance],
        start_of: Callable[[PrefillInstance], float],
        *,
        load: float,
    ) -> None:
        """
        Args:
            instance: the one a batch is formed for.
            instances: all there are.
            start_of: predicted start of the pass a batch sent there now would be in.
            load: share of the cluster's time that is in use, below 1.
        """
        self._instance = instance
        self._instances = instances
        self._start_of = start_of
        self._load = load
        self._promised: dict[tuple[str, int], int] = {}
        """Tokens of requests that were told to wait for a rank, in this decision."""

    @property
    def spend_tokens(self) -> float:
        """So many tokens may be computed again rather than waiting for the instance's next pass."""
        return self._instance.next_pass_s() / self._cost_s(self._instance)

    def hits_of(self, request: Request) -> Sequence[int] | None:
        """L_hit(r, d) on the ranks of the instance; None if they have nothing of it."""
        return request.hits.by_instance.get(self._instance.id)

    def belongs_here(self, request: Request) -> bool:
        """Whether it should be in this batch, rather than wait for where more of it is cached."""
        hits = request.hits.by_instance
        if not hits:
            return True
        here = self._instance
        uncached = request.uncached_tokens_on(here.id)
        if uncached == request.uncached_tokens:
            return True
        done_s = self._start_of(here) + _passes(uncached, here) * here.next_pass_s()
        for other in self._instances:
            of_other = hits.get(other.id)
            if other is here or of_other is None:
                continue
            cached = max(of_other)
            left = request.prompt_tokens - cached
            if left >= uncached:
                continue
            ahead, rank = min(
                (other.ranks[d].backlog_tokens + self._promised.get((other.id, d), 0), d)
                for d, tokens in enumerate(of_other)
                if tokens == cached
            )
            other_done_s = (
                self._start_of(other) + _passes(ahead + left, other) * other.next_pass_s()
            )
            if other_done_s - done_s < (uncached - left) * self._cost_s(here):
                self._promised[other.id, rank] = self._promised.get((other.id, rank), 0) + left
                return False
        return True

    def _cost_s(self, instance: PrefillInstance) -> float:
        """What one more token on one rank costs everybody."""
        return instance.model.slope_s_per_token() / instance.dp_size / (1 - self._load)


def _passes(tokens: int, instance: PrefillInstance) -> int:
    return -(-tokens // instance.chunk_tokens)
