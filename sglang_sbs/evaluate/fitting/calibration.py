"""Fits pass costs and latencies to reports of real engines. Independent of policies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from sglang_sbs.evaluate.fitting.recording import RecordedPass, RecordedRequest, Recording
from sglang_sbs.evaluate.fitting.regression import Fit, robust_fit
from sglang_sbs.simulator.cluster.cost import CostError, PassCost

_Value = TypeVar("_Value")
_TERMS = ("fixed_s", "mean_s", "max_s", "pair_s", "request_s")
_LEAST_T = 2.0
_LEAST_SHARE = 0.005
_FOLDS = 5
_LEAST_PER_FOLD = 6
LEAST_PASSES = _FOLDS * _LEAST_PER_FOLD
"""Smallest number of passes for which held-out errors are computed."""
MOST_FITTED = 4000
"""Limit on passes and requests used by a fit, drawn evenly: more take longer and change nothing."""
_LARGEST_RESIDUAL = 1.0
"""Limit on the logarithm of measured over predicted pass time, to which outliers are reduced."""
_IDLE_S = 0.1
"""A device that was idle for longer than this before a launch is assumed to have had no work."""
_LATENCIES_S = [0.0005 * 1.07**i for i in range(120)]
_SIGMAS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.2)
_SINGLE_SHARES = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)
"""Candidates for the share of the latency's sigma that is within a batch, between its requests."""
_SHARPNESS = 0.9
"""Lower bound of a latency measured at an idle engine, as a share of the measured value."""
_FLOOR = 1e-4
"""Smallest likelihood of an observation, so that outliers do not outweigh everything else."""
_NORMAL = [(z / 2, 0.5 * math.exp(-(z**2) / 8) / math.sqrt(2 * math.pi)) for z in range(-6, 7)]
"""Points and weights to integrate over the standard normal distribution."""


class FitErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of a fitted pass cost on the forward times it was fitted to, and on others."""

    passes: int
    outliers: int
    """Number of passes without weight in the fit, because other effects made them long."""
    r2: float
    """R² of the passes that are not outliers."""
    standard_errors: dict[str, float | None]
    """Standard error of each coefficient of the cost; ``None``: the coefficient is 0, because the
    passes show no such term."""
    median_share: float
    """Median of |predicted - measured| / measured."""
    p95_share: float
    mean_share: float
    """Mean of (predicted - measured) / measured; positive if predictions are too long."""
    held_out_median_share: float | None
    """``median_share`` of passes that the fit has not seen (each fifth of the passes is predicted
    by a fit to the others); ``None``: too few passes."""
    held_out_p95_share: float | None


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a cluster for the simulator, in addition to its shape; times in seconds."""

    cost: PassCost
    dispatch_latency_s: float
    """Median time from sending a request until a pass could take it, minus ``prepare_s``."""
    gang_jitter: float
    """Lognormal sigma of the dispatch latency from batch to batch."""
    dispatch_jitter: float
    """Lognormal sigma of the dispatch latency from request to request within a batch."""
    launch_gap_s: float
    """Mean pause of the device before a pass that was not queued behind the previous one."""
    prepare_s: float
    """Median time an engine takes to form and launch a batch."""
    first_token_s: float
    """Mean time from the end of prefill to decode's first byte at the router."""
    feedback_latency_s: float
    """Mean delay of EndForward messages at the scheduler, compared with the fastest."""
    decode_s: float
    """Mean time from a response's first byte to its end."""
    pass_jitter: float = 0.0
    """Lognormal sigma of measured forward times around those of ``cost``."""


# The cost of a pass ---------------------------------------------------------------------------


def fit_cost(passes: Iterable[RecordedPass]) -> tuple[PassCost, FitErrors]:
    """Fit a pass cost with robust least squares and coefficients >= 0 (:mod:`.regression`), and
    return it with its errors.

    Which rank is the slowest depends on the coefficients, so the fit is repeated with the ranks
    named by the previous one. A term is dropped if it is within two standard errors of 0, or makes
    less than half a percent of a pass, least significant first. Terms that the passes cannot
    distinguish (mean and maximum of ranks that are always equal) are merged into one, with the same
    predictions.

    Raises: CostError: no two different passes."""
    usable = evenly(usable_passes(passes), MOST_FITTED)
    if len({(tuple(a_pass.tokens)) for a_pass in usable}) < 2:
        raise CostError("a cost needs at least two different prefill passes with EndForward")
    fit = _fit(usable)
    cost = _cost_of(fit)
    errors = [_relative_error(cost, a_pass) for a_pass in usable]
    shares = sorted(map(abs, errors))
    held_out = _held_out_shares(usable)
    return cost, FitErrors(
        passes=len(usable),
        outliers=sum(weight == 0 for weight in fit.weights),
        r2=fit.r2,
        standard_errors=dict(zip(_TERMS, fit.standard_errors, strict=True)),
        median_share=statistics.median(shares),
        p95_share=shares[int(0.95 * (len(shares) - 1))],
        mean_share=statistics.fmean(errors),
        held_out_median_share=statistics.median(held_out) if held_out else None,
        held_out_p95_share=held_out[int(0.95 * (len(held_out) - 1))] if held_out else None,
    )


