"""Pictures of a comparison, as PNG in memory.

Owns the drawing; needs matplotlib (the ``sim`` extra). Must not know files or HTML.
"""

from __future__ import annotations

import io
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare_routers.results.ratios import (
    cells_of,
    in_order,
    is_immediate,
    is_sbs,
    ranking,
)
from benchmarks.compare_routers.results.rows import Row
from benchmarks.demo.passes import EngineRecord
from benchmarks.demo.runs import Run
from benchmarks.demo.timeline import draw_timeline
from sglang_sbs.simulator.experiments.policy_looks import colours_of

_DPI = 100
_COMPARED = 3
"""Rows of the timeline and lines of the KV picture."""
_TOLD_APART = 10
"""Lines of a picture that have colours: as many as can be told apart."""
_BEST_OWN = 2
"""Of them, immediate policies of ours."""
_MARKERS = "osD^vPX*<>"
_GREY = "0.75"


def pictures(rows: Sequence[Row], chunk_tokens: int) -> dict[str, bytes]:
    """Title -> PNG; empty without matplotlib. ``chunk_tokens`` 0: not known."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return {}
    out = {
        "TTFT by load": _by_load(
            pyplot,
            rows,
            {
                "mean TTFT in s": lambda r: r.answers.ttft_ms.mean / 1e3 if r.answers else 0.0,
                "p99 TTFT in s": lambda r: r.answers.ttft_ms.p99 / 1e3 if r.answers else 0.0,
            },
            log=True,
        ),
        "Chunk utilization and busy ranks by load": _by_load(
            pyplot,
            rows,
            {
                "chunk use": lambda r: r.engines.passes.chunk_utilization if r.engines else 0.0,
                "ranks busy": lambda r: r.engines.passes.active_ranks if r.engines else 0.0,
            },
            log=False,
        ),
    }
    compared = _compared(rows)
    if compared:
        out["Prefill passes"] = _timeline(compared, chunk_tokens)
        out["Decode KV band"] = _kv(pyplot, compared)
    return {title: png for title, png in out.items() if png}


def _compared(rows: Sequence[Row]) -> list[Row]:
    """First seed of the highest load: SBS, our best immediate policy, and the best peers."""
    cells = cells_of(rows)
    if not cells:
        return []
    highest = max(load for _, load in cells)
    mine = next(mine for (_, load), mine in cells.items() if load == highest)
    seed = min(row.key.seed for row in mine)
    sbs = [name for name in ("sbs", "sbs_paper") if any(r.key.policy == name for r in mine)][:1]
    names = [*sbs, *ranking(rows, is_immediate)[:1], *ranking(rows)][:_COMPARED]
    first = {row.key.policy: row for row in mine if row.key.seed == seed}
    return [first[name] for name in names if name in first]


def _png(pyplot: Any, figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    pyplot.close(figure)
    return buffer.getvalue()


def told_apart(rows: Sequence[Row]) -> list[str]:
    """The contenders that have a colour of their own, in the order of the field: all of them if
    they are few, or else SBS, our best immediate policies and the best peers."""
    names = in_order(row.key.policy for mine in cells_of(rows).values() for row in mine)
    if len(names) <= _TOLD_APART:
        return names
    best = [*filter(is_sbs, names), *ranking(rows, is_immediate)[:_BEST_OWN], *ranking(rows)]
    return in_order(best[:_TOLD_APART])


def lines_of(
    rows: Sequence[Row], get: Callable[[Row], float]
) -> dict[str, list[tuple[float, float, float, float]]]:
    """Contender -> load, and mean, least and most of a figure over seeds; those of one workload."""
    found: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        if math.isfinite(get(row)):
            found.setdefault(row.key.policy, {}).setdefault(row.key.load, []).append(get(row))
    return {
        policy: [
            (load, statistics.fmean(values), min(values), max(values))
            for load, values in sorted(found[policy].items())
        ]
        for policy in in_order(found)
    }


def _draw(
    axis: Any,
    points: Sequence[tuple[float, float, float, float]],
    *,
    thick: bool,
    colour: str,
    marker: str,
) -> Any:
    """One line with its bars; what the legend shows."""
    loads, means, least, most = _columns(points)
    below = [max(0.0, mean - low) for mean, low in zip(means, least, strict=True)]
    above = [max(0.0, high - mean) for mean, high in zip(means, most, strict=True)]
    return axis.errorbar(
        loads,
        means,
        yerr=[below, above] if any(below) or any(above) else None,
        color=colour,
        marker=marker,
        markersize=3 if colour == _GREY else 5,
        linewidth=0.7 if colour == _GREY else 2.4 if thick else 1.2,
        linestyle="-" if thick else "--",
        elinewidth=0.8,
        capsize=2.5,
        zorder=1 if colour == _GREY else 2,
    )


def _columns(points: Sequence[tuple[float, float, float, float]]) -> Iterable[tuple[float, ...]]:
    return zip(*points, strict=True)


def _draw_bars(axis: Any, lines: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    """For one load, where a line would be a point: a bar for each contender, named below."""
    for at, (policy, points) in enumerate(lines.items()):
        ((_load, mean, low, high),) = points
        axis.bar(
            at,
            mean,
            color=colours.get(policy, _GREY),
            yerr=[[mean - low], [high - mean]] if high > low else None,
            capsize=2.5,
        )
    axis.set_xticks(range(len(lines)), list(lines), rotation=40, ha="right", fontsize=7)
    axis.set_ylim(bottom=0)


def _by_load(
    pyplot: Any, rows: Sequence[Row], figures: dict[str, Callable[[Row], float]], *, log: bool
) -> bytes:
    cells = cells_of(rows)
    workloads = list(dict.fromkeys(workload for workload, _ in cells))
    if not workloads:
        return b""
    figure, axes = pyplot.subplots(
        len(workloads),
        len(figures),
        figsize=(6 * len(figures), 3.6 * len(workloads)),
        squeeze=False,
        sharey="row",
        layout="constrained",
    )
    names = told_apart(rows)
    others = len({row.key.policy for mine in cells.values() for row in mine}) - len(names)
    colours = colours_of(names)
    legend: dict[str, Any] = {}
    for line, workload in enumerate(workloads):
        for column, (title, get) in enumerate(figures.items()):
            axis = axes[line][column]
            mine = [
                row for (name, _), row_list in cells.items() if name == workload for row in row_list
            ]
            lines = lines_of(mine, get)
            axis.set_title(f"{workload}: {title}", fontsize=9)
            axis.yaxis.set_tick_params(labelleft=True)
            axis.grid(alpha=0.3)
            if len({row.key.load for row in mine}) == 1:
                _draw_bars(axis, lines, colours)
                axis.set_xlabel(f"at load {mine[0].key.load:g}", fontsize=8)
                continue
            for policy, points in lines.items():
                at = names.index(policy) if policy in names else -1
                legend[policy if at >= 0 else f"others ({others})"] = _draw(
                    axis,
                    points,
                    thick=is_sbs(policy),
                    colour=colours.get(policy, _GREY),
                    marker=_MARKERS[at] if at >= 0 else ".",
                )
            if log:
                axis.set_yscale("log")
            axis.set_xlabel("load (share of full-chunk capacity)", fontsize=8)
    if not legend:
        return _png(pyplot, figure)
    figure.legend(
        [legend[label] for label in in_order(legend)],
        in_order(legend),
        loc="outside right upper",
        fontsize=7,
        title="mean over seeds;\nbars: least and most",
        title_fontsize=7,
    )
    return _png(pyplot, figure)


def _timeline(rows: Sequence[Row], chunk_tokens: int) -> bytes:
    most = [max(one.tokens) for row in rows if row.trace is not None for one in row.trace.passes]
    chunk_tokens = chunk_tokens or max(most, default=1)
    runs = [
        Run(
            f"{row.key.policy} ({row.key.workload}, load {row.key.load:g})",
            [],
            EngineRecord(passes=row.trace.passes, chunk_tokens=chunk_tokens),
        )
        for row in rows
        if row.trace is not None
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.png"
        return path.read_bytes() if runs and draw_timeline(runs, path) else b""


def _kv(pyplot: Any, rows: Sequence[Row]) -> bytes:
    figure, axes = pyplot.subplots(
        len(rows),
        1,
        figsize=(12, 2.2 * len(rows)),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for axis, row in zip(axes[:, 0], rows, strict=True):
        series = row.trace.kv if row.trace is not None else []
        times = [at_s for at_s, ranks in series if ranks]
        means = [statistics.fmean(ranks) for _, ranks in series if ranks]
        sigmas = [statistics.pstdev(ranks) for _, ranks in series if ranks]
        colour = colours_of([row.key.policy])[row.key.policy]
        axis.plot(times, means, linewidth=1, color=colour)
        axis.fill_between(
            times,
            [mean - sigma for mean, sigma in zip(means, sigmas, strict=True)],
            [mean + sigma for mean, sigma in zip(means, sigmas, strict=True)],
            alpha=0.35,
            color=colour,
        )
        axis.set_title(
            f"{row.key.policy}: KV tokens per decode rank, mean and ±1σ over ranks", fontsize=9
        )
    axes[-1][0].set_xlabel("time in s")
    return _png(pyplot, figure)
