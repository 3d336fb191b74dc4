"""Learns the length of prefill passes (:class:`.PassFormula`) online, from the tokens and attention
pairs of each DP rank.

The current fit determines which rank the others wait for in a pass.

Selection of passes
-------------------
An engine compiles kernels and captures graphs in its first passes, which then take a hundred times
as long. So the first passes are kept, and after each of them it is decided again which ones the
others contradict; if the answer changes, the fit restarts without those. Later a pass counts as at
most some multiple of the usual error (GC pause, preemption). If nearly all of the last ones were
far off on the same side, the engine's speed has changed, and the fit restarts with these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from sglang_sbs.scheduling.paging import padded
from sglang_sbs.scheduling.prefill.completion import PassFormula

_FEATURES = 4
_PRIOR = (0.5, 0.25, 0.25, 0.0)
_PRIOR_TRUST = (0.5, 0.1, 0.1, 0.1)
"""Weight of each coefficient's prior (``_PRIOR``), in passes."""
_FORGET = 0.98
_WARM_UP = 10
"""Number of first passes that are searched for outliers (kernel compilation, graph capture)."""
_GROSS = 4.0
"""A first pass is an outlier if it took more than this multiple of the time that a fit to the
others predicts."""
_GROSS_FOR_DEFAULT = 10.0
"""The very first pass is an outlier above this multiple of what the prior (T_default) predicts."""
_AGREE = 2.0
"""Several slow first passes are not outliers if one fit predicts each first pass within this
factor."""
_OUTLIER = 4.0
"""Clip the residual of a later pass at this many smoothed absolute errors."""
_RELATIVE_ERROR = 0.05
"""Least error used for clipping residuals, as a share of the predicted time."""
_LAST = 6
_LASTING = 5
_OTHER_SPEED = 1.6
"""A pass is far off if it took more than this multiple of the predicted time, or less than the
inverse; with 30 % of jitter one pass in 17 is. The engine's speed has changed if ``_LASTING`` of
the last ``_LAST`` passes are, all on one side."""
_ERROR_STEP = 0.1
_MOST_FEATURE = 1e5
"""Limit on each feature of a pass, in chunks or, for attention, squares of chunks. Larger ones, of
faulty reports, would leave no digits for the others in the fit."""

_Features = tuple[float, float, float, float]


class _Observed(NamedTuple):
    tokens_per_rank: tuple[int, ...]
    forward_s: float
    pairs: tuple[float, ...]


