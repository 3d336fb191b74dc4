"""Pictures of simulated results. Owns the drawing; needs matplotlib (the ``sim`` extra).

Must not know where the results come from or what page they go to.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sglang_sbs.simulator.cluster import Outcome
from sglang_sbs.simulator.decode import DecodeOutcome

Rows = Sequence[Mapping[str, Any]]
_DPI = 110
_GANTT_S = 4.0


def save(figure: Figure, path: Path) -> None:
    """Write a picture, in the format of the suffix, and forget the figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)


def png_of(figure: Figure) -> bytes:
    """The picture as PNG; forgets the figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    pyplot.close(figure)
    return buffer.getvalue()


def _axes(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    figure, axes = pyplot.subplots(
        rows,
        columns,
        figsize=(width * columns, height * rows),
        squeeze=False,
        constrained_layout=True,
    )
    return figure, list(axes.flat)


def ttft_by_load(rows: Rows) -> Figure:
    """Mean (solid) and p99 (dotted) TTFT by load; a panel per scenario, cost and chunk size."""
    panels = list(dict.fromkeys((r["scenario"], r["cost"], r["chunk_tokens"]) for r in rows))
    figure, axes = _axes(1, len(panels), 7, 5)
    for axis, panel in zip(axes, panels, strict=True):
        shown = [r for r in rows if (r["scenario"], r["cost"], r["chunk_tokens"]) == panel]
        for policy in dict.fromkeys(row["policy"] for row in shown):
            mine = [r for r in shown if r["policy"] == policy]
            loads = sorted({r["load"] for r in mine})
            mean, p99 = (
                [statistics.fmean(r[key] for r in mine if r["load"] == load) for load in loads]
                for key in ("ttft_mean_s", "ttft_p99_s")
            )
            (line,) = axis.plot(loads, mean, marker="o", label=policy)
            axis.plot(loads, p99, ":", color=line.get_color())
        axis.set_xlabel("load (share of the nominal rate)")
        axis.set_ylabel("TTFT in s: mean (solid), p99 (dotted)")
        axis.set_yscale("log")
        axis.set_title(f"{panel[0]}, cost {panel[1]}, chunk {panel[2]}")
        axis.legend()
    return figure


def capacity_by_chunk(rows: Rows) -> Figure:
    """Max QPS at the SLO per policy, grouped by chunk size; a panel per cost model."""
    costs = list(dict.fromkeys(row["cost"] for row in rows))
    figure, axes = _axes(1, len(costs), 7, 5)
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    chunks = sorted({row["chunk_tokens"] for row in rows})
    for axis, cost in zip(axes, costs, strict=True):
        for position, policy in enumerate(policies):
            heights = [
                statistics.fmean(
                    r["max_qps"]
                    for r in rows
                    if (r["policy"], r["cost"], r["chunk_tokens"]) == (policy, cost, chunk)
                )
                for chunk in chunks
            ]
            width = 0.8 / len(policies)
            places = [i - 0.4 + (position + 0.5) * width for i in range(len(chunks))]
            axis.bar(places, heights, width, label=policy)
        axis.set_xticks(range(len(chunks)), [str(chunk) for chunk in chunks])
        axis.set_xlabel("chunk (tokens per DP rank and pass)")
        axis.set_ylabel(f"max QPS at mean TTFT {rows[0]['slo_ttft_s']:g} s")
        axis.set_title(f"{rows[0]['scenario']}, cost {cost}")
        axis.legend()
    return figure


def decode_summary(rows: Rows) -> Figure:
    """KV band and throughput per decode policy."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    figure, (band, speed) = _axes(1, 2, 7, 4.5)
    for position, policy in enumerate(policies):
        mine = [r for r in rows if r["policy"] == policy]
        low, high, peak, tokens = (
            statistics.fmean(r[key] for r in mine)
            for key in ("kv_sigma_low", "kv_sigma_high", "kv_peak", "tokens_per_s")
        )
        band.bar(position, (high - low) / 1e3, 0.6, bottom=low / 1e3)
        band.plot(position, peak / 1e3, "k_", markersize=20)
        speed.bar(position, tokens, 0.6)
    for axis in (band, speed):
        axis.set_xticks(range(len(policies)), policies, rotation=20)
    band.set_ylabel("KV tokens per rank in K: mean -/+ 1 sd, peak")
    speed.set_ylabel("tokens/s")
    return figure


