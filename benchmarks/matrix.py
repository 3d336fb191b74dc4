"""``scripts/matrix``: one policy against the best of the others, regime by regime."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.command_line import command_parser, interruptible
from sglang_sbs.simulator.cluster.cost import cost_name
from sglang_sbs.simulator.experiments.sweep import POLICY_CONFIGS, Job, run_job
from sglang_sbs.simulator.experiments.tables import ResultTable, groups, mean_of
from sglang_sbs.simulator.options import common
from sglang_sbs.simulator.options.common import names, run_with_progress
from sglang_sbs.simulator.parallel import Row, Task
from sglang_sbs.simulator.workloads.arrivals import TraceError
from sglang_sbs.simulator.workloads.scenario import WARM_UP_S, ScenarioError, make_scenario

_PROG = "scripts/matrix"
DEFAULT_RIVALS = "eta,sbs_paper,least_tokens,round_robin"
MEAN_LIMIT, P99_LIMIT = 1.02, 1.05
"""A cell is lost above these ratios to the best rival, taken separately for mean and p99."""

_EPILOG = f"""\
A cell compares the policy with the best of its rivals in that cell, for the mean and for the p99
separately, each averaged over seeds. It is lost above {MEAN_LIMIT:g} x the best mean or
{P99_LIMIT:g} x the best p99.

examples:
  scripts/matrix --regimes load,jitter --seeds 3
  scripts/matrix --seeds 3 --first-seed 401 --cost mixed,table \\
      --trace azure-code.csv --trace conversation.jsonl --json matrix.json
