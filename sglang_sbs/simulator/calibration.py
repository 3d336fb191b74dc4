"""Pass costs and latencies fitted to what real engines reported.

Owns the fits. Must not know policies.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence

import msgspec

from sglang_sbs.simulator.cost import CostError, PassCost
from sglang_sbs.simulator.recording import RecordedPass, RecordedRequest, Recording

_OUTLIER_SHARE = 0.05
"""Passes left out of the second fit: those the first one explains worst."""
_ITERATIONS = 5
_IDLE_S = 0.1
"""A device that was free for longer than this before a launch had nothing to do."""
_LATENCIES_S = [0.0005 * 1.07**i for i in range(120)]
_SIGMAS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.2)
_SINGLE_SHARES = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)
"""Of the sigma, what each request of a batch has for itself."""
_SHARPNESS = 0.9
"""An idle engine's launch tells the latency to this share."""
_FLOOR = 1e-4
"""Likelihood of what the model cannot explain: an outlier must not outweigh everything else."""
_NORMAL = [(z / 2, 0.5 * math.exp(-(z**2) / 8) / math.sqrt(2 * math.pi)) for z in range(-6, 7)]
"""Points and weights of the standard normal."""


class FitErrors(msgspec.Struct, frozen=True):
    """How well a fitted cost explains the forward times it was fitted to."""

    passes: int
    median_share: float
    """Median of |predicted - measured| / measured."""
    p95_share: float
    mean_share: float
    """Mean of (predicted - measured) / measured: positive if predicted too long."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulator has to know of a cluster, besides its shape; times in seconds."""

    cost: PassCost
    dispatch_latency_s: float
    """Median, router until the launch of a pass that could take the request, less ``prepare_s``."""
    gang_jitter: float
    """Lognormal sigma of it from batch to batch."""
    dispatch_jitter: float
    """And from request to request within a batch."""
    launch_gap_s: float
    """Mean pause between a pass and the next if that one was not queued behind it."""
    prepare_s: float
    """Median time an engine takes to form and launch a batch."""
    first_token_s: float
    """Mean from the end of the prefill to the first byte of decode at the router."""
    feedback_latency_s: float
    """Mean of EndForward messages."""
    decode_s: float
    """Mean time between first byte and end."""


# The cost of a pass ---------------------------------------------------------------------------


def fit_cost(passes: Iterable[RecordedPass]) -> tuple[PassCost, FitErrors]:
    """Least squares with all coefficients >= 0, once more without the worst 5 % of the passes.

    Which rank is the slowest depends on the coefficients, so the fit is repeated with the ranks the
    previous one names. What the passes cannot tell apart (mean and maximum of ranks that are always
    equal) ends up in one of the two, which predicts the same.

    Raises:
        CostError: no two different passes.
    """
    usable = [one for one in passes if one.complete and one.forward_s > 0 and any(one.tokens)]
    if len({(tuple(one.tokens)) for one in usable}) < 2:
        raise CostError("a cost needs at least two different prefill passes with EndForward")
    cost = _fit(usable)
    usable.sort(key=lambda one: abs(_relative_error(cost, one)))
    kept = usable[: max(2, math.ceil((1 - _OUTLIER_SHARE) * len(usable)))]
    if len({(tuple(one.tokens)) for one in kept}) >= 2:
        cost = _fit(kept)
    errors = [_relative_error(cost, one) for one in usable]
    shares = sorted(abs(error) for error in errors)
    return cost, FitErrors(
        passes=len(usable),
        median_share=statistics.median(shares),
        p95_share=shares[int(0.95 * (len(shares) - 1))],
        mean_share=statistics.fmean(errors),
    )


def _relative_error(cost: PassCost, one: RecordedPass) -> float:
    return cost.pass_s(one.tokens, one.pairs) / one.forward_s - 1


