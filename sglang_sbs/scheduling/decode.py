"""Choosing decode DP ranks: Algorithm 3 of the paper, and a potential-based alternative.

Owns the rules that map requests to ranks given ⟨B_i, K_i⟩. Pure functions over a list of
:class:`DecodeLoad`, which they update as they assign. Must not know instances, time or admission
beyond "this rank has room".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_sbs.scheduling.request import Request

UNLIMITED = 1 << 62

STEP_PER_REQUEST_MS = 0.195
STEP_PER_TOKEN_MS = 2.7e-5
"""Decode step time per request and per KV token, DeepSeek-V3 kernels on H100 at EP32; only their
ratio matters here. Source: the decode fit described in ``docs/scheduling.md``."""
_POWER = 8


@dataclass(slots=True)
class DecodeLoad:
    """State vector V_i = ⟨B_i, K_i⟩ of one decode DP rank, own dispatches included."""

    running: int
    """B_i, requests."""
    kv_tokens: int
    """K_i, tokens."""
    committed_tokens: int = 0
    """K_i once every own request here has grown to its total length; what admission counts."""
    kv_capacity_tokens: int = UNLIMITED
    max_running: int = UNLIMITED

    def has_room(self, tokens: int) -> bool:
        """Whether the rank can admit a request of this total length; an empty rank always can."""
        return tokens <= self.room_tokens

    @property
    def room_tokens(self) -> int:
        """The largest total length it can admit."""
        if self.running == 0:
            return UNLIMITED
        if self.running >= self.max_running:
            return 0
        return self.kv_capacity_tokens - max(self.kv_tokens, self.committed_tokens)

    def add(self, tokens: int) -> None:
        """Account for one more request of this total length."""
        self.running += 1
        self.kv_tokens += tokens
        self.committed_tokens += tokens


DecodeRuleFunction = Callable[[Request, Sequence[DecodeLoad], Sequence[int]], int]
"""(request, all ranks, indices of feasible ranks) -> index of the chosen rank."""


def percentile(values: Sequence[int], share: float) -> float:
    """Linear-interpolation percentile of unsorted values, ``share`` in [0, 1]."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def outlier_threshold(kv_tokens: Sequence[int], k: float) -> float:
    """Th_outlier = Q3 + k * (Q3 - Q1) over the KV loads of all ranks."""
    q1, q3 = percentile(kv_tokens, 0.25), percentile(kv_tokens, 0.75)
    return q3 + k * (q3 - q1)


def iqr_lexicographic(k: float) -> DecodeRuleFunction:
    """Algorithm 3: mask ranks whose K is an outlier, then the smallest ⟨B, K⟩."""

    def choose(_request: Request, loads: Sequence[DecodeLoad], feasible: Sequence[int]) -> int:
        threshold = outlier_threshold([load.kv_tokens for load in loads], k)
        safe = [i for i in feasible if loads[i].kv_tokens <= threshold] or feasible
        return min(safe, key=lambda i: (loads[i].running, loads[i].kv_tokens, i))

    return choose


def potential(request: Request, loads: Sequence[DecodeLoad], feasible: Sequence[int]) -> int:
    """The rank whose p-norm potential over B and K grows least (p = 8).

    Both terms are relative to the mean load, so the rank that is ahead in either dimension is
    avoided in proportion to what that dimension costs a decode step. Unlike the IQR mask it keeps
    every rank in play.
    """
    n = len(loads)
    mean_b = max(1.0, sum(load.running for load in loads) / n)
    mean_k = max(1.0, sum(load.kv_tokens for load in loads) / n, float(request.total_tokens))

    def growth(i: int) -> float:
        load = loads[i]
        b, b_next = load.running / mean_b, (load.running + 1) / mean_b
        k, k_next = load.kv_tokens / mean_k, (load.kv_tokens + request.total_tokens) / mean_k
        return STEP_PER_REQUEST_MS * mean_b * (
            b_next**_POWER - b**_POWER
        ) + STEP_PER_TOKEN_MS * mean_k * (k_next**_POWER - k**_POWER)

    return min(feasible, key=lambda i: (growth(i), i))


def fewest_requests(_request: Request, loads: Sequence[DecodeLoad], feasible: Sequence[int]) -> int:
    """Decode rule of the least-loaded baselines."""
    return min(feasible, key=lambda i: (loads[i].running, i))


class RoundRobinDecode:
    """Ranks in turn: what SGLang's decode does when nobody chooses (``round_robin``)."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(
        self, _request: Request, loads: Sequence[DecodeLoad], feasible: Sequence[int]
    ) -> int:
        for _ in loads:
            index = self._next % len(loads)
            self._next += 1
            if index in feasible:
                return index
        return feasible[0]


def schedule_decode(
    requests: Sequence[Request],
    loads: Sequence[DecodeLoad],
    choose: DecodeRuleFunction,
    allowed: Callable[[Request, int], bool] = lambda _request, _rank: True,
    admit: bool = True,
) -> dict[str, int]:
    """Assign a batch to decode ranks, longest total length first (fill the valley).

    Args:
        requests: the batch; ``total_tokens`` must be set.
        loads: one per rank; updated with what is assigned.
        choose: the rule that picks among feasible ranks.
        allowed: whether a request may go to the rank with this index at all.
        admit: whether a rank without room is infeasible.

    Returns:
        rid -> index into ``loads``. A request no feasible rank exists for is missing from it.
    """
    assigned: dict[str, int] = {}
    for request in sorted(requests, key=lambda r: -r.total_tokens):
        feasible = [
            i
            for i, load in enumerate(loads)
            if (not admit or load.has_room(request.total_tokens)) and allowed(request, i)
        ]
        if not feasible:
            continue
        best = choose(request, loads, feasible)
        loads[best].add(request.total_tokens)
        assigned[request.rid] = best
    return assigned
