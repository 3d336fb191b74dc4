"""Pictures of simulated results. Needs matplotlib (the ``sim`` extra)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from sglang_sbs.simulator.experiments.page import Picture, policies_table, write_page
from sglang_sbs.simulator.experiments.policy_looks import colours_of
from sglang_sbs.simulator.experiments.tables import ResultTable, groups, mean_of
from sglang_sbs.simulator.parallel import Row

Rows = Sequence[Row]
_DPI = 110


def save(figure: Figure, to: Path | io.BytesIO, kind: str | None = None) -> None:
    """Write a figure in the format of the suffix or of ``kind``, and release it."""
    if isinstance(to, Path):
        to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=_DPI, format=kind)
    pyplot.close(figure)


def png_of(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    save(figure, buffer, "png")
    return buffer.getvalue()


def write(
    path: Path,
    figure: Figure,
    rows: Rows,
    title: str,
    caption: str,
    parts: Sequence[ResultTable | str],
    *last: str,
) -> None:
    """Write a figure, or an HTML page with ``parts``, the figure, a remark on each policy of
    ``rows``, and ``last``."""
    if path.suffix != ".html":
        save(figure, path)
        return
    policies = policies_table(row["policy"] for row in rows)
    write_page(path, title, [*parts, Picture(caption, png_of(figure)), policies, *last])


def panels(
    rows: int, columns: int, width: float, height: float, **more: Any
) -> tuple[Figure, list[Axes]]:
    """Create a figure of equal panels, ``width`` and ``height`` in inches each, row by row."""
    size = (width * columns, height * rows)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=size, squeeze=False, constrained_layout=True, **more
    )
    return figure, list(axes.flat)


def _legend(figure: Figure, axis: Axes) -> None:
    """Draw the legend beside the panels, where it covers no data."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")


def ttft_by_load(rows: Rows) -> Figure:
    """Plot mean TTFT above and p99 below by load; a column per scenario, cost and chunk size."""
    shapes = list(groups(rows, "scenario", "cost", "chunk_tokens").items())
    colours = colours_of(row["policy"] for row in rows)
    figure, axes = panels(2, len(shapes), 6.5, 3.8, sharey="row")
    for index, axis in enumerate(axes):
        panel, shown = shapes[index % len(shapes)]
        key, name = (("ttft_mean_s", "mean"), ("ttft_p99_s", "p99"))[index // len(shapes)]
        for (policy,), mine in groups(shown, "policy").items():
            loads = sorted({r["load"] for r in mine})
            values = [mean_of([r for r in mine if r["load"] == load], key) for load in loads]
            width = 2.5 if policy == "sbs" else 1.3
            axis.plot(loads, values, "o-", label=policy, color=colours[policy], linewidth=width)
        axis.set_xlabel("load (share of the nominal rate)")
        axis.set_ylabel(f"{name} TTFT in s")
        axis.yaxis.set_tick_params(labelleft=True)
        axis.set_yscale("log")
        # Powers of ten alone would leave most of these axes almost without labels.
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
        axis.set_title(f"{panel[0]}, cost {panel[1]}, chunk {panel[2]}: {name}")
    _legend(figure, axes[0])
    return figure


def capacity_by_chunk(rows: Rows) -> Figure:
    """Plot maximum QPS at the SLO per policy, grouped by chunk size; a panel per cost model."""
    costs = groups(rows, "cost")
    figure, axes = panels(1, len(costs), 7, 5, sharey="row")
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    colours = colours_of(policies)
    chunks = sorted({row["chunk_tokens"] for row in rows})
    width = 0.8 / len(policies)
    for axis, ((cost,), mine) in zip(axes, costs.items(), strict=True):
        cells = groups(mine, "policy", "chunk_tokens")
        for position, policy in enumerate(policies):
            heights = [mean_of(cells[policy, chunk], "max_qps") for chunk in chunks]
            places = [i - 0.4 + (position + 0.5) * width for i in range(len(chunks))]
            axis.bar(places, heights, width, label=policy, color=colours[policy])
        axis.set_xticks(range(len(chunks)), [str(chunk) for chunk in chunks])
        axis.set_xlabel("chunk (tokens per DP rank and pass)")
        axis.set_ylabel(f"max QPS at mean TTFT {rows[0]['slo_ttft_s']:g} s")
        axis.set_title(f"{rows[0]['scenario']}, cost {cost}")
    _legend(figure, axes[0])
    return figure


def capacity_by_instances(
    rows: Rows, rates_qps: Sequence[tuple[str, float]], slo_ttft_s: float
) -> Figure:
    """Plot maximum QPS at the SLO by number of prefill instances, each policy at its best chunk. A
    band shows the range over seeds, and a horizontal line each present or planned rate of the
    workload."""
    figure, (axis,) = panels(1, 1, 8, 5.5)
    colours = colours_of(row["policy"] for row in rows)
    for (policy,), mine in groups(rows, "policy").items():
        by_count = groups(mine, "prefill_instances")
        counts = sorted(count for (count,) in by_count)
        best = [max(by_count[count,], key=lambda r: r["max_qps"]) for count in counts]
        keys = ("max_qps_least", "max_qps", "max_qps_most")
        least, mean, most = ([row[key] for row in best] for key in keys)
        axis.plot(counts, mean, "o-", label=policy, color=colours[policy])
        axis.fill_between(counts, least, most, color=colours[policy], alpha=0.15)
    for label, rate in rates_qps:
        axis.axhline(rate, linestyle="--", color="grey")
        axis.annotate(
            f"{label}: {rate:.4g} QPS",
            (1.01, rate),
            xycoords=("axes fraction", "data"),
            va="center",
            annotation_clip=False,
        )
    axis.set_xticks(sorted({r["prefill_instances"] for r in rows}))
    axis.set_xlabel("prefill instances")
    axis.set_ylabel(f"max QPS at mean TTFT {slo_ttft_s:g} s, best chunk")
    axis.set_ylim(bottom=0)
    _legend(figure, axis)
    return figure