def usable_passes(passes: Iterable[RecordedPass]) -> list[RecordedPass]:
    """Return the passes that a cost can be fitted to: ended, with tokens and a forward time."""
    return [
        a_pass
        for a_pass in passes
        if a_pass.complete and a_pass.forward_s > 0 and any(a_pass.tokens)
    ]


def evenly(values: Sequence[_Value], most: int) -> list[_Value]:
    """Draw ``most`` values at equal distances, or all if there are no more."""
    step = max(1.0, len(values) / most)
    return [values[int(i * step)] for i in range(min(most, len(values)))]


def with_jitter(cost: PassCost, passes: Iterable[RecordedPass]) -> tuple[PassCost, float]:
    """Return the cost scaled so that jittered passes have the measured mean, and the lognormal
    sigma of that jitter. A robust fit alone ignores long outliers, which do affect queues."""
    pairs = [(a_pass.forward_s, predict_s(cost, a_pass)) for a_pass in usable_passes(passes)]
    logs = [math.log(measured / predicted) for measured, predicted in pairs if predicted > 0]
    if len(logs) < 2:
        return cost, 0.0
    bound = _LARGEST_RESIDUAL
    sigma = statistics.pstdev(max(-bound, min(bound, value)) for value in logs)
    measured_s, predicted_s = map(sum, zip(*pairs, strict=True))
    return cost.at_speed(predicted_s * math.exp(sigma**2 / 2) / measured_s), sigma


def predict_s(cost: PassCost, a_pass: RecordedPass) -> float:
    """Return the forward time of a recorded pass in seconds, as the cost predicts it."""
    return cost.pass_s(a_pass.tokens, a_pass.pairs, a_pass.requests)


def _relative_error(cost: PassCost, a_pass: RecordedPass) -> float:
    return predict_s(cost, a_pass) / a_pass.forward_s - 1


def _held_out_shares(passes: Sequence[RecordedPass]) -> list[float]:
    """Return the sorted |relative errors| of predictions for passes that the fit has not seen;
    empty if there are too few passes."""
    if len(passes) < LEAST_PASSES:
        return []
    shares = []
    for fold in range(_FOLDS):
        cost = _cost_of(_fit([a_pass for i, a_pass in enumerate(passes) if i % _FOLDS != fold]))
        shares += [abs(_relative_error(cost, a_pass)) for a_pass in passes[fold::_FOLDS]]
    return sorted(shares)


def _fit(passes: Sequence[RecordedPass]) -> Fit:
    values = [a_pass.forward_s for a_pass in passes]

    def rows_for(coefficients: list[float] | None) -> list[list[float]]:
        cost = PassCost(fixed_s=0.0, max_s=1.0)
        if coefficients is not None and any(coefficients[2:]):
            cost = PassCost(**dict(zip(_TERMS, coefficients, strict=True)))
        return [_row(a_pass, cost) for a_pass in passes]

    terms = list(range(len(_TERMS)))
    while True:
        fit = robust_fit(values, rows_for, terms)
        weakest = _weakest(fit, rows_for(fit.coefficients), statistics.median(values))
        if weakest is None:
            return fit
        terms.remove(weakest)


def _weakest(fit: Fit, rows: list[list[float]], pass_s: float) -> int | None:
    """Return the index of the least significant term to drop (see :func:`fit_cost`), if any; never
    the fixed term or the only other one."""
    found: list[tuple[float, int]] = []
    active = [i for i, value in enumerate(fit.coefficients) if value > 0 and i > 0]
    for i in active:
        share = fit.coefficients[i] * max(row[i] for row in rows) / pass_s
        error = fit.standard_errors[i] or 0.0
        t = fit.coefficients[i] / error if error > 0 else math.inf
        if t < _LEAST_T or share < _LEAST_SHARE:
            found.append((t, i))
    return min(found)[1] if found and len(active) > 1 else None


def _row(a_pass: RecordedPass, cost: PassCost) -> list[float]:
    slowest = slowest_rank(cost, a_pass)
    mean = sum(a_pass.tokens) / len(a_pass.tokens)
    return [
        1.0,
        mean,
        float(a_pass.tokens[slowest]),
        a_pass.pairs[slowest],
        float(a_pass.requests[slowest]),
    ]


def slowest_rank(cost: PassCost, a_pass: RecordedPass) -> int:
    """Return the DP rank of a recorded pass that takes longest by the cost."""
    return max(
        range(len(a_pass.tokens)),
        key=lambda d: cost.rank_s(a_pass.tokens[d], a_pass.pairs[d], a_pass.requests[d]),
    )