def _fit(passes: Sequence[RecordedPass]) -> PassCost:
    cost = PassCost(fixed_s=0.0, max_s=1.0)
    for _ in range(_ITERATIONS):
        rows = []
        for one in passes:
            slowest = max(
                range(len(one.tokens)),
                key=lambda d: cost.max_s * one.tokens[d] + cost.pair_s * one.pairs[d],
            )
            mean = sum(one.tokens) / len(one.tokens)
            rows.append([1.0, mean, float(one.tokens[slowest]), one.pairs[slowest]])
        fixed_s, mean_s, max_s, pair_s = _non_negative_least_squares(
            rows, [one.forward_s for one in passes]
        )
        cost = PassCost(fixed_s=fixed_s, mean_s=mean_s, max_s=max_s, pair_s=pair_s)
    return cost


def _non_negative_least_squares(rows: list[list[float]], values: list[float]) -> list[float]:
    """Exact for few columns: the best of the ordinary solutions over all subsets of columns."""
    columns = len(rows[0])
    scale = [max(abs(row[c]) for row in rows) or 1.0 for c in range(columns)]
    scaled = [[x / s for x, s in zip(row, scale, strict=True)] for row in rows]
    best, best_error = [0.0] * columns, math.inf
    for size in range(1, columns + 1):
        for subset in itertools.combinations(range(columns), size):
            chosen = [[row[c] for c in subset] for row in scaled]
            solution = _solve(chosen, values)
            if solution is None or min(solution) < 0:
                continue
            error = sum(
                (sum(a * x for a, x in zip(row, solution, strict=True)) - value) ** 2
                for row, value in zip(chosen, values, strict=True)
            )
            if error < best_error * (1 - 1e-9):
                best_error = error
                best = [0.0] * columns
                for c, x in zip(subset, solution, strict=True):
                    best[c] = x / scale[c]
    return best


def _solve(rows: list[list[float]], values: list[float]) -> list[float] | None:
    """Least squares by the normal equations; None if the columns are not independent."""
    n = len(rows[0])
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(n)]
        + [sum(row[i] * value for row, value in zip(rows, values, strict=True))]
        for i in range(n)
    ]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(matrix[r][i]))
        if abs(matrix[pivot][i]) < 1e-9 * len(rows):
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for r in range(n):
            if r != i:
                factor = matrix[r][i] / matrix[i][i]
                matrix[r] = [a - factor * b for a, b in zip(matrix[r], matrix[i], strict=True)]
    return [matrix[i][n] / matrix[i][i] for i in range(n)]


# Latencies ------------------------------------------------------------------------------------


def calibrate(recordings: Sequence[Recording], cost: PassCost | None = None) -> Calibration:
    """Fit everything to recorded runs; ``cost``: take this one instead of fitting it.

    Raises:
        CostError: too little in the logs.
    """
    passes = [one for recording in recordings for one in recording.passes]
    requests = [r for recording in recordings for r in recording.requests.values()]
    if cost is None:
        cost, _ = fit_cost(passes)
    median_s, gang_sigma, request_sigma = fit_latency(requests)
    late_s = median_s * math.exp(2 * math.hypot(gang_sigma, request_sigma))
    # The second of two launches right after each other was all the engine had to do in between.
    one_after_other_s = [
        one.launch_s - one.previous.launch_s
        for one in passes
        if one.inflight == 1
        and one.previous is not None
        and one.launch_s - one.previous.launch_s < _IDLE_S
    ]
    prepare_s = statistics.median(one_after_other_s) if one_after_other_s else 0.0
    return Calibration(
        cost=cost,
        dispatch_latency_s=max(0.0, median_s - prepare_s),
        gang_jitter=gang_sigma,
        dispatch_jitter=request_sigma,
        launch_gap_s=_mean(
            "pause between passes",
            [
                one.pause_s
                for r in _first_of_pass(requests)
                if (one := r.first_pass) is not None
                and one.inflight == 0
                and 0 < one.pause_s < one.launch_s - r.dispatched_s - late_s
            ],
            default=0.0,
        ),
        prepare_s=prepare_s,
        first_token_s=_mean(
            "first token",
            [
                r.first_token_s - r.last_pass.end_s
                for r in requests
                if r.last_pass is not None
                and r.last_pass.complete
                and r.first_token_s > r.last_pass.end_s
            ],
        ),
        feedback_latency_s=_mean(
            "EndForward message", [s for recording in recordings for s in recording.feedback_s]
        ),
        decode_s=_mean(
            "completed request",
            [r.ended_s - r.first_token_s for r in requests if r.ended_s >= r.first_token_s],
        ),
    )


