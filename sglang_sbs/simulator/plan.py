"""``sglang-sbs simulate plan``: how many prefill instances, with what chunk, a workload needs.

Owns the question, the table and the picture. The capacity search is :mod:`.sweep`'s.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from sglang_sbs.simulator.arguments import (
    add_common,
    instance_counts,
    integers,
    names,
    not_negative,
    numbers,
    open_console,
    positive,
    positive_number,
    run_with_progress,
    write_json,
)
from sglang_sbs.simulator.cost import COSTS
from sglang_sbs.simulator.scenario import ScenarioError, make_scenario
from sglang_sbs.simulator.sweep import POLICY_CONFIGS, WARM_UP_S, Job, Row, Task, max_load
from sglang_sbs.simulator.tables import ResultTable, mean_of
from sglang_sbs.simulator.workload import TraceError

DEFAULT_POLICIES = "sbs,sbs_paper,eta,least_tokens,random_rank"

_EPILOG = """\
The rate is the workload's own: a trace's mean rate, 171 QPS for paper-3k (57 per instance of the
paper's three), unless --qps says otherwise. A trace is replayed at other rates by compressing its
time, so its bursts stay what they are.

examples:
  sglang-sbs simulate plan --trace requests.jsonl --slo-ttft 2 --prefill 1..4 --growth 2,4
  sglang-sbs simulate plan --scenario paper-3k --slo-ttft 0.8 --prefill 2..6 \\
      --chunks 3072,6144 --policies sbs,random_rank --plot plan.html
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line of ``sglang-sbs simulate plan``."""
    parser = argparse.ArgumentParser(
        prog="sglang-sbs simulate plan",
        description="How many prefill instances and what chunk a workload needs under each policy.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    workload = parser.add_mutually_exclusive_group(required=True)
    workload.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake jsonl or Azure csv")
    workload.add_argument("--scenario", help="paper-3k, paper-5k or paper-long")
    parser.add_argument(
        "--slo-ttft", type=positive_number, required=True, help="mean TTFT in seconds"
    )
    parser.add_argument(
        "--prefill",
        type=instance_counts,
        default=[2, 3, 4, 5, 6],
        metavar="N..M",
        help="prefill instances to try (2..6)",
    )
    parser.add_argument(
        "--chunks", type=integers, help="C_chunk per rank, comma-separated (the scenario's)"
    )
    parser.add_argument("--dp", type=positive, default=8, help="DP ranks per prefill instance (8)")
    parser.add_argument("--policies", default=DEFAULT_POLICIES, help=f"({DEFAULT_POLICIES})")
    parser.add_argument("--qps", type=positive_number, help="the rate to plan for (its own)")
    parser.add_argument(
        "--growth", type=numbers, default=[2.0], help="plan for these multiples of it, too (2)"
    )
    parser.add_argument("--latency-ms", type=not_negative, default=5.0, help="dispatch latency (5)")
    parser.add_argument(
        "--duration",
        type=positive_number,
        default=80.0,
        help=f"simulated seconds, {WARM_UP_S:g} of them warm-up (80)",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="picture (png, svg) or page (html)"
    )
    add_common(parser, cost="mixed")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; exit code 2 for bad arguments."""
    parser = build_parser()
    args = parser.parse_args(argv)
    policies = names(args.policies, POLICY_CONFIGS, "--policies", parser)
    costs = names(args.cost, COSTS, "--cost", parser)
    if len(costs) != 1:
        parser.error("--cost: a plan is made for one cost model")
    if args.duration <= WARM_UP_S:
        parser.error(f"--duration must be longer than the warm-up of {WARM_UP_S:g} s")
    if args.plot is not None and args.plot.suffix not in (".png", ".svg", ".html"):
        parser.error(f"--plot {args.plot}: the name must end in .png, .svg or .html")
    name = args.scenario if args.trace is None else f"trace:{args.trace}"
    try:
        scenario = make_scenario(name)
    except (ScenarioError, TraceError) as error:
        parser.error(str(error))
    tasks: list[Task] = []
    for chunk in args.chunks or [scenario.spec.chunk_tokens]:
        for instances in args.prefill:
            spec = {
                "prefill_instances": instances,
                "dp_size": args.dp,
                "chunk_tokens": chunk,
                "dispatch_latency_s": args.latency_ms / 1e3,
            }
            for seed in range(args.first_seed, args.first_seed + args.seeds):
                for policy in policies:
                    job = Job(name, policy, 1.0, seed, args.duration, costs[0], spec)
                    tasks.append((max_load, (job, args.slo_ttft)))
    console = open_console()
    rows = run_with_progress(tasks, console, args.workers)
    own_qps = args.qps or scenario.workload_qps
    rates = [("now", own_qps)]
    rates += [(f"x {factor:g}", factor * own_qps) for factor in args.growth if factor != 1.0]
    cells = over_seeds(rows)
    tables = [capacity_table(cells, args.slo_ttft), needs_table(cells, rates)]
    for table in tables:
        table.print(console)
    if args.plot is not None:
        _plot(args.plot, name, cells, rates, tables, args.slo_ttft)
        console.print(f"written: {args.plot}")
    if args.json is not None:
        write_json(rows, args.json, console)
    return 0


def over_seeds(rows: Sequence[Row]) -> list[Row]:
    """One row per policy, instances and chunk: the mean capacity over seeds."""
    keys = dict.fromkeys((r["policy"], r["prefill_instances"], r["chunk_tokens"]) for r in rows)
    cells = []
    for policy, instances, chunk in keys:
        key = (policy, instances, chunk)
        mine = [r for r in rows if (r["policy"], r["prefill_instances"], r["chunk_tokens"]) == key]
        cells.append(
            {
                "policy": policy,
                "prefill_instances": instances,
                "chunk_tokens": chunk,
                "max_qps": mean_of(mine, "max_qps"),
            }
        )
    return cells


def best_chunk(cells: Sequence[Row], policy: str, instances: int) -> Row:
    """The cell with the largest capacity; the smaller chunk if two are equal."""
    mine = [c for c in cells if (c["policy"], c["prefill_instances"]) == (policy, instances)]
    return max(mine, key=lambda c: (c["max_qps"], -c["chunk_tokens"]))


def capacity_table(cells: Sequence[Row], slo_ttft_s: float) -> ResultTable:
    """Max QPS by policy and instances, at the best chunk."""
    counts = sorted({c["prefill_instances"] for c in cells})
    table = ResultTable(
        f"max QPS of the cluster at mean TTFT {slo_ttft_s:g} s (at the best chunk)",
        ["policy", *(f"{n} instances" for n in counts)],
    )
    for policy in dict.fromkeys(c["policy"] for c in cells):
        best = [best_chunk(cells, policy, n) for n in counts]
        table.rows.append([policy, *(f"{b['max_qps']:.1f} ({b['chunk_tokens']})" for b in best)])
    return table


def needed(cells: Sequence[Row], policy: str, rate_qps: float) -> Row | None:
    """The fewest instances (at their best chunk) that carry the rate; None if none tried does."""
    for instances in sorted({c["prefill_instances"] for c in cells}):
        best = best_chunk(cells, policy, instances)
        if best["max_qps"] >= rate_qps:
            return best
    return None


def needs_table(cells: Sequence[Row], rates: Sequence[tuple[str, float]]) -> ResultTable:
    """Instances and chunk per policy and rate."""
    counts = sorted({c["prefill_instances"] for c in cells})
    table = ResultTable(
        "prefill instances needed (chunk)",
        ["policy", *(f"{label}: {rate:.4g} QPS" for label, rate in rates)],
    )
    for policy in dict.fromkeys(c["policy"] for c in cells):
        words = []
        for _, rate in rates:
            found = needed(cells, policy, rate)
            if found is None:
                words.append(f"more than {counts[-1]}")
                continue
            fewest = found["prefill_instances"] == counts[0] > 1
            words.append(
                f"{found['prefill_instances']}{' or fewer' if fewest else ''} "
                f"({found['chunk_tokens']})"
            )
        table.rows.append([policy, *words])
    return table


def _plot(
    path: Path,
    name: str,
    cells: Sequence[Row],
    rates: Sequence[tuple[str, float]],
    tables: Sequence[ResultTable],
    slo_ttft_s: float,
) -> None:
    from sglang_sbs.simulator import plots
    from sglang_sbs.simulator.page import Part, Picture, write_page

    figure = plots.capacity_by_instances(cells, rates, slo_ttft_s)
    if path.suffix != ".html":
        plots.save(figure, path)
        return
    parts: list[Part] = [*tables, Picture("Capacity by prefill instances", plots.png_of(figure))]
    write_page(path, f"Capacity plan for {name}", parts)
