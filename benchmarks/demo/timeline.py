"""A picture of the passes of every prefill instance over time, one policy above the other.

Needs matplotlib (the ``sim`` extra).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.demo.runs import Run

_WINDOW_PASSES = 16


def draw_timeline(runs: Sequence[Run], path: Path) -> bool:
    """Draw some passes towards the end of each run, as many seconds of all; False if matplotlib is
    not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    figure, axes = pyplot.subplots(
        len(runs), 1, figsize=(12, 2.6 * len(runs)), squeeze=False, constrained_layout=True
    )
    lengths_s = [a_pass.end_s - a_pass.start_s for run in runs for a_pass in run.engines.passes]
    window_s = _WINDOW_PASSES * statistics.median(lengths_s or [1.0])
    colours = pyplot.get_cmap("YlGnBu")
    for axis, run in zip(axes[:, 0], runs, strict=True):
        passes = run.engines.passes
        names = sorted({a_pass.instance for a_pass in passes})
        if not passes:
            axis.set_title(f"{run.label}: no pass was reported")
            continue
        last_s = max(a_pass.end_s for a_pass in passes)
        from_s = max(min(a_pass.start_s for a_pass in passes), last_s - 2 * window_s)
        for a_pass in passes:
            if a_pass.end_s < from_s or a_pass.start_s > from_s + window_s:
                continue
            capacity = run.engines.chunk_tokens * len(a_pass.tokens)
            for rank, tokens in enumerate(a_pass.tokens):
                height = 0.8 / len(a_pass.tokens)
                fill = tokens / run.engines.chunk_tokens if capacity else 0.0
                axis.broken_barh(
                    [(a_pass.start_s - from_s, a_pass.end_s - a_pass.start_s)],
                    (names.index(a_pass.instance) - 0.4 + rank * height, height * 0.95),
                    facecolors=colours(min(1.0, fill)) if tokens else "white",
                    edgecolor="grey",
                    linewidth=0.5,
                )
        axis.set_yticks(range(len(names)), names)
        axis.set_xlim(0, window_s)
        axis.set_xlabel("time in s")
        axis.set_title(
            f"{run.label}: forward passes, one stripe per DP rank "
            "(pale: few tokens, dark: full chunk, white: idle rank; gaps are bubbles)",
            fontsize=9,
        )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
