"""``sglang-sbs simulate``: policies against each other in simulated time.

Owns the command line, the progress display and the tables. Runs are :mod:`.sweep`'s, pictures
:mod:`.plots`'s.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sglang_sbs.simulator.cost import COSTS
from sglang_sbs.simulator.decode_runs import DECODE_POLICIES, DecodeJob, run_decode
from sglang_sbs.simulator.replay import replay
from sglang_sbs.simulator.scenario import SCENARIOS, ScenarioError, make_scenario
from sglang_sbs.simulator.sweep import POLICY_CONFIGS, Job, Row, max_load, run_all, run_job
from sglang_sbs.simulator.workload import TraceError

DEFAULT_POLICIES = "sbs,sbs_paper,eta,least_tokens,round_robin,random_rank"

_EXAMPLE = f"""\
scenarios: {", ".join(SCENARIOS)}
policies:  {", ".join(POLICY_CONFIGS)}; for paper-decode {", ".join(DECODE_POLICIES)}

examples:
  sglang-sbs simulate paper-3k --loads 0.4,0.6,0.8,1.0 --seeds 3 --plot ttft.png
  sglang-sbs simulate paper-3k --max-qps --slo-ttft 0.4 --chunks 2048,3072,4096,6144
  sglang-sbs simulate trace:requests.jsonl --policies sbs,eta --loads 0.6,0.8
  sglang-sbs simulate paper-decode --seeds 3
  sglang-sbs simulate --replay router.events      re-run a log of --sbs-event-log, bit for bit
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line of ``sglang-sbs simulate``."""
    parser = argparse.ArgumentParser(
        prog="sglang-sbs simulate",
        description="Simulate a PD cluster that is driven by the router's own scheduler.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", nargs="?", help="what to simulate (see below)")
    parser.add_argument("--policies", help=f"comma-separated (default {DEFAULT_POLICIES})")
    parser.add_argument(
        "--loads", default="0.6,0.8,1.0", help="shares of the scenario's nominal rate"
    )
    parser.add_argument("--seeds", type=int, default=1, help="seeds per cell (default 1)")
    parser.add_argument("--first-seed", type=int, default=1, help="(default 1)")
    parser.add_argument(
        "--cost", default="mixed", help=f"cost models: {', '.join(COSTS)} (default mixed)"
    )
    parser.add_argument("--latency-ms", type=float, default=5.0, help="dispatch latency (5)")
    parser.add_argument("--jitter", type=float, default=0.0, help="sigma of pass times (0)")
    parser.add_argument("--gap-ms", type=float, default=0.0, help="engine gap between passes (0)")
    parser.add_argument("--prefill", type=int, default=3, help="prefill instances (3)")
    parser.add_argument("--dp", type=int, default=8, help="DP ranks per prefill instance (8)")
    parser.add_argument("--chunks", help="C_chunk per rank, comma-separated (the scenario's)")
    parser.add_argument("--duration", type=float, default=80.0, help="simulated seconds (80)")
    parser.add_argument("--max-qps", action="store_true", help="search the capacity at the SLO")
    parser.add_argument("--slo-ttft", type=float, help="mean TTFT in seconds (the scenario's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw TTFT by load (png, svg)")
    parser.add_argument("--replay", type=Path, metavar="LOG", help="re-run a router's event log")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run; exit code 2 for bad arguments, 1 if a replay differs."""
    parser = build_parser()
    args = parser.parse_args(argv)
    console = Console()
    if args.replay is not None:
        return _replay(args.replay, console)
    if args.scenario is None:
        parser.error(f"name a scenario: {', '.join(SCENARIOS)} (or --replay LOG)")
    try:
        loads = [float(word) for word in args.loads.split(",")]
        chunks = [int(word) for word in args.chunks.split(",")] if args.chunks else [None]
    except ValueError as error:
        parser.error(f"--loads and --chunks are comma-separated numbers: {error}")
    decode = args.scenario == "paper-decode"
    known = DECODE_POLICIES if decode else POLICY_CONFIGS
    default = ",".join(DECODE_POLICIES) if decode else DEFAULT_POLICIES
    policies = (args.policies or default).split(",")
    costs = args.cost.split(",")
    for words, allowed, flag in ((policies, known, "--policies"), (costs, COSTS, "--cost")):
        unknown = [word for word in words if word not in allowed]
        if unknown:
            parser.error(f"{flag}: {unknown[0]!r} is not one of {', '.join(allowed)}")
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    if decode:
        rows = _run([(run_decode, (DecodeJob(p, s),)) for p in policies for s in seeds], console)
        _print_decode(rows, policies, console)
    else:
        try:
            scenario = make_scenario(args.scenario)
        except (ScenarioError, TraceError) as error:
            parser.error(str(error))
        spec: dict[str, Any] = {
            "dispatch_latency_s": args.latency_ms / 1e3,
            "launch_gap_s": args.gap_ms / 1e3,
            "pass_jitter": args.jitter,
            "prefill_instances": args.prefill,
            "dp_size": args.dp,
        }
        jobs: list[tuple[Callable[..., Row], tuple[Any, ...]]] = []
        slo_s = args.slo_ttft or scenario.slo_ttft_s
        for cost in costs:
            for chunk in chunks:
                shape = spec if chunk is None else {**spec, "chunk_tokens": chunk}
                for seed in seeds:
                    for policy in policies:
                        if args.max_qps:
                            job = Job(args.scenario, policy, 1.0, seed, args.duration, cost, shape)
                            jobs.append((max_load, (job, slo_s)))
                            continue
                        for load in loads:
                            job = Job(args.scenario, policy, load, seed, args.duration, cost, shape)
                            jobs.append((run_job, (job,)))
        rows = _run(jobs, console)
        if args.max_qps:
            _print_capacity(rows, policies, costs, console)
        else:
            _print_loads(rows, policies, costs, loads, console)
            if args.plot is not None:
                from sglang_sbs.simulator.plots import plot_ttft

                plot_ttft(rows, args.plot)
                console.print(f"written: {args.plot}")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(orjson.dumps(rows, option=orjson.OPT_INDENT_2))
        console.print(f"written: {args.json}")
    return 0


