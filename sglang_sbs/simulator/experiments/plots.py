"""Pictures of simulated results. Needs matplotlib (the ``sim`` extra)."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from sglang_sbs.policy_looks import colours_of
from sglang_sbs.simulator.cluster.decode import DecodeOutcome
from sglang_sbs.simulator.cluster.outcome import Outcome, PassRecord
from sglang_sbs.simulator.cluster.spec import InstanceSpec
from sglang_sbs.simulator.experiments.page import Picture, policies_table, write_page
from sglang_sbs.simulator.experiments.tables import ResultTable, groups, mean_of
from sglang_sbs.simulator.parallel import Row

Rows = Sequence[Row]
_Panels = tuple[Figure, list[Axes]]
_DPI = 110
_GANTT_S = 4.0
_BOX = 0.84
"""Height of a full chunk in the timeline; the lines are 1 apart."""
_COMPUTED, _WAITED, _FREE, _IDLE = "tab:blue", "#f4b183", "white", "gainsboro"


def save(figure: Figure, to: Path | io.BytesIO, kind: str | None = None) -> None:
    """Write a picture, in the format of the suffix or of this kind; forget the figure."""
    if isinstance(to, Path):
        to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=_DPI, format=kind)
    pyplot.close(figure)


def png_of(figure: Figure) -> bytes:
    """The picture as PNG; forgets the figure."""
    buffer = io.BytesIO()
    save(figure, buffer, "png")
    return buffer.getvalue()


def write(
    path: Path, figure: Figure, rows: Rows, title: str, caption: str, *parts: ResultTable | str
) -> None:
    """A picture; or, where the name ends in html, a page with it, ``parts``, and a word on each
    policy of ``rows``."""
    if path.suffix != ".html":
        save(figure, path)
        return
    policies = policies_table(row["policy"] for row in rows)
    write_page(path, title, [*parts, Picture(caption, png_of(figure)), policies])


def _axes(rows: int, columns: int, width: float, height: float, **more: Any) -> _Panels:
    size = (width * columns, height * rows)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=size, squeeze=False, constrained_layout=True, **more
    )
    return figure, list(axes.flat)


def ttft_by_load(
    rows: Rows, x: str = "load", x_label: str = "load (share of the nominal rate)"
) -> Figure:
    """Mean TTFT above, p99 below, both by load (the field ``x``); a column per scenario, cost and
    chunk size."""
    panels = list(groups(rows, "scenario", "cost", "chunk_tokens").items())
    colours = colours_of(row["policy"] for row in rows)
    figure, axes = _axes(2, len(panels), 6.5, 3.8, sharey="row")
    for index, axis in enumerate(axes):
        panel, shown = panels[index % len(panels)]
        key, name = (("ttft_mean_s", "mean"), ("ttft_p99_s", "p99"))[index // len(panels)]
        for (policy,), mine in groups(shown, "policy").items():
            loads = sorted({r[x] for r in mine})
            values = [mean_of([r for r in mine if r[x] == load], key) for load in loads]
            width = 2.5 if policy == "sbs" else 1.3
            axis.plot(loads, values, "o-", label=policy, color=colours[policy], linewidth=width)
        axis.set_xlabel(x_label)
        axis.set_ylabel(f"{name} TTFT in s")
        axis.yaxis.set_tick_params(labelleft=True)
        axis.set_yscale("log")
        # Powers of ten alone would leave most of these axes with one label or none.
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
        axis.set_title(f"{panel[0]}, cost {panel[1]}, chunk {panel[2]}: {name}")
    axes[0].legend()
    return figure


def capacity_by_chunk(rows: Rows) -> Figure:
    """Max QPS at the SLO per policy, grouped by chunk size; a panel per cost model."""
    costs = groups(rows, "cost")
    figure, axes = _axes(1, len(costs), 7, 5, sharey="row")
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
        axis.legend()
    return figure


def decode_summary(rows: Rows) -> Figure:
    """KV band and throughput per decode policy."""
    policies = groups(rows, "policy")
    names = [policy for (policy,) in policies]
    colours = colours_of(names)
    figure, (band, speed) = _axes(1, 2, 7, 4.5)
    for position, ((policy,), mine) in enumerate(policies.items()):
        keys = ("kv_sigma_low", "kv_sigma_high", "kv_peak", "tokens_per_s")
        low, high, peak, tokens = (mean_of(mine, key) for key in keys)
        band.bar(position, (high - low) / 1e3, 0.6, bottom=low / 1e3, color=colours[policy])
        band.plot(position, peak / 1e3, "k_", markersize=20)
        speed.bar(position, tokens, 0.6, color=colours[policy])
    for axis in (band, speed):
        axis.set_xticks(range(len(names)), names, rotation=20)
    band.set_ylabel("KV tokens per rank in K: mean -/+ 1 sd, peak")
    speed.set_ylabel("tokens/s")
    return figure


def kv_bands(outcomes: Mapping[str, DecodeOutcome]) -> Figure:
    """KV load of the decode DP ranks over time: every rank, their mean, and the band of one sd. All
    panels show the same seconds, as many as the fastest run has."""
    figure, axes = _axes(len(outcomes), 1, 11, 2.6)
    colours = colours_of(outcomes)
    top = 1.05 * max(max(o.kv_max) for o in outcomes.values()) / 1e3
    last_s = min(o.bands[-1][0] - o.bands[0][0] for o in outcomes.values())
    for axis, (name, outcome) in zip(axes, outcomes.items(), strict=True):
        start_s = outcome.bands[0][0]
        times = [time_s - start_s for time_s, _ in outcome.bands]
        for rank in zip(*(kv for _, kv in outcome.bands), strict=True):
            axis.plot(times, [kv / 1e3 for kv in rank], color="grey", linewidth=0.4, alpha=0.6)
        pairs = list(zip(outcome.kv_mean, outcome.kv_sd, strict=True))
        low, high = ([(mean + side * sd) / 1e3 for mean, sd in pairs] for side in (-1, 1))
        axis.fill_between(times, low, high, alpha=0.4, color=colours[name])
        axis.plot(times, [mean / 1e3 for mean in outcome.kv_mean], color=colours[name])
        row = outcome.row()
        axis.set_title(
            f"{name}: {row['kv_sigma_low'] / 1e3:.0f}K to {row['kv_sigma_high'] / 1e3:.0f}K, "
            f"peak {row['kv_peak'] / 1e3:.0f}K, {row['tokens_per_s']:.0f} tokens/s",
            fontsize=9,
        )
        axis.set_xlim(0, last_s)
        axis.set_ylim(0, top)
        axis.set_ylabel("KV in K tokens")
    axes[-1].set_xlabel("time in s; grey: every DP rank, line: their mean, band: mean -/+ 1 sd")
    return figure


def pass_timeline(outcomes: Mapping[str, Outcome], shapes: Mapping[str, InstanceSpec]) -> Figure:
    """Gantt chart of some seconds from the middle of each run; a line per prefill instance.

    A box is a forward pass, as high as a full chunk on every DP rank. Filled is what the ranks
    computed on average, above it what they waited for the heaviest rank at the barrier.
    """
    figure, axes = _axes(len(outcomes), 1, 12, 2.4)
    for axis, (name, outcome) in zip(axes, outcomes.items(), strict=True):
        arrived_s = outcome.requests[-1].arrived_s if outcome.requests else 0.0
        from_s = max(0.0, arrived_s / 2)
        for place, (instance, shape) in enumerate(shapes.items()):
            axis.barh(place, _GANTT_S, _BOX, facecolor=_IDLE)
            for one in outcome.passes:
                left_s, width_s = one.start_s - from_s, one.end_s - one.start_s
                if one.instance != instance or left_s + width_s < 0 or left_s > _GANTT_S:
                    continue
                mean = one.tokens / shape.capacity_tokens
                heaviest = max(one.rank_tokens) / shape.chunk_tokens
                for height, colour in ((1.0, _FREE), (heaviest, _WAITED), (mean, _COMPUTED)):
                    box = (place + _BOX / 2 * (1 - height), width_s, _BOX * height, left_s)
                    axis.barh(*box, facecolor=colour, edgecolor="dimgrey", linewidth=0.5)
        axis.set_yticks(range(len(shapes)), list(shapes))
        axis.set_ylim(len(shapes) - 0.45, -0.55)
        axis.set_xlim(0, _GANTT_S)
        axis.set_title(f"{name}: {_timeline_figures(outcome, len(shapes))}", fontsize=9)
    axes[-1].set_xlabel("time in s")
    handles = [
        Patch(facecolor=_COMPUTED, label="computed, mean of the ranks"),
        Patch(facecolor=_WAITED, label="bubble: ranks wait for the heaviest one"),
        Patch(facecolor=_FREE, edgecolor="dimgrey", label="rest of the chunk: shorter pass"),
        Patch(facecolor=_IDLE, label="bubble: instance idle"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=9)
    return figure


def _timeline_figures(outcome: Outcome, instances: int) -> str:
    ttft_s = [r.ttft_s for r in outcome.requests if not math.isnan(r.ttft_s)]
    passes: Sequence[PassRecord] = outcome.passes
    busy_s = sum(p.end_s - p.start_s for p in passes)
    if not ttft_s or not busy_s:
        return "nothing computed"
    tokens = sum(p.tokens for p in passes)
    first_s, last_s = min(p.start_s for p in passes), max(p.end_s for p in passes)
    return (
        f"mean TTFT {statistics.fmean(ttft_s):.2f} s, {len(passes)} passes of "
        f"{busy_s / len(passes):.2f} s and {tokens / len(passes):.0f} tokens, "
        f"idle {max(0.0, 1 - busy_s / (instances * (last_s - first_s))):.0%}"
    )


def capacity_by_instances(
    rows: Rows, rates_qps: Sequence[tuple[str, float]], slo_ttft_s: float
) -> Figure:
    """Max QPS at the SLO by number of prefill instances, each policy at its best chunk, from the
    least to the most of any seed, with a horizontal line for every rate the workload has or will
    have."""
    figure, (axis,) = _axes(1, 1, 8, 5.5)
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
        axis.annotate(f"{label}: {rate:.4g} QPS", (0.01, rate), xycoords=("axes fraction", "data"))
    axis.set_xticks(sorted({r["prefill_instances"] for r in rows}))
    axis.set_xlabel("prefill instances")
    axis.set_ylabel(f"max QPS at mean TTFT {slo_ttft_s:g} s, best chunk")
    axis.set_ylim(bottom=0)
    axis.legend()
    return figure
