"""From rows to ratios: ours against the best peer of each cell, with the spread over seeds.

The best peer of a cell is the one we look worst against: for every peer the ratio is taken seed by
seed on the same arrivals and averaged, and the largest average counts. It is looked for anew for
the mean, the 99th percentile and everything else, so no single peer has to be best at all of them.
Peers that ran with fewer seeds are no candidates where one ran with more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.compare_routers.contenders import BY_NAME
from benchmarks.compare_routers.results.rows import NOT_RUN, Row, figures

Figure = Callable[[Row], float]
MOST_FAILED_SHARE = 0.01
"""A peer that fails more of its requests than this is no peer to be measured against: what it
does not serve does not wait."""


def _mean_ms(row: Row) -> float:
    assert row.answers is not None
    return row.answers.ttft_ms.mean


def _p99_ms(row: Row) -> float:
    assert row.answers is not None
    return row.answers.ttft_ms.p99


def _kv_sigma(row: Row) -> float:
    assert row.engines is not None
    return row.engines.kv.sigma_tokens


def _per_active_rank(row: Row) -> float:
    """The inverse of the mean number of active ranks: less is better, as of the other figures."""
    assert row.engines is not None
    active = row.engines.passes.active_rank_count
    return 1 / active if active > 0 else math.nan


def _max_over_mean(row: Row) -> float:
    assert row.engines is not None
    return row.engines.passes.max_over_mean


FIGURES: dict[str, Figure] = {
    "mean": _mean_ms,
    "p99": _p99_ms,
    "kv_band": _kv_sigma,
    "active_ranks": _per_active_rank,
    "max_over_mean": _max_over_mean,
}
_MORE_IS_BETTER = ("active_ranks",)
"""The best peer is looked for by their inverse; the ratio is of the figure itself."""


def is_sbs(policy: str) -> bool:
    """Whether ratios are taken of this contender."""
    return policy.startswith("sbs")


def is_immediate(policy: str) -> bool:
    """Whether it is an immediate policy of this package, which has SBS's relay and signals."""
    return not is_sbs(policy) and policy in BY_NAME and BY_NAME[policy].ours


def is_peer(policy: str) -> bool:
    """Whether it is a router of another project."""
    return not is_sbs(policy) and not is_immediate(policy)


def cells_of(rows: Iterable[Row]) -> dict[tuple[str, float], list[Row]]:
    """Rows with figures by workload and load, in order."""
    cells: dict[tuple[str, float], list[Row]] = {}
    for row in figures(rows):
        cells.setdefault((row.key.workload, row.key.load), []).append(row)
    return dict(sorted(cells.items()))


def serves(rows: Sequence[Row]) -> bool:
    sent = sum(row.requests for row in rows)
    failed = sum(row.answers.failed for row in rows if row.answers is not None)
    return failed <= MOST_FAILED_SHARE * sent


def measurable(policy: str, rows: Sequence[Row]) -> bool:
    """Whether its figures in ``rows`` count. Those of SBS only where it answered everything: a
    request that failed is not in the mean, and would be in the tail."""
    if is_sbs(policy):
        return not any(row.answers is not None and row.answers.failed for row in rows)
    return serves(rows)


def best_peer(
    rows: Sequence[Row],
    policy: str,
    figure: Figure,
    among: Callable[[str], bool] = is_peer,
) -> tuple[str, list[float]] | None:
    """The peer in a cell that ``policy`` looks worst against, and the ratio of every seed.

    Among those that ran with most of its seeds: one that ran with a single seed only would be
    compared by that seed's luck. ``None``: no peer ran on the same arrivals, or ``policy`` does not
    answer all it is sent.
    """
    if not measurable(policy, [row for row in rows if row.key.policy == policy]):
        return None
    ours = {row.key.seed: figure(row) for row in rows if row.key.policy == policy}
    best: tuple[str, list[float]] | None = None
    for peer in sorted({row.key.policy for row in rows if among(row.key.policy)}):
        mine = [row for row in rows if row.key.policy == peer]
        if not serves(mine):
            continue
        ratios = [
            ours[row.key.seed] / figure(row)
            for row in sorted(mine, key=lambda row: row.key.seed)
            if row.key.seed in ours and figure(row) > 0
        ]
        ratios = [ratio for ratio in ratios if math.isfinite(ratio)]
        if ratios and (best is None or _weight(ratios) > _weight(best[1])):
            best = (peer, ratios)
    return best


def _weight(ratios: Sequence[float]) -> tuple[int, float]:
    return len(ratios), statistics.fmean(ratios)


