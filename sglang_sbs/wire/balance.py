"""How evenly a prefill pass is spread over DP ranks: the figures that engines' people compare.
Passes are given as extend tokens per DP rank. A pass without tokens on any rank is none."""

from __future__ import annotations

from collections.abc import Sequence


def active_ranks(tokens: Sequence[int]) -> int:
    """DP ranks with tokens in the pass; the others only keep them company at the barrier."""
    return sum(one > 0 for one in tokens)


def max_over_mean(tokens: Sequence[int]) -> float:
    """Tokens of the heaviest rank over the mean of all ranks: 1 is perfect balance, the number of
    ranks is a pass that one rank makes alone. The pass has tokens."""
    return max(tokens) * len(tokens) / sum(tokens)
