"""``sglang-sbs bench``: policies side by side on the same real engines (virtual GPU)."""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.demo.cli import parse_topology, result_table, write_json
from benchmarks.demo.load import Latency, Workload
from benchmarks.demo.runs import Run
from benchmarks.demo.virtual_cluster import running_rig
from sglang_sbs.extras import without_sglang
from sglang_sbs.scheduling import policy_names
from sglang_sbs.simulator.options.common import numbers

POLICY_NAMES = ("sbs", "sbs_paper", *(p for p in policy_names() if p != "sbs"))
NO_FLOW_CONTROL = ["--sbs-n-limit", "1000000"]
"""An overload run measures waiting, not refusing."""

_EXAMPLE = """\
example:
  sglang-sbs bench --loads 0.6,0.9 --seeds 3 --json results.json
  sglang-sbs bench --policies sbs,sbs_paper --loads 1.3     passes and bubbles at saturation

The engines are SGLang on CPU whose passes take virtual GPU time, so compare policies with each
other, not with a GPU cluster. Policies take turns within each seed and load; a load is a share of
what full chunks on every rank would serve.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-sbs bench",
        description="Compare policies on a real SGLang PD cluster with virtual GPU time.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--topology", default="3P1D", help="instances (default 3P1D)")
    add("--dp", type=int, default=2, help="DP ranks per instance (default 2)")
    default, says = "sbs,sbs_paper,round_robin,least_tokens", ", ".join(POLICY_NAMES)
    add("--policies", default=default, help=f"comma-separated, of {says}")
    add("--loads", type=numbers, default=[0.6, 0.9], help="shares of capacity (default 0.6,0.9)")
    add("--seeds", type=int, default=1, help="arrival seeds per cell (default 1)")
    add("--requests", type=int, default=300, help="per run (default 300)")
    add("--json", type=Path, metavar="FILE", help="write one row per run here")
    add("--out", type=Path, default=Path("out/bench"), help="logs (out/bench)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep; exit code 1 if any request failed."""
    parser = build_parser()
    args = parser.parse_args(argv)
    policies = args.policies = args.policies.split(",")
    unknown = [p for p in policies if p not in POLICY_NAMES]
    if unknown:
        parser.error(f"--policies: {unknown[0]!r} is not one of {', '.join(POLICY_NAMES)}")
    try:
        args.topology_counts = parse_topology(args.topology)
    except ValueError as error:
        parser.error(str(error))
    if args.seeds < 1 or args.requests < 1:
        parser.error("--seeds and --requests must be greater than 0")
    if (lacking := without_sglang("bench", on_cpu=True)) is not None:
        parser.error(lacking)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    console = Console()
    rows = asyncio.run(_sweep(args, console))
    _print(rows, policies, args.loads, console)
    write_json(args.json, rows)
    return 1 if any(row["failed"] for row in rows) else 0


def policy_flags(name: str) -> list[str]:
    """Router flags of a policy as named here."""
    if name == "sbs_paper":
        return ["--policy", "sbs", "--sbs-trigger", "paper", *NO_FLOW_CONTROL]
    return ["--policy", name, *NO_FLOW_CONTROL]


async def _sweep(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    policies, loads = args.policies, args.loads
    prefill, decode = args.topology_counts
    rows = []
    async with running_rig(prefill, decode, args.dp, args.out, console) as rig:
        for load in loads:
            for seed in range(1, args.seeds + 1):
                workload = Workload(qps=load * rig.capacity_qps, requests=args.requests, seed=seed)
                # Rotating the order keeps a drift of the machine from favouring one policy.
                turn = seed % len(policies)
                for policy in (*policies[turn:], *policies[:turn]):
                    run = await rig.run(policy, policy_flags(policy), workload)
                    row = _row(run, load, workload)
                    rows.append(row)
                    console.print(
                        f"load {load:.2f} seed {seed} {policy}: mean {row['ttft_ms']['mean']:.0f} "
                        f"p99 {row['ttft_ms']['p99']:.0f} ms, {row['failed']} failed",
                        highlight=False,
                    )
    return rows


def _row(run: Run, load: float, workload: Workload) -> dict[str, Any]:
    ends_s = [one.end_s for one in run.engines.passes]
    # The ramp-up and the drain of a bounded load say nothing about the policy.
    span_s = max(ends_s) - min(ends_s) if ends_s else math.nan
    load_s = workload.requests / workload.qps
    last_s = max(ends_s, default=math.nan)
    window_s = (last_s - min(span_s, load_s) * 0.9, last_s - 0.1 * load_s)
    return {
        "policy": run.label,
        "load": load,
        "qps": workload.qps,
        "seed": workload.seed,
        "requests": len(run.samples),
        "completed": len(run.completed),
        "failed": run.failed,
        "ttft_ms": msgspec.structs.asdict(run.ttft),
        "held_ms": msgspec.structs.asdict(Latency.of(run.engines.held_s)),
        "passes": msgspec.structs.asdict(run.passes(window_s)),
        "hook_us_mean": statistics.mean(run.engines.hook_us or [math.nan]),
    }


_SHOWN_PASSES = {
    **{"passes": ".0f", "chunk_utilization": ".0%", "active_ranks": ".0%"},
    **{"gap_ms_p50": ".1f", "bubble_share": ".1%", "idle_share": ".1%"},
}


def _print(
    rows: list[dict[str, Any]], policies: Sequence[str], loads: Sequence[float], console: Console
) -> None:
    latency = result_table(
        f"TTFT, mean over seeds; ratio: {policies[0]} / this policy (min-max)",
        ["load", "policy"],
        ["mean ms", "p99 ms", "ratio of means", "failed"],
    )
    engine = result_table(
        "prefill passes between ramp-up and drain",
        ["load", "policy"],
        ["passes", "chunk use", "ranks busy", "gap ms", "bubble", "idle"],
    )
    for load in loads:
        of_load = {p: [r for r in rows if (r["policy"], r["load"]) == (p, load)] for p in policies}
        first = {row["seed"]: row["ttft_ms"]["mean"] for row in of_load[policies[0]]}
        for policy, mine in of_load.items():
            ratios = [first[r["seed"]] / r["ttft_ms"]["mean"] for r in mine]
            latency.add_row(
                f"{load:.2f}",
                policy,
                f"{statistics.mean(r['ttft_ms']['mean'] for r in mine):.0f}",
                f"{statistics.mean(r['ttft_ms']['p99'] for r in mine):.0f}",
                f"{statistics.mean(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
                str(sum(r["failed"] for r in mine)),
            )
            means = (
                format(statistics.mean(r["passes"][name] for r in mine), shown)
                for name, shown in _SHOWN_PASSES.items()
            )
            engine.add_row(f"{load:.2f}", policy, *means)
    console.print(latency)
    console.print(engine)


if __name__ == "__main__":
    sys.exit(main())