class ForwardModel:
    """Predicts forward times by exponentially forgetting ridge regression, in units of the default
    forward time and chunk. By the prior a pass takes half of T_default, plus half for full
    chunks."""

    def __init__(self, *, t_default_s: float, chunk_tokens: int) -> None:
        self._time_unit_s = t_default_s
        self._token_unit = float(max(1, chunk_tokens))
        self._prior: Sequence[float] = _PRIOR
        self._prior_error_s = 0.1 * t_default_s
        self._first: list[_Observed] = []
        """First passes since the fit began."""
        self._believed: list[int] = []
        """Positions in ``_first`` of the passes that are not outliers."""
        self._last: deque[tuple[int, _Observed]] = deque(maxlen=_LAST)
        """The last passes after the warm-up, each with a sign: 1 if it took far longer than
        predicted, -1 if far less, otherwise 0."""
        self.captured_tokens: Sequence[int] = ()
        """Sizes, in tokens, of the engine's captured prefill graphs, to which a pass is padded
        (:func:`.padded`). :attr:`formula` does not pad, because chunks are rarely captured."""
        self.passes = 0
        self._begin()

    def _update_formula(self) -> None:
        fixed, per_rank, per_mean, per_pair = self._fit.weights
        time_s, unit = self._time_unit_s, self._token_unit
        self.formula = PassFormula(
            fixed_s=fixed * time_s,
            mean_s=per_mean * time_s / unit,
            token_s=per_rank * time_s / unit,
            pair_s=2 * per_pair * time_s / unit**2,
        )
        """The current fit in seconds, an immutable snapshot: learning replaces the object."""

    def predict_s(self, tokens_per_rank: Sequence[int], pairs: Sequence[float] = ()) -> float:
        """Return the forward time of a pass with these extend tokens on each rank, at least 1 ms.
        ``pairs``: attention pairs of each rank; empty for none."""
        if self.captured_tokens:
            tokens_per_rank = padded(tokens_per_rank, self.captured_tokens)
        return self.formula.of_ranks_s(tokens_per_rank, pairs)

    def observe(
        self, tokens_per_rank: Sequence[int], forward_s: float, pairs: Sequence[float] = ()
    ) -> None:
        self.passes += 1
        observed = _Observed(tuple(tokens_per_rank), forward_s, tuple(pairs))
        if len(self._first) < _WARM_UP:
            self._first.append(observed)
            self._sift()
            return
        predicted_s = self.predict_s(tokens_per_rank, pairs)
        limit_s = _OUTLIER * max(self.error_s, _RELATIVE_ERROR * predicted_s)
        clipped_s = min(max(forward_s, predicted_s - limit_s), predicted_s + limit_s)
        is_slower = forward_s > _OTHER_SPEED * predicted_s
        is_faster = _OTHER_SPEED * forward_s < predicted_s
        self._last.append((is_slower - is_faster, observed))
        self._learn(observed._replace(forward_s=clipped_s))
        if abs(sum([side for side, _ in self._last])) >= _LASTING:
            self._on_other_speed()

    def _begin(self) -> None:
        """Reset the fit and its error to the prior."""
        self._fit = _Regression(self._prior)
        self.error_s = self._prior_error_s
        """Smoothed absolute prediction error, in seconds."""
        self._update_formula()

    def _learn(self, observed: _Observed) -> None:
        predicted_s = self.predict_s(observed.tokens_per_rank, observed.pairs)
        self.error_s += _ERROR_STEP * (abs(observed.forward_s - predicted_s) - self.error_s)
        features = self._features(observed.tokens_per_rank, observed.pairs)
        self._fit.add(features, observed.forward_s / self._time_unit_s)
        self._fit.solve()
        self._update_formula()

    def _sift(self) -> None:
        """Learn from the newest of the first passes, or from all of them again if the outliers
        changed."""
        believed = self._without_outliers()
        if believed == [*self._believed, len(self._first) - 1]:
            self._learn(self._first[-1])
        elif believed != self._believed:
            self._begin()
            for index in believed:
                self._learn(self._first[index])
        self._believed = believed

    def _without_outliers(self) -> list[int]:
        """Return positions of the first passes without outliers, ascending. A forward search starts
        with the half that is fastest compared with the prior, and adds passes within a multiple of
        the fit until none qualifies. If several are left out and one fit explains all passes, the
        load caused the difference, and all are returned."""
        data = [
            (
                self._features(observed.tokens_per_rank, observed.pairs),
                observed.forward_s / self._time_unit_s,
            )
            for observed in self._first
        ]
        prior = _Regression(self._prior)
        order = sorted(
            range(len(data)), key=lambda i: data[i][1] / max(1e-6, prior.value(data[i][0]))
        )
        believed = set(order[: len(order) // 2])
        while True:
            fit = _Regression(self._prior, [data[i] for i in sorted(believed)])
            gross = _GROSS if believed else _GROSS_FOR_DEFAULT
            more = {i for i in order if data[i][1] <= gross * fit.value(data[i][0])} - believed
            if not more:
                break
            believed |= more
        if len(believed) < len(data) - 1:
            fit = _Regression(self._prior, data)
            if all(y / _AGREE <= fit.value(x) <= y * _AGREE for x, y in data):
                return list(range(len(data)))
        return sorted(believed)

    def _on_other_speed(self) -> None:
        """Restart after a change of the engine's speed, from the same shape and the last passes."""
        last = [observed for _, observed in self._last]
        ratios = sorted(
            observed.forward_s / self.predict_s(observed.tokens_per_rank, observed.pairs)
            for observed in last
        )
        self._prior = [ratios[len(ratios) // 2] * weight for weight in self._fit.weights]
        self._prior_error_s = self.error_s
        self._last.clear()
        self._first = last
        self._believed = []
        self._begin()
        self._sift()

    def _features(self, tokens_per_rank: Sequence[int], pairs: Sequence[float]) -> _Features:
        if self.captured_tokens:
            tokens_per_rank = padded(tokens_per_rank, self.captured_tokens)
        heaviest, most = max(tokens_per_rank), 0.0
        if pairs:
            own_s = map(self.formula.rank_s, tokens_per_rank, pairs)
            _, most, heaviest = max(zip(own_s, pairs, tokens_per_rank, strict=True))
        return (
            1.0,
            min(_MOST_FEATURE, heaviest / self._token_unit),
            min(_MOST_FEATURE, sum(tokens_per_rank) / len(tokens_per_rank) / self._token_unit),
            min(_MOST_FEATURE, 2 * most / self._token_unit**2),
        )


class _Regression:
    """Non-negative least squares with a prior, and exponential forgetting of old samples."""

    def __init__(
        self, prior: Sequence[float], data: Sequence[tuple[_Features, float]] = ()
    ) -> None:
        self._moments = [
            [_PRIOR_TRUST[i] if i == j else 0.0 for j in range(_FEATURES)] for i in range(_FEATURES)
        ]
        self._targets = [_PRIOR_TRUST[i] * prior[i] for i in range(_FEATURES)]
        self.weights: list[float] = list(prior)
        for x, y in data:
            self.add(x, y)
        if data:
            self.solve()

    def value(self, x: Sequence[float]) -> float:
        return sum([w * feature for w, feature in zip(self.weights, x, strict=True)])

    def add(self, x: Sequence[float], y: float) -> None:
        """Add a sample of features ``x`` and time ``y``; :meth:`solve` updates the weights."""
        for i in range(_FEATURES):
            for j in range(_FEATURES):
                self._moments[i][j] = _FORGET * self._moments[i][j] + x[i] * x[j]
            # Keeps the solution defined if all passes look alike.
            self._moments[i][i] += 1e-4
            self._targets[i] = _FORGET * self._targets[i] + x[i] * y + 1e-4 * self.weights[i]

    def solve(self) -> None:
        self.weights = _non_negative_solution(self._moments, self._targets)


def _non_negative_solution(moments: list[list[float]], targets: list[float]) -> list[float]:
    """Solve the normal equations without negative coefficients: while there is one, the most
    negative is fixed at 0."""
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
    """Solve a linear system by Gaussian elimination with partial pivoting. The matrix is positive
    definite and tiny."""
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