def kv_bands(outcomes: Mapping[str, DecodeOutcome]) -> Figure:
    """KV load of the decode DP ranks over time: every rank, and the band of one sd."""
    figure, axes = _axes(len(outcomes), 1, 11, 2.6)
    top = max(max(o.kv_max) for o in outcomes.values()) / 1e3
    for axis, (name, outcome) in zip(axes, outcomes.items(), strict=True):
        start_s = outcome.bands[0][0]
        times = [time_s - start_s for time_s, _ in outcome.bands]
        ranks = list(zip(*(kv for _, kv in outcome.bands), strict=True))
        for rank in ranks:
            axis.plot(times, [kv / 1e3 for kv in rank], color="grey", linewidth=0.3, alpha=0.5)
        pairs = list(zip(outcome.kv_mean, outcome.kv_sd, strict=True))
        axis.fill_between(
            times,
            [(mean - sd) / 1e3 for mean, sd in pairs],
            [(mean + sd) / 1e3 for mean, sd in pairs],
            alpha=0.5,
            color="tab:green" if name.startswith("sbs") else "tab:red",
        )
        row = outcome.row()
        axis.set_title(
            f"{name}: {row['kv_sigma_low'] / 1e3:.0f}K to {row['kv_sigma_high'] / 1e3:.0f}K "
            f"(mean -/+ 1 sd over ranks), peak {row['kv_peak'] / 1e3:.0f}K",
            fontsize=9,
        )
        axis.set_ylim(0, top)
        axis.set_ylabel("KV in K tokens")
    axes[-1].set_xlabel("seconds")
    return figure


def pass_timeline(outcomes: Mapping[str, Outcome], capacity_tokens: int) -> Figure:
    """Gantt chart of some seconds from the middle of each run.

    A box is a forward pass; its coloured height is the share of the instance's chunk capacity it
    used. What stays light is computed for nothing, what stays white is a bubble.
    """
    figure, axes = _axes(len(outcomes), 1, 12, 2.2)
    for axis, (name, outcome) in zip(axes, outcomes.items(), strict=True):
        instances = sorted({instance for instance, *_ in outcome.passes})
        arrived_s = outcome.requests[-1].arrived_s if outcome.requests else 0.0
        from_s = max(0.0, arrived_s / 2)
        shown = [p for p in outcome.passes if p[2] >= from_s and p[1] <= from_s + _GANTT_S]
        for instance, start_s, end_s, tokens in shown:
            base = instances.index(instance) - 0.4
            span = [(start_s - from_s, end_s - start_s)]
            axis.broken_barh(span, (base, 0.8), facecolors="lightsteelblue", edgecolor="grey")
            used = 0.8 * min(1.0, tokens / capacity_tokens)
            axis.broken_barh(span, (base, used), facecolors="tab:blue")
        fill = statistics.fmean(p[3] / capacity_tokens for p in shown) if shown else 0.0
        axis.set_yticks(range(len(instances)), instances)
        axis.set_xlim(0, _GANTT_S)
        axis.set_title(
            f"{name}: forward passes, filled to the share of the chunk used "
            f"(mean {fill:.0%}); white gaps are bubbles",
            fontsize=9,
        )
    axes[-1].set_xlabel("seconds")
    return figure


def capacity_by_instances(
    rows: Rows, rates_qps: Sequence[tuple[str, float]], slo_ttft_s: float
) -> Figure:
    """Max QPS at the SLO by number of prefill instances, each policy at its best chunk, with a
    horizontal line for every rate the workload has or will have."""
    figure, (axis,) = _axes(1, 1, 8, 5.5)
    for policy in dict.fromkeys(row["policy"] for row in rows):
        mine = [r for r in rows if r["policy"] == policy]
        counts = sorted({r["prefill_instances"] for r in mine})
        best = [max(r["max_qps"] for r in mine if r["prefill_instances"] == n) for n in counts]
        axis.plot(counts, best, marker="o", label=policy)
    for label, rate in rates_qps:
        axis.axhline(rate, linestyle="--", color="grey")
        axis.annotate(f"{label}: {rate:.4g} QPS", (0.01, rate), xycoords=("axes fraction", "data"))
    axis.set_xticks(sorted({r["prefill_instances"] for r in rows}))
    axis.set_xlabel("prefill instances")
    axis.set_ylabel(f"max QPS at mean TTFT {slo_ttft_s:g} s, best chunk")
    axis.set_ylim(bottom=0)
    axis.legend()
    return figure