def ratio_cells(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One object per workload, load and policy of SBS.

    ``own_*``: against the best of our own immediate policies. ``failed``: a run of
    it there has no figures or left a request unanswered, and it has no ratios. ``disturbed``: the
    runs there that a slow host disturbed, or in which a router's loop stood still; a cell has
    no ratios if any router had such a run.
    """
    out = []
    cells = cells_of(rows)
    broken: dict[tuple[str, float], set[str]] = {}
    for row in without_figures(rows):
        broken.setdefault((row.key.workload, row.key.load), set()).add(row.key.policy)
    for workload, load in sorted({*cells, *broken}):
        mine = cells.get((workload, load), [])
        lost = broken.get((workload, load), set())
        disturbed = disturbed_runs(mine)
        for policy in sorted(filter(is_sbs, {row.key.policy for row in mine} | lost)):
            of = [row for row in mine if row.key.policy == policy]
            failed = policy in lost or not measurable(policy, of)
            if failed or disturbed:
                mine = [row for row in mine if row.key.policy != policy]
            peer_mean = best_peer(mine, policy, _mean_ms)
            mean = peer_mean or best_peer(mine, policy, _mean_ms, is_immediate)
            if mean is None and not failed and not disturbed:
                continue
            cell: dict[str, Any] = {
                "workload": workload,
                "load": load,
                "policy": policy,
                "peer": None if peer_mean is None else peer_mean[0],
                "seeds": len(of) if mean is None else len(mean[1]),
                "failed": failed,
                "disturbed": disturbed,
            }
            for kind, among in (("", is_peer), ("own_", is_immediate)):
                for name, figure in FIGURES.items():
                    found = best_peer(mine, policy, figure, among)
                    peer, ratios = found if found is not None else (None, [])
                    if name in _MORE_IS_BETTER:
                        ratios = [1 / ratio for ratio in ratios]
                    cell |= {
                        f"{kind}{name}_ratio": statistics.fmean(ratios) if ratios else None,
                        f"{kind}{name}_ratio_spread": (
                            [min(ratios), max(ratios)] if ratios else None
                        ),
                        f"{kind}{name}_peer": peer,
                    }
            out.append(cell)
    return out


def disturbed_runs(rows: Iterable[Row]) -> list[str]:
    """Which runs, of those with figures, are thrown away, and why."""
    return [
        f"{row.key.policy} at {row.key.workload} {row.key.load:g} seed {row.key.seed} "
        f"({row.disturbance})"
        for row in figures(rows)
        if row.disturbed
    ]


def ranking(rows: Sequence[Row], among: Callable[[str], bool] = is_peer) -> list[str]:
    """From best to worst: by mean TTFT over the best of each cell, averaged over cells.

    Only those that ran in all cells and answered are in it, each with the seeds that all of them
    ran with, if there are such.
    """
    cells = cells_of(rows)
    means: dict[str, list[float]] = {}
    for mine in cells.values():
        seeds: dict[str, set[int]] = {}
        for row in mine:
            if among(row.key.policy):
                seeds.setdefault(row.key.policy, set()).add(row.key.seed)
        shared = set.intersection(*seeds.values()) if seeds else set()
        for peer in seeds:
            of = [
                row
                for row in mine
                if row.key.policy == peer and (row.key.seed in shared or not shared)
            ]
            mean_ms = statistics.fmean(map(_mean_ms, of))
            if serves(of) and math.isfinite(mean_ms):
                means.setdefault(peer, []).append(mean_ms)
    whole = {peer: by_cell for peer, by_cell in means.items() if len(by_cell) == len(cells)}
    best = [min(column) for column in zip(*whole.values(), strict=True)]
    return sorted(
        whole,
        key=lambda peer: sum(ms / least for ms, least in zip(whole[peer], best, strict=True)),
    )


def failed_requests(rows: Iterable[Row], among: Callable[[str], bool]) -> int:
    """Requests that were not answered as asked."""
    rows = list(rows)
    return sum(
        row.warm_up_failed + (row.answers.failed if row.answers is not None else 0)
        for row in (*figures(rows), *without_figures(rows))
        if among(row.key.policy)
    )


def without_figures(rows: Iterable[Row]) -> list[Row]:
    """The last failure of every run that did not succeed later."""
    rows = list(rows)
    done = {row.key for row in figures(rows)}
    return list({row.key: row for row in rows if row.error and row.key not in done}.values())


def errors(rows: Iterable[Row]) -> dict[str, str]:
    """Contender -> why it, or a run of it, has no figures."""
    rows = list(rows)
    others = {row.key.policy for row in figures(rows)}
    out = {}
    for row in without_figures(rows):
        key = row.key
        if row.error == NOT_RUN and key.policy in out:
            continue
        run = f"{key.workload} {key.load:g} seed {key.seed}: "
        out[key.policy] = f"{run if key.policy in others else ''}{row.error}"
    return out


def in_order(policies: Iterable[str]) -> list[str]:
    """Contenders in the order of the field."""
    order = list(BY_NAME)
    return sorted(set(policies), key=lambda name: order.index(name) if name in order else 99)
