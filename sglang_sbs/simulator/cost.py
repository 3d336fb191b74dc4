"""How long a simulated prefill pass takes.

Owns the cost models. The three named ones agree on balanced passes and differ in who pays for
imbalance; all fit Table 1 of arXiv 2512.16134 (DeepSeek-V3 on H800) read per prefill instance.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class PassCost(msgspec.Struct, frozen=True, kw_only=True):
    """T = fixed_s + mean_s * mean_d(n_d) + max_d(max_s * n_d + pair_s * pairs_d).

    ``n_d``: extend tokens of rank d. ``pairs_d``: causal attention pairs of rank d, the sum over
    its requests of chunk * (context + chunk / 2).
    """

    fixed_s: float
    mean_s: float = 0.0
    """Per token of the mean over ranks."""
    max_s: float = 0.0
    """Per token of the heaviest rank."""
    pair_s: float = 0.0
    """Per attention pair of the heaviest rank."""

    def pass_s(self, tokens: Sequence[int], pairs: Sequence[float]) -> float:
        """Forward time of a pass."""
        slowest = max(self.max_s * n + self.pair_s * p for n, p in zip(tokens, pairs, strict=True))
        return self.fixed_s + self.mean_s * sum(tokens) / len(tokens) + slowest

    def full_chunk_s(self, chunk_tokens: int) -> float:
        """Forward time with a full chunk on every rank, without attention pairs."""
        return self.fixed_s + (self.mean_s + self.max_s) * chunk_tokens


_FIXED_S = 0.0943
_SLOPE_S = 8.01e-5
_PAIR_S = 61 * 2.4e-11

COSTS: dict[str, PassCost] = {
    "table": PassCost(fixed_s=_FIXED_S, mean_s=_SLOPE_S, pair_s=_PAIR_S),
    "mixed": PassCost(
        fixed_s=_FIXED_S, mean_s=_SLOPE_S / 3, max_s=_SLOPE_S * 2 / 3, pair_s=_PAIR_S
    ),
    "barrier": PassCost(fixed_s=_FIXED_S, max_s=_SLOPE_S, pair_s=_PAIR_S),
}
"""``table``: mean-driven. ``mixed``: a third of the slope on the mean, two thirds on the slowest,
as measured kernels split it. ``barrier``: the slowest rank decides (the paper's narrative)."""
