"""The tables of a comparison: column titles and cells of text, whatever they are printed as."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from benchmarks.compare_routers.agents import AGENTIC, AGENTS_PER_RANK
from benchmarks.compare_routers.results.measure import Answers, Engines
from benchmarks.compare_routers.results.ratios import (
    cells_of,
    errors,
    in_order,
    ratio_cells,
    serves,
)
from benchmarks.compare_routers.results.rows import Row
from sglang_sbs.simulator.experiments.tables import ResultTable

WORSE_FROM = 1.02
"""A ratio above this is called worse: two percent is what runs of the same thing differ by."""


def verdict(ratio: float) -> str:
    """``better``, ``equal`` or ``worse``."""
    if ratio > WORSE_FROM:
        return "worse"
    return "better" if ratio < 1 / WORSE_FROM else "equal"


def ratio_table(rows: Sequence[Row]) -> ResultTable:
    out = []
    for cell in ratio_cells(rows):
        # Without a peer among the contenders there is nothing to judge by.
        worst = [ratio for ratio in (cell["mean_ratio"], cell["p99_ratio"]) if ratio is not None]
        judged = verdict(max(worst)) if worst else ""
        if cell["disturbed"]:
            judged = "disturbed"
        if cell["failed"]:
            judged = "failed"
        out.append(
            [
                cell["workload"],
                f"{cell['load']:g}",
                cell["policy"],
                _ratio(cell, "mean"),
                cell["peer"] or "",
                _ratio(cell, "p99"),
                cell["p99_peer"] or "",
                _ratio(cell, "kv_band"),
                _ratio(cell, "active_ranks"),
                _ratio(cell, "max_over_mean"),
                _ratio(cell, "own_mean"),
                _ratio(cell, "own_p99"),
                cell["own_mean_peer"] or "",
                str(cell["seeds"]),
                judged,
            ]
        )
    return ResultTable(
        "SBS against the best peer of each cell (ratio, least and most over seeds)",
        [
            *("workload", "load", "policy"),
            *("mean TTFT", "best peer", "p99 TTFT", "best peer (p99)"),
            *("decode KV band", "active ranks", "max / mean"),
            *("mean, own", "p99, own", "best of own", "seeds", ""),
        ],
        out,
    )


RATIO_LEGEND = (
    "Below 1 is better; of active ranks above 1. The best peer is the one SBS looks worst "
    "against, for every figure anew, of those that ran with all seeds. "
    "own: the same against our own immediate policies, which have this relay too. "
    f"worse: mean or p99 above {WORSE_FROM:g}; better: both below 1/{WORSE_FROM:g}. "
    "disturbed: in a run of the cell the host lag was too large a part of a pass, or the loop "
    "of a router of ours stood still."
)


def _ratio(cell: dict[str, object], name: str) -> str:
    ratio, spread = cell[f"{name}_ratio"], cell[f"{name}_ratio_spread"]
    if not isinstance(ratio, float) or not isinstance(spread, list):
        return "-"
    if cell["seeds"] == 1:
        return f"{ratio:.2f}"
    return f"{ratio:.2f} ({spread[0]:.2f}-{spread[1]:.2f})"


Column = tuple[str, Callable[[Answers, Engines], float], str]

COLUMNS: tuple[Column, ...] = (
    ("TTFT mean", lambda a, _: a.ttft_ms.mean, ".0f"),
    ("p50", lambda a, _: a.ttft_ms.p50, ".0f"),
    ("p99", lambda a, _: a.ttft_ms.p99, ".0f"),
    ("TPOT", lambda a, _: a.tpot_ms.mean, ".1f"),
    ("TPOT p99", lambda a, _: a.tpot_ms.p99, ".1f"),
    ("E2E mean", lambda a, _: a.e2e_ms.mean, ".0f"),
    ("E2E p99", lambda a, _: a.e2e_ms.p99, ".0f"),
    ("goodput/s", lambda a, _: a.goodput_qps, ".1f"),
    ("failed", lambda a, _: a.failed, ".0f"),
    ("passes", lambda _, e: e.passes.passes, ".0f"),
    ("chunk use", lambda _, e: e.passes.chunk_utilization, ".0%"),
    ("active ranks", lambda _, e: e.passes.active_rank_count, ".2f"),
    ("max / mean", lambda _, e: e.passes.max_over_mean, ".2f"),
    ("idle", lambda _, e: e.passes.idle_share, ".1%"),
    ("bubble", lambda _, e: e.bubble_beyond_share, ".1%"),
    ("KV ±σ", lambda _, e: e.kv.sigma_tokens, ".0f"),
)


def cell_tables(rows: Sequence[Row]) -> list[ResultTable]:
    """Every contender of every cell; means over seeds."""
    tables = []
    for (workload, load), mine in cells_of(rows).items():
        out: list[list[str]] = []
        for policy in in_order(row.key.policy for row in mine):
            of = [row for row in mine if row.key.policy == policy]
            pairs = [(r.answers, r.engines) for r in of if r.answers and r.engines]
            words = [_mean_text([get(a, e) for a, e in pairs], form) for _, get, form in COLUMNS]
            words.append(_mean_text([row.host_lag_ms for row in of], ".0f"))
            words.append(_mean_text([row.cpu_ms_per_request for row in of], ".1f"))
            name = policy if serves(of) else f"{policy} (fails)"
            out.append([name, str(len(of)), *words])
        qps = statistics.fmean(row.qps for row in mine)
        titles = (title for title, _, _ in COLUMNS)
        tables.append(
            ResultTable(
                f"{workload} at load {load:g} ({qps:.1f} requests/s)",
                ["contender", "seeds", *titles, "host lag", "router CPU"],
                out,
            )
        )
    return tables


def _mean_text(values: Sequence[float], form: str) -> str:
    """The mean of all; a dash if one is not known, as it would be of other runs than its row."""
    known = bool(values) and all(map(math.isfinite, values))
    return format(statistics.fmean(values), form) if known else "-"


AGENTS_LEGEND = (
    "tokens/s: of prompts and answers, cached or not. computed / optimum: prompt tokens that were "
    "computed over those that no turn before had, first turns included."
)

LEGEND = (
    "Times in ms. goodput: requests per second answered within the SLO. passes, chunk use (tokens "
    "of the chunk capacity of the passes), active ranks (DP ranks with tokens in a pass), max / "
    "mean (tokens of the heaviest rank over the mean of all), idle (time without a pass), bubble "
    "(time lost in pauses of less than half a pass, beyond the engine's own pause between two "
    "passes): prefill, between the first and last tenth of the load, from EndForward. KV ±σ: "
    "standard deviation over decode ranks of the KV tokens in use, mean over time. A dash: not "
    "known of every seed (bubble: a run with fewer than three pauses that began with work left). "
    "fails: of its requests more than 1 % failed; it is in no ratio. host lag: "
    "how late a sleep of 20 ms ended in the client, 99th percentile; where it is large, other work "
    "had the cores, and requests left that much later than planned, which is in no time of theirs. "
    "router CPU: of all its processes, per request."
)


def agents_table(rows: Sequence[Row]) -> ResultTable | None:
    """Return TTFT, E2E and throughput of a closed loop of agents; None if none was run."""
    out = []
    for (workload, load), mine in cells_of(rows).items():
        if workload != AGENTIC:
            continue
        for policy in in_order(row.key.policy for row in mine):
            of = [row for row in mine if row.key.policy == policy]
            waits = [row.answers for row in of if row.answers]
            out.append(
                [
                    policy,
                    f"{load:g}",
                    _mean_text([answers.ttft_ms.mean for answers in waits], ".0f"),
                    _mean_text([answers.e2e_ms.mean for answers in waits], ".0f"),
                    _mean_text([row.qps for row in of], ".2f"),
                    _mean_text([row.tokens_per_s for row in of], ".0f"),
                    _mean_text([row.computed_over_optimum for row in of], ".2f"),
                ]
            )
    if not out:
        return None
    return ResultTable(
        f"Agents in a closed loop: {AGENTS_PER_RANK} per prefill rank at load 1",
        [
            *("contender", "load", "TTFT mean", "E2E mean", "turns/s", "tokens/s, instance"),
            "computed / optimum",
        ],
        out,
    )


def error_table(rows: Sequence[Row]) -> ResultTable | None:
    """Contenders without figures; ``None`` if all have some."""
    out = [[policy, " ".join(why.split())[:400]] for policy, why in sorted(errors(rows).items())]
    return ResultTable("Not compared", ["contender", "why"], out) if out else None
