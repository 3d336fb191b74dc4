"""Predicts the forward time of a prefill pass from its tokens per DP rank, learning online.

Owns the fit T = a + b_mean * mean_d(tokens_d) + max_d(b_max * tokens_d + e * pairs_d) and its
error. ``pairs_d`` are the attention pairs of a rank, chunk * (context + chunk / 2) summed over its
prompts: nothing for short prompts, half of the time for the last chunk of a long one. The maximum
is of the sum: the others wait for one rank, whatever it is busy with. Which one that is follows
from the fit so far. Must not know instances, time or which policy asks.
"""

from __future__ import annotations

from collections.abc import Sequence

_FEATURES = 4
_FORGET = 0.98
_WARM_UP = 10
_OUTLIER = 4.0
"""A residual is clipped at this many smoothed absolute errors (GC pause, preemption). The error
itself grows by the clipped residuals, so a lasting change gets through in some tens of passes."""
_RELATIVE_ERROR = 0.05
"""The error counts as at least this share of the prediction when clipping."""
_ERROR_STEP = 0.1
_USUAL_IMBALANCE = 1.1
"""The heaviest rank of a batch, as a multiple of the mean."""


class ForwardModel:
    """Exponentially forgetting ridge regression in units of the default forward time and chunk.

    Before the first pass the prediction is half T_default fixed plus half T_default for a full
    chunk: the shape matters little, only that it is positive and grows.
    """

    def __init__(self, *, t_default_s: float, chunk_tokens: int) -> None:
        self._time_unit_s = t_default_s
        self._token_unit = float(max(1, chunk_tokens))
        prior = (0.5, 0.25, 0.25, 0.0)
        weight = (0.5, 0.1, 0.1, 0.1)
        self._moments = [
            [weight[i] if i == j else 0.0 for j in range(_FEATURES)] for i in range(_FEATURES)
        ]
        self._targets = [weight[i] * prior[i] for i in range(_FEATURES)]
        self._weights: list[float] = list(prior)
        self._learned()
        self.passes = 0
        self.error_s = 0.1 * t_default_s
        """Smoothed absolute prediction error."""

    def slope_s_per_token(self, imbalance: float = _USUAL_IMBALANCE) -> float:
        """Time per mean token of a pass whose heaviest rank has ``imbalance`` times the mean."""
        if imbalance == _USUAL_IMBALANCE:
            return self._usual_slope_s
        return self._slope_s(imbalance)

    def _slope_s(self, imbalance: float) -> float:
        slope = self._weights[1] * imbalance + self._weights[2]
        return max(1e-9, slope * self._time_unit_s / self._token_unit)

    def _learned(self) -> None:
        """Asked far more often than it changes."""
        self.fixed_s = max(0.0, self._weights[0]) * self._time_unit_s
        """a: the time of an empty pass."""
        self._usual_slope_s = self._slope_s(_USUAL_IMBALANCE)

    def predict_s(self, tokens_per_rank: Sequence[int], pairs: Sequence[float] = ()) -> float:
        """Forward time of a pass with these extend tokens on each rank; at least 1 ms.

        ``pairs``: attention pairs of each rank; empty: none.
        """
        features = self._features(tokens_per_rank, pairs)
        value = sum(w * x for w, x in zip(self._weights, features, strict=True))
        return max(1e-3, value * self._time_unit_s)

    def rank_s(self, tokens: float, pairs: float) -> float:
        """What a rank with these tokens and attention pairs adds if the others wait for it."""
        unit = self._token_unit
        own = self._weights[1] * tokens + 2 * self._weights[3] * pairs / unit
        return own / unit * self._time_unit_s

    def pass_s(self, mean_tokens: float, slowest_s: float) -> float:
        """:meth:`predict_s` from the mean over ranks and the largest :meth:`rank_s`."""
        common = self._weights[0] + self._weights[2] * mean_tokens / self._token_unit
        return max(1e-3, common * self._time_unit_s + slowest_s)

    def observe(
        self, tokens_per_rank: Sequence[int], forward_s: float, pairs: Sequence[float] = ()
    ) -> None:
        """Learn from one finished pass."""
        predicted_s = self.predict_s(tokens_per_rank, pairs)
        if self.passes >= _WARM_UP:
            limit_s = _OUTLIER * max(self.error_s, _RELATIVE_ERROR * predicted_s)
            forward_s = min(max(forward_s, predicted_s - limit_s), predicted_s + limit_s)
        self.passes += 1
        self.error_s += _ERROR_STEP * (abs(forward_s - predicted_s) - self.error_s)
        x = self._features(tokens_per_rank, pairs)
        y = forward_s / self._time_unit_s
        for i in range(_FEATURES):
            for j in range(_FEATURES):
                self._moments[i][j] = _FORGET * self._moments[i][j] + x[i] * x[j]
            # Keeps the solution defined when all passes look alike.
            self._moments[i][i] += 1e-4
            self._targets[i] = _FORGET * self._targets[i] + x[i] * y + 1e-4 * self._weights[i]
        self._weights = _non_negative_solution(self._moments, self._targets)
        self._learned()

    def _features(
        self, tokens_per_rank: Sequence[int], pairs: Sequence[float]
    ) -> tuple[float, float, float, float]:
        heaviest, most = max(tokens_per_rank), 0.0
        if pairs:
            _, most, heaviest = max(
                (self.rank_s(mine, of_mine), of_mine, mine)
                for mine, of_mine in zip(tokens_per_rank, pairs, strict=True)
            )
        return (
            1.0,
            heaviest / self._token_unit,
            sum(tokens_per_rank) / len(tokens_per_rank) / self._token_unit,
            2 * most / self._token_unit**2,
        )


def _non_negative_solution(moments: list[list[float]], targets: list[float]) -> list[float]:
    """Solve the normal equations with no negative coefficient (the most negative dropped first)."""
    active = list(range(len(targets)))
    while active:
        solution = _solve(
            [[moments[i][j] for j in active] for i in active], [targets[i] for i in active]
        )
        worst = min(range(len(active)), key=solution.__getitem__)
        if solution[worst] >= 0:
            weights = [0.0] * len(targets)
            for index, value in zip(active, solution, strict=True):
                weights[index] = value
            return weights
        del active[worst]
    return [0.0] * len(targets)


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Gaussian elimination with partial pivoting; the matrix is positive definite and tiny."""
    n = len(vector)
    rows = [[*row, vector[i]] for i, row in enumerate(matrix)]
    for k in range(n):
        pivot = max(range(k, n), key=lambda i: abs(rows[i][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for i in range(k + 1, n):
            factor = rows[i][k] / rows[k][k]
            for j in range(k, n + 1):
                rows[i][j] -= factor * rows[k][j]
    solution = [0.0] * n
    for k in reversed(range(n)):
        rest = sum(rows[k][j] * solution[j] for j in range(k + 1, n))
        solution[k] = (rows[k][n] - rest) / rows[k][k]
    return solution
