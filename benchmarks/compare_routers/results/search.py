"""The highest load at which a contender keeps its SLO, found with few runs.

Owns the next load to try, the answer and its ratios. Must not know how a run is made.

The SLO of a search is on the mean TTFT, as the paper's. A bisection between a load that every
contender serves and one that none does, each load run with all seeds, whose mean decides; the last
step is drawn linearly between the two loads around the SLO.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.compare_routers.results.ratios import is_peer, measurable
from benchmarks.compare_routers.results.rows import Row, figures

LOWEST_LOAD, HIGHEST_LOAD = 0.5, 1.1

Point = tuple[float, float, float]
"""Load, mean TTFT (s), infinite where requests failed, and requests per second."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of one contender."""

    load: float
    """At the SLO; a bound if ``bounded``."""
    qps: float
    bounded: bool
    """The SLO lies below the lowest or above the highest load that was tried."""


@dataclass(frozen=True, slots=True)
class Search:
    """Of one contender, over all seeds."""

    found: Capacity
    by_seed: dict[int, Capacity]
    """What the same loads say of every seed alone."""
    finished: bool
    """As many loads as the others', each with every seed."""
    disturbed: bool = False
    """The host was too slow in one of its runs."""

    @property
    def known(self) -> bool:
        """Whether ``found`` is more than a bound."""
        return self.finished and not self.found.bounded

    @property
    def qps_spread(self) -> tuple[float, float] | None:
        """Least and most over seeds; ``None`` with fewer than two that have more than a bound."""
        values = [one.qps for one in self.by_seed.values() if not one.bounded]
        return (min(values), max(values)) if len(values) > 1 else None


@dataclass(frozen=True, slots=True)
class Ratio:
    """Requests per second at the SLO over the best peer's."""

    mean: float
    low: float
    high: float
    """Least and most over seeds; ``mean`` where there is one seed."""


def _by_load(rows: Sequence[Row], policy: str) -> dict[float, dict[int, Point]]:
    """What was tried: load -> seed -> point."""
    out: dict[float, dict[int, Point]] = {}
    for row in figures(rows):
        key = row.key
        if key.kind == "search" and key.policy == policy:
            assert row.answers is not None
            mean_s = row.answers.ttft_ms.mean / 1e3 if measurable(policy, [row]) else math.inf
            out.setdefault(key.load, {})[key.seed] = (key.load, mean_s, row.qps)
    return dict(sorted(out.items()))


def _mean(points: Sequence[Point]) -> Point:
    """Of one load, over seeds."""
    loads, means_s, qps = zip(*points, strict=True)
    return loads[0], math.fsum(means_s) / len(points), math.fsum(qps) / len(points)


def next_load(
    rows: Sequence[Row], policy: str, seeds: Sequence[int], slo_ttft_s: float, steps: int
) -> float | None:
    """What to try next with every seed; ``None`` after ``steps`` loads.

    After an interruption it is the load that not every seed was tried at.
    """
    tried = _by_load(rows, policy)
    for load, of in tried.items():
        if not set(seeds) <= set(of):
            return load
    if len(tried) >= steps:
        return None
    points = [_mean([of[seed] for seed in seeds]) for of in tried.values()]
    kept = [load for load, mean_s, _ in points if mean_s <= slo_ttft_s]
    low = max(kept, default=LOWEST_LOAD)
    high = min(
        (load for load, mean_s, _ in points if mean_s > slo_ttft_s and load > low),
        default=HIGHEST_LOAD,
    )
    return round((low + high) / 2, 3)


def capacity(points: Sequence[Point], slo_ttft_s: float) -> Capacity:
    """What loads that were tried (at least one, by load) say."""
    kept = [point for point in points if point[1] <= slo_ttft_s]
    if not kept:
        return Capacity(points[0][0], points[0][2], bounded=True)
    low = kept[-1]
    above = [point for point in points if point[0] > low[0] and math.isfinite(point[1])]
    if not above:
        return Capacity(low[0], low[2], bounded=True)
    high = above[0]
    share = (slo_ttft_s - low[1]) / (high[1] - low[1])
    return Capacity(
        low[0] + share * (high[0] - low[0]), low[2] + share * (high[2] - low[2]), bounded=False
    )


def searches(rows: Sequence[Row], slo_ttft_s: float) -> dict[str, Search]:
    """By contender that was searched."""
    policies = {row.key.policy for row in figures(rows) if row.key.kind == "search"}
    tried = {policy: _by_load(rows, policy) for policy in sorted(policies)}
    seeds = sorted({seed for mine in tried.values() for of in mine.values() for seed in of})
    most = max((len(mine) for mine in tried.values()), default=0)
    out = {}
    for policy, mine in tried.items():
        by_seed = {}
        for seed in seeds:
            points = [of[seed] for of in mine.values() if seed in of]
            if points:
                by_seed[seed] = capacity(points, slo_ttft_s)
        out[policy] = Search(
            found=capacity([_mean([*of.values()]) for of in mine.values()], slo_ttft_s),
            by_seed=by_seed,
            finished=len(mine) == most and all(set(of) == set(seeds) for of in mine.values()),
            disturbed=any(
                row.disturbed
                for row in figures(rows)
                if row.key.kind == "search" and row.key.policy == policy
            ),
        )
    return out


def best_peer(found: dict[str, Search]) -> str | None:
    """The one with most requests per second at the SLO; ``None`` if none was searched."""
    peers = [(one.found.qps, policy) for policy, one in found.items() if is_peer(policy)]
    return max(peers)[1] if peers else None


def qps_ratio(found: dict[str, Search], policy: str) -> Ratio | None:
    """A contender over the best peer; ``None`` where the search of either did not finish, has
    only a bound, or was disturbed."""
    best = best_peer(found)
    if best is None or not all(found[one].known for one in (policy, best)):
        return None
    if found[policy].disturbed or found[best].disturbed:
        return None
    ours, theirs = found[policy], found[best]
    mean = ours.found.qps / theirs.found.qps
    by_seed = [
        one.qps / theirs.by_seed[seed].qps
        for seed, one in ours.by_seed.items()
        if not one.bounded and not theirs.by_seed[seed].bounded
    ]
    return Ratio(mean, min([mean, *by_seed]), max([mean, *by_seed]))
