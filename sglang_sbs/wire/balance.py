"""Measures how evenly a prefill pass is spread over DP ranks. Passes are given as extend tokens per
DP rank and have tokens on at least one rank."""

from __future__ import annotations

from collections.abc import Sequence


def active_ranks(tokens: Sequence[int]) -> int:
    """Return the number of DP ranks with tokens; the others only wait at the barrier."""
    return sum(rank_tokens > 0 for rank_tokens in tokens)


def max_over_mean(tokens: Sequence[int]) -> float:
    """Return the tokens of the heaviest rank over the mean of all ranks: 1 is perfect balance, and
    the number of ranks means that one rank computes the whole pass."""
    return max(tokens) * len(tokens) / sum(tokens)
