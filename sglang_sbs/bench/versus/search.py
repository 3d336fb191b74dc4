"""The highest load at which a contender keeps its SLO, found with few runs.

Owns the next load to try, and the answer. Must not know how a run is made.

The SLO of a search is on the mean TTFT, as the paper's. A bisection between a load that every
contender serves and one that none does; the last step is drawn linearly between the two runs
around the SLO.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_sbs.bench.versus.ratios import is_peer, serves
from sglang_sbs.bench.versus.rows import Row, figures

LOWEST_LOAD, HIGHEST_LOAD = 0.5, 1.1


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of one contender and seed."""

    load: float
    """At the SLO; a bound if ``bounded``."""
    qps: float
    bounded: bool
    """The SLO lies below the lowest or above the highest load that was tried."""


def _points(rows: Sequence[Row], policy: str, seed: int) -> list[tuple[float, float, float]]:
    """Load, mean TTFT (s) and requests per second of what was tried, by load."""
    out = []
    for row in figures(rows):
        key = row.key
        if key.kind == "search" and (key.policy, key.seed) == (policy, seed):
            assert row.answers is not None
            answered = serves([row])
            mean_s = row.answers.ttft_ms.mean / 1e3 if answered else math.inf
            out.append((key.load, mean_s, row.qps))
    return sorted(out)


def next_load(
    rows: Sequence[Row], policy: str, seed: int, slo_ttft_s: float, steps: int
) -> float | None:
    """What to try next; ``None`` after ``steps`` runs."""
    points = _points(rows, policy, seed)
    if len(points) >= steps:
        return None
    low = max((load for load, mean_s, _ in points if mean_s <= slo_ttft_s), default=LOWEST_LOAD)
    high = min(
        (load for load, mean_s, _ in points if mean_s > slo_ttft_s and load > low),
        default=HIGHEST_LOAD,
    )
    return round((low + high) / 2, 3)


def capacity(rows: Sequence[Row], policy: str, seed: int, slo_ttft_s: float) -> Capacity | None:
    """What the runs so far say; ``None`` without runs."""
    points = _points(rows, policy, seed)
    if not points:
        return None
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


def capacities(rows: Sequence[Row], slo_ttft_s: float) -> dict[str, list[Capacity]]:
    """By contender, one per seed that was searched."""
    keys = sorted({(r.key.policy, r.key.seed) for r in figures(rows) if r.key.kind == "search"})
    out: dict[str, list[Capacity]] = {}
    for policy, seed in keys:
        found = capacity(rows, policy, seed, slo_ttft_s)
        if found is not None:
            out.setdefault(policy, []).append(found)
    return out


def max_qps(rows: Sequence[Row], slo_ttft_s: float) -> dict[str, float]:
    """Requests per second at the SLO, mean over seeds, by contender."""
    return {
        policy: sum(one.qps for one in found) / len(found)
        for policy, found in capacities(rows, slo_ttft_s).items()
    }


def best_peer_load(rows: Sequence[Row], slo_ttft_s: float) -> float | None:
    """The best peer's load at the SLO; ``None`` if none was searched."""
    loads = [
        sum(one.load for one in found) / len(found)
        for policy, found in capacities(rows, slo_ttft_s).items()
        if is_peer(policy)
    ]
    return max(loads, default=None)
