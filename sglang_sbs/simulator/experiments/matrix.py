"""``sglang-sbs simulate matrix``: one policy against the best of the others, regime by regime.

Runs are :mod:`.sweep`'s.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_sbs.simulator.cluster.cost import cost_name
from sglang_sbs.simulator.experiments.sweep import POLICY_CONFIGS, Job, run_job
from sglang_sbs.simulator.experiments.tables import ResultTable, mean_of
from sglang_sbs.simulator.options.common import (
    add_common,
    add_overlap,
    check_outputs,
    cost_words,
    names,
    open_console,
    run_with_progress,
    seeds,
    write_json,
)
from sglang_sbs.simulator.parallel import Row, Task
from sglang_sbs.simulator.workloads.arrivals import TraceError
from sglang_sbs.simulator.workloads.scenario import WARM_UP_S, ScenarioError, make_scenario

DEFAULT_RIVALS = "eta,sbs_paper,least_tokens,round_robin"
MEAN_LIMIT, P99_LIMIT = 1.02, 1.05
"""A cell is lost above these ratios to the best rival, taken separately for mean and p99."""

_EPILOG = f"""\
A cell compares the policy with the best of its rivals in that cell, for the mean and for the p99
separately, each averaged over seeds. It is lost above {MEAN_LIMIT:g} x the best mean or
{P99_LIMIT:g} x the best p99.

examples:
  sglang-sbs simulate matrix --regimes load,jitter --seeds 3
  sglang-sbs simulate matrix --seeds 3 --first-seed 401 --cost mixed,table \\
      --trace azure-code.csv --trace conversation.jsonl --json matrix.json
