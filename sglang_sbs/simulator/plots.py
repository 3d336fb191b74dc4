"""Pictures of simulated results. Owns the drawing; needs matplotlib (the ``sim`` extra)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def plot_ttft(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Mean (solid) and p99 (dotted) TTFT by load, a panel per cost model, a line per policy."""
    costs = list(dict.fromkeys(row["cost"] for row in rows))
    figure, axes = pyplot.subplots(
        1, len(costs), figsize=(7 * len(costs), 5), squeeze=False, constrained_layout=True
    )
    for axis, cost in zip(axes[0], costs, strict=True):
        for policy in dict.fromkeys(row["policy"] for row in rows):
            mine = [r for r in rows if (r["policy"], r["cost"]) == (policy, cost)]
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
        axis.set_title(f"{rows[0]['scenario']}, cost {cost}")
        axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