"""


class Cell(NamedTuple):
    name: str
    scenario: str
    load: float
    duration_s: float
    spec: dict[str, Any]


def _at(
    label: str,
    loads: Iterable[float],
    scenario: str = "paper-3k",
    duration_s: float = 80.0,
    **spec: Any,
) -> list[Cell]:
    return [Cell(f"{label}load {load:g}", scenario, load, duration_s, spec) for load in loads]


_FEW, _SOME, _MANY = (0.6, 1.0), (0.2, 0.6, 1.0), (0.2, 0.6, 1.0, 1.2)
_SECONDS_BY_INSTANCES = {1: 140.0, 2: 100.0, 6: 60.0, 12: 45.0}
_NETWORKS: dict[str, dict[str, Any]] = {
    **{f"{ms} ms apart": {"dispatch_serial_s": ms / 1e3, "dispatch_jitter": 0.0} for ms in (1, 2)},
    **{
        f"jitter {jitter:g} of {ms} ms": {
            "dispatch_serial_s": 0.0,
            "dispatch_jitter": jitter,
            "dispatch_latency_s": ms / 1e3,
        }
        for jitter, ms in product((0.15, 0.3, 0.5), (5, 20))
    },
    "1 ms apart, arrivals in clumps": {"dispatch_serial_s": 1e-3, "burstiness": 4.0},
}
"""How requests of a batch come apart on their way; engines without a gang gate."""
_UNEVEN: dict[str, tuple[dict[str, Any], ...]] = {
    "one half as fast, dp 4": ({}, {}, {"dp_size": 4, "speed": 0.5}),
    "chunks 2K 3K 6K": ({}, {"chunk_tokens": 6144}, {"chunk_tokens": 2048}),
    "2K dp 8 beside 6K dp 16": (
        *({"chunk_tokens": 2048, "dp_size": 8},) * 2,
        {"chunk_tokens": 6144, "dp_size": 16},
    ),
}
_SIGNALS: dict[str, dict[str, Any]] = {
    "EndForward lost 10 %": {"endforward_loss": 0.1},
    "EndForward lost 50 %": {"endforward_loss": 0.5},
    "EndForward 50 ms late": {"endforward_delay_s": 0.05},
    "lengths wrong by 30 %": {"length_error": 0.3},
    "lengths reported twice too long": {"length_factor": 2.0},
}

_CONDITIONS: dict[str, list[list[Cell]]] = {
    "load": [_at("", (0.05, 0.1, 0.2), duration_s=160.0), _at("", (0.4, 0.6, 0.8, 1.0, 1.2))],
    "latency": [_at(f"{ms} ms, ", _MANY, dispatch_latency_s=ms / 1e3) for ms in (0, 20, 50, 300)],
    "network": [
        _at(f"{label}, ", (0.4, 0.6, 0.8, 1.0), **{"gang_gate_s": 0.0, **spec})
        for label, spec in _NETWORKS.items()
    ],
    "jitter": [_at(f"jitter {jitter:g}, ", _SOME, pass_jitter=jitter) for jitter in (0.15, 0.3)],
    "instances": [
        _at(f"{count} instances, ", _MANY, duration_s=seconds, prefill_instances=count)
        for count, seconds in _SECONDS_BY_INSTANCES.items()
    ],
    "uneven": [_at(f"{label}, ", _FEW, instances=has) for label, has in _UNEVEN.items()],
    "signals": [_at(f"{label}, ", _FEW, **spec) for label, spec in _SIGNALS.items()],
    "pauses": [
        _at("pause 100 ms, ", (0.34, 0.68), launch_gap_s=0.1),
        _at("pauses of 30 ms per rank, ", (0.36, 0.54, 0.72), rank_pause_s=0.03),
    ],
    # What the intake of all can take at this load is 9.2 ms a request.
    "hosts": [
        *(_at(f"intake {ms:g} ms, ", (0.634,), intake_s=ms / 1e3) for ms in (5.5, 7.4, 8.3)),
        _at("intake 8.3 ms for 22 s, ", (0.634,), intake_s=0.0083, intake_until_s=22.0),
    ],
    "long": [
        _at("3-64K, ", (0.2, 0.4, 0.6, 0.75), "paper-long", 200.0),
        _at("100 tokens, some 100K, ", (0.4, 0.7), "few-long", 120.0),
    ],
    "fixed": [
        _at("all 1600 tokens, ", (0.6, 0.8), "fixed:1600"),
        _at("all 2000 tokens, ", (0.6, 0.8), "fixed:2000"),
        _at("chunk 1024, ", (0.8,), chunk_tokens=1024),
    ],
    "pages": [_at("page 64, ", (0.6, 1.0, 1.1), page_size=64)],
    "bounds": [
        _at("64K now and then, ", _FEW, "one-long"),
        _at("on/off 0.5 s, ", _FEW, "onoff"),
        _at("chunk + 1, ", (0.4, 0.8), "fixed:3073"),
        _at("one at 0.3 x, ", _FEW, instances=({}, {}, {"speed": 0.3})),
        _at("64 instances, ", (0.4,), duration_s=23.0, prefill_instances=64),
        [
            cell._replace(load=cell.load / 8)
            for cell in _at("one rank, ", _FEW, duration_s=160.0, dp_size=1)
        ],
    ],
}
REGIMES = {name: list(chain(*conditions)) for name, conditions in _CONDITIONS.items()}
"""``fixed``: prompts of which no two fit into a chunk, and chunks that most prompts do not fit.
``bounds``: what is at the edge of what a cluster is asked. Instances of one rank get an eighth of
the load."""
_TRACE_CELLS = (0.2, 0.4, 0.6, 0.75), 150.0
"""Loads, and seconds of each."""


def build_parser() -> argparse.ArgumentParser:
    what = "Is a policy nowhere worse than any other? Cell by cell, win or lose."
    parser = command_parser(_PROG, what, _EPILOG)
    parser.add_argument("--policy", default="sbs", help="the policy on trial (sbs)")
    others = f"the others, comma-separated ({DEFAULT_RIVALS})"
    parser.add_argument("--rivals", default=DEFAULT_RIVALS, help=others)
    listed = ",".join(REGIMES)
    regimes = f"comma-separated (all: {listed}; none: only traces)"
    parser.add_argument("--regimes", default=listed, help=regimes)
    traces = "also this trace, compressed to several loads, without prefix caches (repeatable)"
    parser.add_argument(
        "--trace", type=Path, action="append", default=[], metavar="FILE", help=traces
    )
    common.add_overlap(parser)
    common.add_common(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; exit code 2 for bad arguments, 130 if interrupted."""
    return interruptible(_PROG, lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    common.check_outputs(args, parser)
    (policy,) = names(args.policy, POLICY_CONFIGS, "--policy", parser)[:1]
    rivals = names(args.rivals, POLICY_CONFIGS, "--rivals", parser)
    costs = common.cost_words(args.cost, parser)
    none = args.regimes == "none"
    regimes = [] if none else names(args.regimes, list(REGIMES), "--regimes", parser)
    cells = list(chain(*(REGIMES[regime] for regime in regimes)))
    for path in args.trace:
        try:
            make_scenario(f"trace:{path}")
        except (ScenarioError, TraceError) as error:
            parser.error(f"--trace: {error}")
        loads, duration_s = _TRACE_CELLS
        cells += _at(f"{path.stem}, ", loads, f"trace:{path}", duration_s, block_tokens=0)
    if not cells:
        parser.error("--regimes none needs a --trace")
    policies = dict.fromkeys([policy, *rivals])
    tasks: list[Task] = [
        (_run_cell, (cell.name, job_of(cell, each_policy, seed, cost, overlap=args.overlap)))
        for cost, cell, seed, each_policy in product(costs, cells, common.seeds(args), policies)
    ]
    console = common.open_console()
    rows = run_with_progress(tasks, console, args.workers)
    for cost in map(cost_name, costs):
        mine = [row for row in rows if row["cost"] == cost]
        results = [verdict(mine, cell.name, policy, rivals) for cell in cells]
        console.print(summary_of(results), highlight=False)
        matrix_table(results, policy, cost).print(console)
    common.write_json(rows, args.json, console)
    return 0


def job_of(cell: Cell, policy: str, seed: int, cost: str, *, overlap: bool = True) -> Job:
    duration_s = max(cell.duration_s, WARM_UP_S + 1)
    spec = {**cell.spec, "overlap": overlap}
    return Job(cell.scenario, policy, cell.load, seed, duration_s, cost, spec)


def _run_cell(name: str, job: Job) -> Row:
    return {**run_job(job), "cell": name}


class Verdict(NamedTuple):
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
        return self.p99_s / self.best_p99[1]

    @property
    def lost(self) -> bool:
        """Worse than the best rival by more than the limits, or with requests left over."""
        worse = self.mean_ratio > MEAN_LIMIT or self.p99_ratio > P99_LIMIT
        return worse or self.unfinished > 0


def verdict(rows: Sequence[Row], cell: str, policy: str, rivals: Sequence[str]) -> Verdict:
    """Compare the policy with its rivals in one cell, from the rows of one cost. A rival that left
    requests unfinished is no rival."""
    runs = groups((row for row in rows if row["cell"] == cell), "policy")

    def of(each_policy: str, key: str) -> float:
        mine = runs[each_policy,]
        if each_policy != policy and any(r["unfinished"] for r in mine):
            return math.inf
        return mean_of(mine, key)

    def best(key: str) -> tuple[str, float]:
        return min(((rival, of(rival, key)) for rival in rivals), key=lambda pair: pair[1])

    mean, p99 = "ttft_mean_s", "ttft_p99_s"
    unfinished = sum(r["unfinished"] for r in runs[policy,])
    return Verdict(cell, of(policy, mean), of(policy, p99), best(mean), best(p99), unfinished)


def matrix_table(results: Sequence[Verdict], policy: str, cost: str) -> ResultTable:
    table = ResultTable(
        f"TTFT of {policy} against the best rival of each cell; cost {cost}",
        ["cell", "mean / p99 s", "best mean", "ratio", "best p99", "ratio", ""],
    )
    for cell in results:
        (mean, mean_s), (p99, p99_s) = cell.best_mean, cell.best_p99
        best = ["none finished", ""] * 2
        if cell.has_rival:
            best = [f"{mean} {mean_s:.3f}", f"{cell.mean_ratio:.3f}"]
            best += [f"{p99} {p99_s:.2f}", f"{cell.p99_ratio:.3f}"]
        own = f"{cell.mean_s:.3f} / {cell.p99_s:.2f}"
        table.rows.append([cell.cell, own, *best, "LOST" if cell.lost else ""])
    return table


def summary_of(results: Sequence[Verdict]) -> str:
    """Cells lost, and the geometric means of the ratios of those in which a rival finished."""
    lost = f"{sum(cell.lost for cell in results)} of {len(results)} cells lost"
    compared = [cell for cell in results if cell.has_rival]
    if not compared:
        return f"{lost}; no rival finished in any"
    mean = statistics.geometric_mean(cell.mean_ratio for cell in compared)
    p99 = statistics.geometric_mean(cell.p99_ratio for cell in compared)
    return f"{lost}; geometric mean of the ratios: mean TTFT {mean:.3f}, p99 {p99:.3f}"