"""


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    scenario: str
    load: float
    duration_s: float = 80.0
    spec: dict[str, Any] = field(default_factory=dict)


_SECONDS_BY_INSTANCES = {1: 140.0, 2: 100.0, 6: 60.0, 12: 45.0}
"""About as many requests in each."""

_NETWORKS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((f"{ms} ms apart", {"dispatch_serial_s": ms / 1e3, "dispatch_jitter": 0.0}) for ms in (1, 2)),
    *(
        (
            f"jitter {jitter:g} of {ms} ms",
            {"dispatch_serial_s": 0.0, "dispatch_jitter": jitter, "dispatch_latency_s": ms / 1e3},
        )
        for jitter in (0.15, 0.3, 0.5)
        for ms in (5, 20)
    ),
    ("1 ms apart, arrivals in clumps", {"dispatch_serial_s": 1e-3, "burstiness": 4.0}),
)
"""How requests of a batch come apart on their way; engines without a gang gate."""

_ONE_SLOW: tuple[dict[str, Any], ...] = ({}, {}, {"speed": 0.3})

REGIMES: dict[str, list[Cell]] = {
    "load": [
        Cell(f"load {load:g}", "paper-3k", load, 160.0 if load < 0.4 else 80.0)
        for load in (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
    ],
    "latency": [
        Cell(f"{ms} ms, load {load:g}", "paper-3k", load, spec={"dispatch_latency_s": ms / 1e3})
        for ms in (0, 20, 50)
        for load in (0.2, 0.6, 1.0, 1.2)
    ],
    "network": [
        Cell(f"{label}, load {load:g}", "paper-3k", load, spec={"gang_gate_s": 0.0, **spec})
        for label, spec in _NETWORKS
        for load in (0.4, 0.6, 0.8, 1.0)
    ],
    "jitter": [
        Cell(f"jitter {jitter:g}, load {load:g}", "paper-3k", load, spec={"pass_jitter": jitter})
        for jitter in (0.15, 0.3)
        for load in (0.2, 0.6, 1.0)
    ],
    "instances": [
        Cell(
            f"{count} instances, load {load:g}",
            "paper-3k",
            load,
            seconds,
            {"prefill_instances": count},
        )
        for count, seconds in _SECONDS_BY_INSTANCES.items()
        for load in (0.2, 0.6, 1.0, 1.2)
    ],
    "uneven": [
        Cell(f"{label}, load {load:g}", "paper-3k", load, spec={"instances": instances})
        for label, instances in (
            ("one half as fast, dp 4", ({}, {}, {"dp_size": 4, "speed": 0.5})),
            ("chunks 2K 3K 6K", ({}, {"chunk_tokens": 6144}, {"chunk_tokens": 2048})),
        )
        for load in (0.6, 1.0)
    ],
    "signals": [
        Cell(f"{label}, load {load:g}", "paper-3k", load, spec=spec)
        for label, spec in (
            ("EndForward lost 10 %", {"endforward_loss": 0.1}),
            ("EndForward lost 50 %", {"endforward_loss": 0.5}),
            ("EndForward 50 ms late", {"endforward_delay_s": 0.05}),
            ("lengths wrong by 30 %", {"length_error": 0.3}),
        )
        for load in (0.6, 1.0)
    ],
    "long": [Cell(f"3-64K, load {load:g}", "paper-long", load, 200.0) for load in (0.2, 0.4, 0.6)]
    + [Cell("3-64K, load 0.75", "paper-long", 0.75, 200.0)],
    "fixed": [
        Cell(f"all {tokens} tokens, load {load:g}", f"fixed:{tokens}", load)
        for tokens in (1600, 2000)
        for load in (0.6, 0.8)
    ]
    + [Cell("chunk 1024, load 0.8", "paper-3k", 0.8, spec={"chunk_tokens": 1024})],
    "pages": [
        Cell(f"page 64, load {load:g}", "paper-3k", load, spec={"page_size": 64})
        for load in (0.6, 1.0, 1.1)
    ],
    "bounds": [
        *(Cell(f"64K now and then, load {load:g}", "one-long", load) for load in (0.6, 1.0)),
        *(Cell(f"on/off 0.5 s, load {load:g}", "onoff", load) for load in (0.6, 1.0)),
        *(Cell(f"chunk + 1, load {load:g}", "fixed:3073", load) for load in (0.4, 0.8)),
        *(
            Cell(f"one at 0.3 x, load {load:g}", "paper-3k", load, spec={"instances": _ONE_SLOW})
            for load in (0.6, 1.0)
        ),
        Cell("64 instances, load 0.4", "paper-3k", 0.4, 23.0, {"prefill_instances": 64}),
        *(
            Cell(f"one rank, load {load:g}", "paper-3k", load / 8, 160.0, {"dp_size": 1})
            for load in (0.6, 1.0)
        ),
    ],
}
"""``fixed``: prompts of which no two fit into a chunk, and chunks that most prompts do not fit.
``bounds``: what is at the edge of what a cluster is asked. Instances of one rank get an eighth of
the load."""
_TRACE_LOADS = (0.2, 0.4, 0.6, 0.75)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-sbs simulate matrix",
        description="Is a policy nowhere worse than any other? Cell by cell, win or lose.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--policy", default="sbs", help="the policy on trial (sbs)")
    parser.add_argument(
        "--rivals", default=DEFAULT_RIVALS, help=f"the others, comma-separated ({DEFAULT_RIVALS})"
    )
    parser.add_argument(
        "--regimes",
        default=",".join(REGIMES),
        help=f"comma-separated (all: {','.join(REGIMES)}; none: only traces)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="also this trace, compressed to several loads, without prefix caches (repeatable)",
    )
    add_overlap(parser)
    add_common(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; exit code 2 for bad arguments."""
    parser = build_parser()
    args = parser.parse_args(argv)
    check_outputs(args, parser)
    (policy,) = names(args.policy, POLICY_CONFIGS, "--policy", parser)[:1]
    rivals = names(args.rivals, POLICY_CONFIGS, "--rivals", parser)
    costs = cost_words(args.cost, parser)
    regimes = (
        [] if args.regimes == "none" else names(args.regimes, list(REGIMES), "--regimes", parser)
    )
    cells = [cell for regime in regimes for cell in REGIMES[regime]]
    for path in args.trace:
        try:
            make_scenario(f"trace:{path}")
        except (ScenarioError, TraceError) as error:
            parser.error(f"--trace: {error}")
        cells += [
            Cell(f"{path.stem}, load {load:g}", f"trace:{path}", load, 150.0, {"block_tokens": 0})
            for load in _TRACE_LOADS
        ]
    if not cells:
        parser.error("--regimes none needs a --trace")
    tasks: list[Task] = [
        (_run_cell, (cell.name, job_of(cell, one, seed, cost, overlap=args.overlap)))
        for cost in costs
        for cell in cells
        for seed in seeds(args)
        for one in dict.fromkeys([policy, *rivals])
    ]
    console = open_console()
    rows = run_with_progress(tasks, console, args.workers)
    for cost in costs:
        mine = [row for row in rows if row["cost"] == cost_name(cost)]
        results = [verdict(mine, cell.name, policy, rivals) for cell in cells]
        matrix_table(results, policy, cost_name(cost)).print(console)
        console.print(summary_of(results), highlight=False)
    if args.json is not None:
        write_json(rows, args.json, console)
    return 0


