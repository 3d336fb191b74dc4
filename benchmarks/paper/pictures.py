"""The paper's pictures of simulated runs: KV bands of decode, and a timeline of prefill passes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.decode.simulation import DecodeOutcome
from sglang_sbs.simulator.cluster.outcome import Outcome, PassRecord
from sglang_sbs.simulator.cluster.spec import InstanceSpec
from sglang_sbs.simulator.experiments.plots import panels
from sglang_sbs.simulator.experiments.policy_looks import colours_of

_GANTT_S = 4.0
_BOX = 0.84
"""Height of a full chunk in the timeline; the lines are 1 apart."""
_COMPUTED, _WAITED, _FREE, _IDLE = "tab:blue", "#f4b183", "white", "gainsboro"


def kv_bands(outcomes: Mapping[str, DecodeOutcome]) -> Figure:
    """KV load of the decode DP ranks over time: every rank, their mean, and the band of one sd. All
    panels show the same seconds, as many as the fastest run has."""
    figure, axes = panels(len(outcomes), 1, 11, 2.6)
    colours = colours_of(outcomes)
    top = 1.05 * max(outcome.row()["kv_peak"] for outcome in outcomes.values()) / 1e3
    last_s = min(o.kv[-1][0] - o.kv[0][0] for o in outcomes.values())
    for axis, (name, outcome) in zip(axes, outcomes.items(), strict=True):
        start_s = outcome.kv[0][0]
        times = [time_s - start_s for time_s, _ in outcome.kv]
        for rank in zip(*(kv for _, kv in outcome.kv), strict=True):
            axis.plot(times, [kv / 1e3 for kv in rank], color="grey", linewidth=0.4, alpha=0.6)
        means, deviations = outcome.band()
        pairs = list(zip(means, deviations, strict=True))
        low, high = ([(mean + side * sd) / 1e3 for mean, sd in pairs] for side in (-1, 1))
        axis.fill_between(times, low, high, alpha=0.4, color=colours[name])
        axis.plot(times, [mean / 1e3 for mean in means], color=colours[name])
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
    figure, axes = panels(len(outcomes), 1, 12, 2.4)
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
