"""Results of a simulation: its requests and its passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.wire.balance import active_ranks, max_over_mean


@dataclass(slots=True)
class RequestRecord:
    """Result of one request; times in simulated seconds, NaN: did not happen."""

    rid: str
    prompt_tokens: int
    arrived_s: float
    index: int = -1
    submitted_tokens: int = 0
    """Prompt length submitted to the scheduler."""
    dispatched_s: float = math.nan
    """Dispatch time of the last attempt; the next six fields are of the last attempt as well."""
    prefilled_s: float = math.nan
    prefill: tuple[str, int] | None = None
    decode: tuple[str, int] | None = None
    predicted_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the cache of the request's prefill rank, in any tier."""
    loaded_tokens: int = 0
    """Part of ``cached_tokens`` that was in host memory."""
    fetched_tokens: int = 0
    """Part of ``cached_tokens`` that was fetched from storage for this request."""
    decode_cached_tokens: int = 0
    """Prompt tokens found in the cache of the request's decode rank, and not sent there."""
    ended_s: float = math.nan
    """Time of the last token of the answer, or when the router gave up the request."""
    recomputed_tokens: int = 0
    """Tokens in full blocks that the request had to compute although some rank of the cluster had
    computed them before; its other computed tokens are new."""
    refused: str | None = None
    attempts: int = 0
    excluded: tuple[str, ...] = ()
    """Names of the instances on which the request failed."""
    reserved: bool = False
    """True: decode has reserved KV for the request."""
    ends: int = 0

    @property
    def ttft_s(self) -> float:
        """Time from arrival until the first token (the end of the prefill plus
        ``first_token_s``)."""
        return self.prefilled_s - self.arrived_s


class SimulatedPass(NamedTuple):
    instance: str
    start_s: float
    end_s: float
    rank_tokens: tuple[int, ...]
    """Tokens of each participating DP rank."""

    @property
    def tokens(self) -> int:
        return sum(self.rank_tokens)

    @property
    def active_ranks(self) -> int:
        return active_ranks(self.rank_tokens)

    @property
    def max_over_mean(self) -> float:
        return max_over_mean(self.rank_tokens)


@dataclass(slots=True)
class PoolRecord:
    requests: int
    decisions_s: Sequence[float]
    """CPU time of each event in its scheduler: measured, not simulated."""
    duration_s: float


@dataclass(slots=True)
class Outcome:
    requests: list[RequestRecord] = field(default_factory=list)
    passes: list[SimulatedPass] = field(default_factory=list)
    """Passes in order of their ends."""
    queued_passes: int = 0
    """Number of passes handed to the device while another ran (overlap)."""
    bootstrap_waits: int = 0
    """Number of dispatches that reached their ranks before decode had room for them."""
    retries: int = 0
    """Attempts after the first, over all requests."""
    duration_s: float = 0.0
    arrivals: list[Arrival] = field(default_factory=list)
    """Arrivals by the index of their requests."""
    history: Sequence[int] = ()
    """Names of the blocks that were in storage before the first arrival."""
    pools: list[PoolRecord] = field(default_factory=list)
    """Results by pool; only with ``--pools``."""

    def decode_balance(self, requests: Sequence[RequestRecord], ranks: int) -> tuple[float, float]:
        """Return the largest batch and KV load (prompts and answers) of a decode rank divided by
        the means, averaged over the time in which ``requests`` arrive and run."""
        changes: list[tuple[float, int, int, int]] = []
        for request in requests:
            if request.decode is not None and not math.isnan(request.ended_s):
                tokens = request.prompt_tokens + self.arrivals[request.index].output_tokens
                rank = request.decode[1]
                changes += [
                    (request.prefilled_s, rank, 1, tokens),
                    (request.ended_s, rank, -1, -tokens),
                ]
        batch, kv_tokens = [0] * ranks, [0] * ranks
        busy_s, sums = 0.0, [0.0, 0.0]
        before_s, last_s = math.inf, max((request.arrived_s for request in requests), default=0.0)
        for at_s, rank, count, tokens in sorted(changes):
            if before_s < at_s <= last_s and any(batch):
                busy_s += at_s - before_s
                sums[0] += (at_s - before_s) * max_over_mean(batch)
                sums[1] += (at_s - before_s) * max_over_mean(kv_tokens)
            batch[rank] += count
            kv_tokens[rank] += tokens
            before_s = at_s
        return (sums[0] / busy_s, sums[1] / busy_s) if busy_s else (math.nan, math.nan)


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN without values."""
    return sum(values) / len(values) if values else math.nan


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values; NaN without values."""
    return ordered[int(share * len(ordered))] if ordered else math.nan
