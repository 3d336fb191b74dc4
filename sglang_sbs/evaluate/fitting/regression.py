"""Robust least squares with coefficients >= 0 and their standard errors.

Independent of the meaning of columns. Exact for few columns, because it compares the ordinary
solutions over all subsets of them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

import msgspec

_ROUNDS = 30
_HUBER_ROUNDS = 10
"""First rounds, with Huber's weights. Tukey's weights, which are 0 for outliers, come afterwards,
because they need a good start."""
_HUBER = 1.345
_TUKEY = 4.685
"""Residual, in units of the scale, from which Tukey's weight is 0 (95 % efficient if normal)."""
_MAD_TO_SIGMA = 1.4826
_SCALE_FLOOR = 1e-6
"""Smallest scale of the residuals as a share of the median value; exact data would have 0."""
_SETTLED = 1e-7

Rows = list[list[float]]


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of a fit; a weight of 0 marks an outlier."""

    coefficients: list[float]
    standard_errors: list[float | None]
    """Standard error of each coefficient; ``None``: the coefficient is 0, at its bound."""
    weights: list[float]
    r2: float
    """R² of the values that are not outliers."""


def robust_fit(
    values: Sequence[float],
    rows_for: Callable[[list[float] | None], Rows],
    columns: Sequence[int],
) -> Fit:
    """Fit ``values`` with some of the columns; the others get the coefficient 0.

    Iteratively reweighted: Huber's weights, then Tukey's biweight, with the scale from the median
    absolute residual. ``rows_for`` gives the rows for the current coefficients (``None`` at first),
    because rows may depend on them."""
    coefficients: list[float] | None = None
    weights = [1.0] * len(values)
    floor = _SCALE_FLOOR * statistics.median(values)
    rows = rows_for(None)
    for number in range(_ROUNDS):
        before = coefficients
        solved = _non_negative([[row[c] for c in columns] for row in rows], values, weights)
        coefficients = [0.0] * len(rows[0])
        for column, value in zip(columns, solved, strict=True):
            coefficients[column] = value
        rows = rows_for(coefficients)
        residuals = _residuals(rows, values, coefficients)
        scale = max(floor, _MAD_TO_SIGMA * statistics.median(map(abs, residuals)))
        weigh = _huber if number < _HUBER_ROUNDS else _tukey
        weights = [weigh(residual / scale) for residual in residuals]
        if number > _HUBER_ROUNDS and before is not None and _same(before, coefficients, rows):
            break
    assert coefficients is not None
    return Fit(
        coefficients=coefficients,
        standard_errors=_standard_errors(rows, residuals, weights, coefficients),
        weights=weights,
        r2=_r2(values, residuals, weights),
    )


def _huber(u: float) -> float:
    return 1.0 if abs(u) <= _HUBER else _HUBER / abs(u)


def _tukey(u: float) -> float:
    return (1 - (u / _TUKEY) ** 2) ** 2 if abs(u) < _TUKEY else 0.0


def _same(before: Sequence[float], after: Sequence[float], rows: Rows) -> bool:
    largest = [max(abs(row[c]) for row in rows) for c in range(len(after))]
    total = sum(a * x for a, x in zip(after, largest, strict=True))
    moved = sum(abs(a - b) * x for a, b, x in zip(after, before, largest, strict=True))
    return moved <= _SETTLED * total


def _residuals(rows: Rows, values: Sequence[float], coefficients: Sequence[float]) -> list[float]:
    return [
        value - sum(a * x for a, x in zip(coefficients, row, strict=True))
        for row, value in zip(rows, values, strict=True)
    ]


def _r2(values: Sequence[float], residuals: Sequence[float], weights: Sequence[float]) -> float:
    total = sum(weights)
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / total
    spread = sum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True))
    left = sum(w * r * r for w, r in zip(weights, residuals, strict=True))
    return 1 - left / spread if spread > 0 else math.nan


# Linear algebra, small ----------------------------------------------------------------------------


def _gram(rows: Rows, weights: Sequence[float]) -> Rows:
    n = len(rows[0])
    out = [[0.0] * n for _ in range(n)]
    for row, weight in zip(rows, weights, strict=True):
        for i in range(n):
            scaled = weight * row[i]
            for j in range(i, n):
                out[i][j] += scaled * row[j]
    for i in range(n):
        for j in range(i):
            out[i][j] = out[j][i]
    return out


def _non_negative(rows: Rows, values: Sequence[float], weights: Sequence[float]) -> list[float]:
    columns = len(rows[0])
    scale = [max(abs(row[c]) for row in rows) or 1.0 for c in range(columns)]
    scaled = [[x / s for x, s in zip(row, scale, strict=True)] for row in rows]
    # With the values as a last column, one matrix contains everything needed for any subset.
    gram = _gram([[*row, v] for row, v in zip(scaled, values, strict=True)], weights)
    best, best_error = [0.0] * columns, math.inf
    for size in range(1, columns + 1):
        for subset in itertools.combinations(range(columns), size):
            inverse = _inverse([[gram[i][j] for j in subset] for i in subset])
            if inverse is None:
                continue
            solution = [
                sum(inverse[i][j] * gram[c][columns] for j, c in enumerate(subset))
                for i in range(size)
            ]
            if min(solution) < 0:
                continue
            explained = sum(x * gram[c][columns] for x, c in zip(solution, subset, strict=True))
            error = gram[columns][columns] - explained
            if error < best_error - 1e-9 * gram[columns][columns] or best_error is math.inf:
                best_error = error
                best = [0.0] * columns
                for c, x in zip(subset, solution, strict=True):
                    best[c] = x / scale[c]
    return best


def _inverse(matrix: Rows) -> Rows | None:
    """Invert by Gauss-Jordan; ``None`` if the matrix is singular to working precision."""
    n = len(matrix)
    size = max(matrix[i][i] for i in range(n))
    work = [[*row, *(float(i == j) for j in range(n))] for i, row in enumerate(matrix)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(work[r][i]))
        if abs(work[pivot][i]) < 1e-10 * size:
            return None
        work[i], work[pivot] = work[pivot], work[i]
        work[i] = [x / work[i][i] for x in work[i]]
        for r in range(n):
            if r != i:
                factor = work[r][i]
                work[r] = [a - factor * b for a, b in zip(work[r], work[i], strict=True)]
    return [row[n:] for row in work]


def _standard_errors(
    rows: Rows,
    residuals: Sequence[float],
    weights: Sequence[float],
    coefficients: Sequence[float],
) -> list[float | None]:
    """Return standard errors of the nonzero coefficients by the sandwich estimator (HC1), because
    the noise of long passes may be larger."""
    active = [c for c, value in enumerate(coefficients) if value > 0]
    out: list[float | None] = [None] * len(coefficients)
    count = sum(weight > 0 for weight in weights)
    if not active or count <= len(active):
        return out
    scale = [max(abs(row[c]) for row in rows) for c in active]
    chosen = [[row[c] / s for c, s in zip(active, scale, strict=True)] for row in rows]
    bread = _inverse(_gram(chosen, weights))
    if bread is None:
        return out
    meat = _gram(chosen, [(w * r) ** 2 for w, r in zip(weights, residuals, strict=True)])
    correction = count / (count - len(active))
    n = len(active)
    for i, (column, size) in enumerate(zip(active, scale, strict=True)):
        variance = sum(bread[i][j] * meat[j][k] * bread[k][i] for j in range(n) for k in range(n))
        out[column] = math.sqrt(max(0.0, correction * variance)) / size
    return out