def fit_latency(requests: Iterable[RecordedRequest]) -> tuple[float, float, float]:
    """Median of the time from dispatch to the launch of a pass that could take the request, and its
    lognormal sigmas: from batch to batch and, within a batch, from request to request.

    A busy engine looks only when it launches, so a request that was too late for one launch and was
    in the next tells an interval. The most likely parameters are searched over a grid: first the
    median and the total sigma, then how much of it the requests of a batch share.

    Raises:
        CostError: no dispatched request is in a recorded pass.
    """
    batches: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for request in requests:
        interval = _log_interval(request)
        if interval is not None:
            # Batch numbers start anew in each log, but no two have the same time.
            key = (request.batch, round(1e6 * request.dispatched_s))
            batches.setdefault(key, []).append(interval)
    intervals = [interval for batch in batches.values() for interval in batch]
    if not intervals:
        raise CostError("a latency needs dispatched requests with EndForward launch messages")

    def likelihood(mu: float, sigma: float) -> float:
        return sum(math.log(max(_FLOOR, _inside(i, mu, sigma))) for i in intervals)

    mu, sigma = max(
        ((math.log(median_s), sigma) for median_s in _LATENCIES_S for sigma in _SIGMAS),
        key=lambda pair: likelihood(*pair),
    )

    def shared_likelihood(mu: float, share: float) -> float:
        gang, single = sigma * math.sqrt(1 - share**2), sigma * share
        total = 0.0
        for batch in batches.values():
            likely = sum(
                weight * math.prod(max(_FLOOR, _inside(i, mu + gang * z, single)) for i in batch)
                for z, weight in _NORMAL
            )
            total += math.log(max(_FLOOR, likely))
        return total

    mu, share = max(
        ((mu + shift, share) for shift in (-0.2, -0.1, 0.0, 0.1, 0.2) for share in _SINGLE_SHARES),
        key=lambda pair: shared_likelihood(*pair),
    )
    return math.exp(mu), sigma * math.sqrt(1 - share**2), sigma * share


def _log_interval(request: RecordedRequest) -> tuple[float, float] | None:
    """Logarithms of the bounds of the latency of one request; None if it says nothing."""
    one = request.first_pass
    if one is None or request.prefill is None or not request.dispatched_s < one.launch_s:
        return None
    high_s = one.launch_s - request.dispatched_s
    low_s = 0.0
    if one.inflight == 0 and one.pause_s > _IDLE_S:
        # It went to an idle engine, which launches as soon as it can.
        low_s = _SHARPNESS * high_s
    elif one.previous is not None and not one.previous.left_over[request.prefill[1]]:
        low_s = one.previous.launch_s - request.dispatched_s
    if low_s >= min(high_s, _LATENCIES_S[-1]):
        return None
    return math.log(low_s) if low_s > 0 else -math.inf, math.log(high_s)


def _inside(interval: tuple[float, float], mu: float, sigma: float) -> float:
    low, high = interval
    return _normal_cdf((high - mu) / sigma) - _normal_cdf((low - mu) / sigma)


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _first_of_pass(requests: Iterable[RecordedRequest]) -> list[RecordedRequest]:
    """Of each pass, the request in it that was dispatched first."""
    first: dict[int, RecordedRequest] = {}
    for request in requests:
        if request.first_pass is None:
            continue
        key = id(request.first_pass)
        if key not in first or request.dispatched_s < first[key].dispatched_s:
            first[key] = request
    return list(first.values())


def _mean(what: str, values: Sequence[float], default: float | None = None) -> float:
    if values:
        return statistics.fmean(values)
    if default is None:
        raise CostError(f"the logs have no {what} to learn from")
    return default