def _cost_of(fit: Fit) -> PassCost:
    return PassCost(**dict(zip(_TERMS, fit.coefficients, strict=True)))


# Latencies ------------------------------------------------------------------------------------


def calibrate(recordings: Sequence[Recording], cost: PassCost | None = None) -> Calibration:
    """Fit all parameters of a cluster to recorded runs; a given ``cost`` is used instead of fitting
    one.

    Raises: CostError: the logs contain too little."""
    passes = [a_pass for recording in recordings for a_pass in recording.passes]
    requests = [r for recording in recordings for r in recording.requests.values()]
    if cost is None:
        cost, _ = fit_cost(passes)
    median_s, gang_sigma, request_sigma = fit_latency(requests)
    late_s = median_s * math.exp(2 * math.hypot(gang_sigma, request_sigma))
    # The second of two consecutive launches was all the engine's work in between.
    one_after_other_s = [
        a_pass.launch_s - a_pass.previous.launch_s
        for a_pass in passes
        if a_pass.inflight == 1
        and a_pass.previous is not None
        and a_pass.launch_s - a_pass.previous.launch_s < _IDLE_S
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
                a_pass.pause_s
                for r in _first_of_pass(requests)
                if (a_pass := r.first_pass) is not None
                and a_pass.inflight == 0
                and 0 < a_pass.pause_s < a_pass.launch_s - r.dispatched_s - late_s
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
            default=0.0,
        ),
        feedback_latency_s=_mean(
            "EndForward message", [s for recording in recordings for s in recording.feedback_s]
        ),
        decode_s=_mean(
            "completed request",
            [r.ended_s - r.first_token_s for r in requests if r.ended_s >= r.first_token_s],
            default=1.0,
        ),
    )


def fit_latency(requests: Iterable[RecordedRequest]) -> tuple[float, float, float]:
    """Return the median time from dispatch to the launch of a pass that could take the request, and
    its lognormal sigmas: from batch to batch and, within a batch, from request to request.

    A busy engine looks for requests only when it launches, so a request that missed one launch and
    was in the next gives an interval. The most likely parameters are searched over a grid: first
    the median and the total sigma, then the share of it common to a batch. Logs without a batch of
    two, i.e. of a router that sends at once, do not show that share. It is then the largest one,
    because the requests of a batch of ours leave together.

    Raises: CostError: no dispatched request is in a recorded pass."""
    batches: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for request in requests:
        interval = _log_interval(request)
        if interval is not None and request.dispatch is not None:
            # Batch numbers restart in each log, but dispatch times differ.
            key = (request.dispatch.batch, round(1e6 * request.dispatched_s))
            batches.setdefault(key, []).append(interval)
    drawn = evenly(list(batches.values()), MOST_FITTED)
    intervals = [interval for batch in drawn for interval in batch]
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
        for batch in drawn:
            likely = sum(
                weight * math.prod(max(_FLOOR, _inside(i, mu + gang * z, single)) for i in batch)
                for z, weight in _NORMAL
            )
            total += math.log(max(_FLOOR, likely))
        return total

    shares = _SINGLE_SHARES if any(len(batch) > 1 for batch in drawn) else _SINGLE_SHARES[:1]
    mu, share = max(
        ((mu + shift, share) for shift in (-0.2, -0.1, 0.0, 0.1, 0.2) for share in shares),
        key=lambda pair: shared_likelihood(*pair),
    )
    return math.exp(mu), sigma * math.sqrt(1 - share**2), sigma * share


def _log_interval(request: RecordedRequest) -> tuple[float, float] | None:
    """Return the logarithms of the lower and upper bound of a request's dispatch latency (in
    seconds; -inf: no lower bound). None: the request does not bound it."""
    a_pass, dispatch = request.first_pass, request.dispatch
    if a_pass is None or dispatch is None or not request.dispatched_s < a_pass.launch_s:
        return None
    high_s = a_pass.launch_s - request.dispatched_s
    low_s = 0.0
    if a_pass.inflight == 0 and a_pass.pause_s > _IDLE_S:
        # It was sent to an idle engine, which launches as soon as it can.
        low_s = _SHARPNESS * high_s
    elif a_pass.previous is not None and not a_pass.previous.left_over[dispatch.prefill_rank]:
        low_s = a_pass.previous.launch_s - request.dispatched_s
    if low_s >= min(high_s, _LATENCIES_S[-1]):
        return None
    return math.log(low_s) if low_s > 0 else -math.inf, math.log(high_s)


def _inside(interval: tuple[float, float], mu: float, sigma: float) -> float:
    low, high = interval
    return _normal_cdf((high - mu) / sigma) - _normal_cdf((low - mu) / sigma)


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _first_of_pass(requests: Iterable[RecordedRequest]) -> list[RecordedRequest]:
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