def job_of(cell: Cell, policy: str, seed: int, cost: str, *, overlap: bool = True) -> Job:
    """The run of a policy in a cell."""
    duration_s = max(cell.duration_s, WARM_UP_S + 1)
    spec = {**cell.spec, "overlap": overlap}
    return Job(cell.scenario, policy, cell.load, seed, duration_s, cost, spec)


def _run_cell(name: str, job: Job) -> Row:
    return {**run_job(job), "cell": name}


_NO_RIVAL = "none finished"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the policy did in a cell; times in seconds, means over seeds."""

    cell: str
    mean_s: float
    p99_s: float
    best_mean: tuple[str, float]
    best_p99: tuple[str, float]
    """Infinite if no rival finished."""
    unfinished: int

    @property
    def has_rival(self) -> bool:
        return math.isfinite(self.best_mean[1])

    @property
    def mean_ratio(self) -> float:
        """Its mean TTFT by that of the best rival; 0 if no rival finished."""
        return self.mean_s / self.best_mean[1]

    @property
    def p99_ratio(self) -> float:
        """Its p99 by that of the rival with the best p99."""
        return self.p99_s / self.best_p99[1]

    @property
    def lost(self) -> bool:
        """Worse than the best rival by more than the limits, or with requests left over."""
        return bool(
            self.mean_ratio > MEAN_LIMIT or self.p99_ratio > P99_LIMIT or self.unfinished > 0
        )


def verdict(rows: Sequence[Row], cell: str, policy: str, rivals: Sequence[str]) -> Verdict:
    """Of the rows of one cost. A rival that left requests unfinished is no rival."""

    def of(one: str, key: str) -> float:
        mine = [r for r in rows if (r["cell"], r["policy"]) == (cell, one)]
        if one != policy and any(r["unfinished"] for r in mine):
            return math.inf
        return mean_of(mine, key)

    def best(key: str) -> tuple[str, float]:
        return min(((rival, of(rival, key)) for rival in rivals), key=lambda pair: pair[1])

    return Verdict(
        cell,
        of(policy, "ttft_mean_s"),
        of(policy, "ttft_p99_s"),
        best("ttft_mean_s"),
        best("ttft_p99_s"),
        sum(r["unfinished"] for r in rows if (r["cell"], r["policy"]) == (cell, policy)),
    )


def matrix_table(results: Sequence[Verdict], policy: str, cost: str) -> ResultTable:
    """One row per cell."""
    table = ResultTable(
        f"TTFT of {policy} against the best rival of each cell; cost {cost}",
        ["cell", "mean / p99 s", "best mean", "ratio", "best p99", "ratio", ""],
    )
    for one in results:
        table.rows.append(
            [
                one.cell,
                f"{one.mean_s:.3f} / {one.p99_s:.2f}",
                f"{one.best_mean[0]} {one.best_mean[1]:.3f}" if one.has_rival else _NO_RIVAL,
                f"{one.mean_ratio:.3f}" if one.has_rival else "",
                f"{one.best_p99[0]} {one.best_p99[1]:.2f}" if one.has_rival else _NO_RIVAL,
                f"{one.p99_ratio:.3f}" if one.has_rival else "",
                "LOST" if one.lost else "",
            ]
        )
    return table


def summary_of(results: Sequence[Verdict]) -> str:
    """Cells lost, and the geometric means of the ratios of those in which a rival finished."""
    lost = f"{sum(one.lost for one in results)} of {len(results)} cells lost"
    compared = [one for one in results if one.has_rival]
    if not compared:
        return f"{lost}; no rival finished in any"
    mean = statistics.geometric_mean(one.mean_ratio for one in compared)
    p99 = statistics.geometric_mean(one.p99_ratio for one in compared)
    return f"{lost}; geometric mean of the ratios: mean TTFT {mean:.3f}, p99 {p99:.3f}"