def _run(jobs: Sequence[tuple[Callable[..., Row], tuple[Any, ...]]], console: Console) -> list[Row]:
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task("simulating", total=len(jobs))
        return run_all(jobs, lambda _row: progress.advance(task))


def _mean(rows: Sequence[Row], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def _print_loads(
    rows: Sequence[Row],
    policies: Sequence[str],
    costs: Sequence[str],
    loads: Sequence[float],
    console: Console,
) -> None:
    for cost in costs:
        table = Table(title=f"mean / p99 TTFT in s, chunk use; cost {cost}")
        table.add_column("policy")
        for load in loads:
            table.add_column(f"load {load:g}", justify="right")
        for policy in policies:
            cells = []
            for load in loads:
                mine = [
                    r for r in rows if (r["policy"], r["cost"], r["load"]) == (policy, cost, load)
                ]
                late = sum(r["unfinished"] for r in mine)
                cells.append(
                    f"{_mean(mine, 'ttft_mean_s'):.3f}/{_mean(mine, 'ttft_p99_s'):.2f} "
                    f"{_mean(mine, 'chunk_utilization'):.0%}" + (" (saturated)" if late else "")
                )
            table.add_row(policy, *cells)
        console.print(table)


def _print_capacity(
    rows: Sequence[Row], policies: Sequence[str], costs: Sequence[str], console: Console
) -> None:
    for cost in costs:
        slo = rows[0]["slo_ttft_s"]
        table = Table(title=f"max QPS at mean TTFT {slo:g} s; cost {cost}")
        chunks = sorted({row["chunk_tokens"] for row in rows})
        table.add_column("policy")
        for chunk in chunks:
            table.add_column(f"chunk {chunk}", justify="right")
        for policy in policies:
            cells = []
            for chunk in chunks:
                key = (policy, cost, chunk)
                mine = [r for r in rows if (r["policy"], r["cost"], r["chunk_tokens"]) == key]
                cells.append(f"{_mean(mine, 'max_qps'):.1f}")
            table.add_row(policy, *cells)
        console.print(table)


def _print_decode(rows: Sequence[Row], policies: Sequence[str], console: Console) -> None:
    table = Table(title="KV tokens per decode rank, throughput against round robin")
    for column in ("policy", "band (+-1 sd)", "CV", "peak", "largest batch", "tokens/s", "gain"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    reference = [r for r in rows if r["policy"] == "round_robin"]
    base = _mean(reference, "tokens_per_s") if reference else float("nan")
    for policy in policies:
        mine = [r for r in rows if r["policy"] == policy]
        table.add_row(
            policy,
            f"{_mean(mine, 'kv_sigma_low') / 1e3:.0f}K-{_mean(mine, 'kv_sigma_high') / 1e3:.0f}K",
            f"{_mean(mine, 'kv_cv'):.1%}",
            f"{_mean(mine, 'kv_peak') / 1e3:.0f}K",
            f"{_mean(mine, 'batch_max'):.1f}",
            f"{_mean(mine, 'tokens_per_s'):.0f}",
            f"{_mean(mine, 'tokens_per_s') / base - 1:+.1%}",
        )
    console.print(table)


def _replay(path: Path, console: Console) -> int:
    try:
        result = replay(path)
    except (OSError, ValueError) as error:
        console.print(f"[red]{error}[/]", highlight=False)
        return 2
    if result.difference:
        console.print(f"[red]differs[/] at event {result.events}: {result.difference}")
        return 1
    console.print(
        f"{result.events} events, {result.commands} commands: all decisions reproduced exactly"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
