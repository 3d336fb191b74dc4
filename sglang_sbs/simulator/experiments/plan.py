"""``sglang-sbs simulate plan``: finds the number of prefill instances and the chunk for a
workload."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from sglang_sbs.simulator.experiments.idle_flags import refuse_idle_flags
from sglang_sbs.simulator.experiments.sweep import (
    POLICY_CONFIGS,
    SEARCHED_LOADS,
    EmptyWindowError,
    Job,
    expected_s,
    max_load,
)
from sglang_sbs.simulator.experiments.tables import ResultTable, crossed, groups, mean_of
from sglang_sbs.simulator.experiments.verdict import subject_of
from sglang_sbs.simulator.options import common
from sglang_sbs.simulator.options.cluster import add_cluster, cluster_fields
from sglang_sbs.simulator.options.common import Flag, names, run_with_progress
from sglang_sbs.simulator.parallel import Interrupted, Row, Task
from sglang_sbs.simulator.workloads.scenario import SCENARIOS, Scenario

TRACE_SEEDS = 5
"""Default number of simulated windows of a trace, each with a seed of its own."""
DEFAULT_POLICIES = "sbs,sbs_paper,eta,least_tokens,random_rank"
_CELL = ("policy", "prefill_instances", "chunk_tokens")
_SPREAD = ("max_qps_least", "max_qps_most")

_EPILOG = """\
The rate is the workload's own: a trace's mean rate, 171 QPS for paper-3k (57 per instance of the
paper's three), unless --qps is given. A trace is replayed at other rates by compressing its time,
so its bursts remain. Each seed is another window of --duration seconds of the trace, and in a trace
with bursts the result depends on the window. So the tables show the mean over seeds, and after it
the least and the most. The rows of --json have them as max_qps_least and max_qps_most.

The first lines are the answer, one for each rate, for example:
  At 171 QPS (now) sbs needs 3 prefill instances with chunk 3072 for a mean TTFT of 0.8 s; eta 3,
  random_rank more than 4.
The command searches the highest rate within the SLO for each policy, count and chunk, about nine
runs each. That takes minutes with the defaults. It prints the expected time first; Ctrl-C shows the
results so far.

examples:
  sglang-sbs simulate plan --trace requests.jsonl --slo-ttft 2 --prefill 1..4 --growth 2,4
  sglang-sbs simulate plan --scenario paper-3k --slo-ttft 0.8 --prefill 2..6 \\
      --chunks 3072,6144 --policies sbs,random_rank --plot plan.html
"""


# fmt: off
_FLAGS = (
    Flag("--prefill", "", common.instance_counts, [2, 3, 4, 5, 6],
        "prefill instances to try (2..6)", "N..M"),
    Flag("--qps", "", common.positive_number, None, "the rate to plan for (its own)"),
    Flag("--growth", "", common.numbers, [2.0], "plan for these multiples of the rate as well (2)"),
)
# fmt: on


def build_parser() -> argparse.ArgumentParser:
    what = "Find how many prefill instances a workload needs under each policy, and which chunk."
    usage = "(--trace FILE | --scenario NAME) --slo-ttft S [options]"
    parser = common.command("plan", what, _EPILOG, usage)
    workload = parser.add_mutually_exclusive_group(required=True)
    workload.add_argument(
        "--trace", type=Path, metavar="FILE", help="Mooncake jsonl, Azure csv or event log"
    )
    workload.add_argument("--scenario", help=", ".join(SCENARIOS))
    slo = "mean TTFT in seconds, of requests of which none is refused"
    parser.add_argument("--slo-ttft", type=common.positive_number, required=True, help=slo)
    common.add_all(parser, _FLAGS)
    common.add_prefill_runs(parser, DEFAULT_POLICIES)
    seeds_help = (
        "seeds per cell; of a trace each is another window of it (default "
        f"{TRACE_SEEDS} for traces, else 1)"
    )
    common.add_common(parser, default_seeds=None, seeds_help=seeds_help)
    add_cluster(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, print and write results. Return 0; 2 for bad arguments; 130 if interrupted."""
    parser = build_parser()
    args = parser.parse_args(argv)
    policies = names(args.policies or DEFAULT_POLICIES, POLICY_CONFIGS, "--policies", parser)
    if len(common.cost_words(args.cost, parser)) != 1:
        parser.error("--cost: a plan is made for one cost model")
    common.check_outputs(args, parser)
    name = args.scenario if args.trace is None else f"trace:{args.trace}"
    args.duration = args.duration or common.DURATION_S
    scenario = common.checked_scenario(args, parser, name, cluster_fields(args))
    flags = common.given(build_parser(), sys.argv[1:] if argv is None else argv)
    refuse_idle_flags(args, flags, policies, scenario, parser)
    own_qps = args.qps or scenario.trace_qps or scenario.nominal_qps
    if math.isnan(own_qps):
        parser.error(f"--qps: {name} has no rate of its own")
    args.seeds = args.seeds or (TRACE_SEEDS if name.startswith("trace:") else 1)
    jobs = _jobs(args, name, scenario, policies)
    tasks: list[Task] = [(max_load, (job, args.slo_ttft)) for job in jobs]
    own = scenario.spec.prefill_instances
    whole_s = sum(
        expected_s(scenario, job.at_load(load * job.spec["prefill_instances"] / own))
        for job in jobs
        for load in SEARCHED_LOADS
    )
    console = common.open_console()
    interrupted = False
    try:
        rows = run_with_progress(tasks, console, args.workers, whole_s)
    except EmptyWindowError as error:
        parser.error(f"--duration: {error}")
    except Interrupted as error:
        rows, interrupted = common.kept(error, len(tasks), "simulate plan"), True
    rates = [("now", own_qps)]
    rates += [(f"x {factor:g}", factor * own_qps) for factor in args.growth if factor != 1.0]
    cells = over_seeds(rows)
    tables = [capacity_table(cells, args.slo_ttft), needs_table(cells, rates)]
    sentences = verdict(cells, rates, args.slo_ttft)
    for sentence in sentences:
        console.print(sentence, highlight=False, soft_wrap=True)
    for table in tables:
        table.print(console)
    if args.plot is not None:
        from sglang_sbs.simulator.experiments import plots

        figure = plots.capacity_by_instances(cells, rates, args.slo_ttft)
        title, caption = f"Capacity plan for {name}", "Capacity by prefill instances"
        plots.write(args.plot, figure, cells, title, caption, [*sentences, *tables])
        console.print(f"written: {args.plot}")
    spread = {_cell(cell): {key: cell[key] for key in _SPREAD} for cell in cells}
    common.write_json([{**row, **spread[_cell(row)]} for row in rows], args.json, console)
    return 130 if interrupted else 0


def _jobs(
    args: argparse.Namespace, name: str, scenario: Scenario, policies: Sequence[str]
) -> list[Job]:
    """Return the jobs, fewest instances first, so that an interrupt leaves complete results for
    those."""
    chunks = args.chunks or [scenario.spec.chunk_tokens]
    each = product(args.prefill, chunks, common.seeds(args), policies)
    return [
        Job(
            *(name, policy, 1.0, seed, args.duration, args.cost),
            {**cluster_fields(args), "prefill_instances": count, "chunk_tokens": chunk},
        )
        for count, chunk, seed, policy in each
    ]


def _cell(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in _CELL)


def over_seeds(rows: Sequence[Row]) -> list[Row]:
    """Combine rows over seeds: mean, lowest and highest capacity per policy, instances and chunk. A
    cell without the seeds of others, e.g. after an interrupt, is omitted."""
    whole = max(len(mine) for mine in groups(rows, *_CELL).values())
    return [
        {
            **dict(zip(_CELL, key, strict=True)),
            "max_qps": mean_of(mine, "max_qps"),
            "max_qps_least": min(r["max_qps"] for r in mine),
            "max_qps_most": max(r["max_qps"] for r in mine),
            "seeds": len(mine),
        }
        for key, mine in groups(rows, *_CELL).items()
        if len(mine) == whole
    ]


def best_chunk(cells: Sequence[Row], policy: str, instances: int, capacity: str = "max_qps") -> Row:
    """Return the cell with the largest ``capacity`` (mean, lowest or highest over seeds); of equal
    ones the smaller chunk."""
    mine = [c for c in cells if (c["policy"], c["prefill_instances"]) == (policy, instances)]
    return max(mine, key=lambda c: (c[capacity], -c["chunk_tokens"]))


def capacity_table(cells: Sequence[Row], slo_ttft_s: float) -> ResultTable:
    """Maximum QPS by policy and instances, at the best chunk; with several seeds also the lowest
    and highest."""
    best = {at: best_chunk(cells, *at) for at in groups(cells, "policy", "prefill_instances")}
    title = f"max QPS of the cluster at mean TTFT {slo_ttft_s:g} s (at the best chunk)"
    title += _over(cells, "least-most")
    heads = {n: f"{n} instances" for n in sorted({n for _, n in best})}
    return crossed(title, "policy", heads, best, _capacity_words)


def _capacity_words(cell: Row) -> str:
    spread = f", {cell['max_qps_least']:.1f}-{cell['max_qps_most']:.1f}"
    return f"{cell['max_qps']:.1f}{spread if cell['seeds'] > 1 else ''} ({cell['chunk_tokens']})"


def _over(cells: Sequence[Row], spread: str) -> str:
    seeds = max(c["seeds"] for c in cells)
    return f": mean over {seeds} seeds, {spread}" if seeds > 1 else ""


def needed(
    cells: Sequence[Row], policy: str, rate_qps: float, capacity: str = "max_qps"
) -> Row | None:
    """Return the cell with the fewest instances, at their best chunk, that handles the rate; None
    if none of those tried does."""
    for instances in _counts(cells, policy):
        best = best_chunk(cells, policy, instances, capacity)
        if best[capacity] >= rate_qps:
            return best
    return None


def _counts(cells: Sequence[Row], policy: str) -> list[int]:
    return sorted({c["prefill_instances"] for c in cells if c["policy"] == policy})


def verdict(
    cells: Sequence[Row], rates: Sequence[tuple[str, float]], slo_ttft_s: float
) -> list[str]:
    """A sentence per rate about the instances that SBS and each other policy need."""
    subject = subject_of(cells)
    others = [name for name in dict.fromkeys(c["policy"] for c in cells) if name != subject]
    sentences = []
    for label, rate in rates:
        found = needed(cells, subject, rate)
        chunk = f" with chunk {found['chunk_tokens']}" if found is not None else ""
        words = _count_words(found, _counts(cells, subject))
        first = (
            f"At {rate:.4g} QPS ({label}) {subject} needs {words} prefill "
            f"instances{chunk} for a mean TTFT of {slo_ttft_s:g} s"
        )
        ends = [needed(cells, subject, rate, f"max_qps_{end}") for end in ("most", "least")]
        fewest, most = (_count_words(row, _counts(cells, subject)) for row in ends)
        first += f" ({fewest} to {most} by seed)" if fewest != most else ""
        rest = [
            f"{name} {_count_words(needed(cells, name, rate), _counts(cells, name))}"
            for name in others
        ]
        sentences.append(f"{first}; {', '.join(rest)}." if rest else f"{first}.")
    return sentences


def needs_table(cells: Sequence[Row], rates: Sequence[tuple[str, float]]) -> ResultTable:
    """Instances and chunk per policy and rate; if seeds differ, the fewest and the most as well."""
    table = ResultTable(
        f"prefill instances needed (chunk){_over(cells, 'fewest-most of a seed')}",
        ["policy", *(f"{label}: {rate:.4g} QPS" for label, rate in rates)],
    )
    for policy in dict.fromkeys(c["policy"] for c in cells):
        words, counts = [], _counts(cells, policy)
        for _, rate in rates:
            capacities = ("max_qps", "max_qps_most", "max_qps_least")
            found, *ends = (needed(cells, policy, rate, capacity) for capacity in capacities)
            mean, fewest, most = (_count_words(row, counts) for row in (found, *ends))
            chunk = f" ({found['chunk_tokens']})" if found is not None else ""
            words.append(f"{mean}{chunk}{f', {fewest} - {most}' if fewest != most else ''}")
        table.rows.append([policy, *words])
    return table


def _count_words(found: Row | None, counts: Sequence[int]) -> str:
    if found is None:
        return f"more than {counts[-1]}"
    fewest = found["prefill_instances"] == counts[0] > 1
    return f"{found['prefill_instances']}{' or fewer' if fewest else ''}"
