"""Measures how evenly a prefill pass is spread over DP ranks. A pass is given as the extend tokens
of each DP rank, at least one of them above 0."""

from __future__ import annotations

from collections.abc import Sequence


def active_ranks(tokens: Sequence[int]) -> int:
    """Return the number of DP ranks with tokens; the others only wait at the barrier."""
    return sum(rank_tokens > 0 for rank_tokens in tokens)


def max_over_mean(tokens: Sequence[int]) -> float:
    """Return the tokens of the heaviest rank over the mean of all ranks. 1 is perfect balance. If
    one rank computes the whole pass, the result is the number of ranks."""
    return max(tokens) * len(tokens) / sum(tokens)
