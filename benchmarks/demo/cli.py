"""``sglang-sbs demo``: a real SGLang PD cluster on this machine, with SBS in front of it.

Brings the cluster up, sends the same load through SBS and through an immediate policy, checks
tokens on engines that really compute, and prints what happened.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import command_parser
from benchmarks.demo.kept_cluster import keep
from benchmarks.demo.load import Workload
from benchmarks.demo.runs import Run
from benchmarks.demo.timeline import draw_timeline
from benchmarks.demo.tokens import DP_SIZE, match_tokens
from benchmarks.demo.virtual_cluster import Rig, dwdp_flags, running_rig
from sglang_sbs.cluster.plan import RUST_SERVER_ENV, uses_rust_server
from sglang_sbs.console.extras import without_matplotlib, without_sglang
from sglang_sbs.scheduling import TRIGGERS, policy_names
from tools.cpu_engine.tiny_model import NUM_HEADS

LOAD = 0.8
KEPT_LOAD = 0.7
"""Most requests find an idle instance at a lower load, under any policy: nothing is gained."""

_EXAMPLE = """\
example:
  sglang-sbs demo                                  3P1D, SBS against round_robin
  sglang-sbs demo --load 0.9 --policy sbs --baseline least_tokens --json out.json
  sglang-sbs demo --tp 4 --dp 2                    each DP rank is two processes (attention TP)
  sglang-sbs demo --keep                           the cluster to look at, until Ctrl-C

The engines are SGLang itself with a tiny MoE model, DP attention and real KV transfer. Their
forward passes take the time a GPU would need (virtual GPU), so that a cluster's timing can be seen
on a small machine. A second, smaller cluster computes for real and must give the same tokens
through the router as one engine asked directly.
"""


def build_parser() -> argparse.ArgumentParser:
    what = "Bring up a real SGLang PD cluster with a tiny MoE and route through SBS."
    parser = command_parser("sglang-sbs demo", what, _EXAMPLE)
    add = parser.add_argument
    switch = partial(parser.add_argument, action="store_true")
    add("--topology", default="3P1D", help="instances, e.g. 2P1D (default 3P1D)")
    add("--dp", type=int, default=2, help="DP ranks per instance (default 2)")
    says = (
        "SGLang's --tp: processes per instance; a DP rank is N/dp of them, its attention TP "
        "(as --dp: one each)"
    )
    add("--tp", type=int, metavar="N", help=says)
    says = "engines with SGLang's Rust server: an address per DP rank (SGLANG_RUST_SERVER=1)"
    switch("--rust-server", help=says)
    switch("--dwdp", help="prefill with SGLang's DWDP (--dwdp-size): DP ranks without a barrier")
    add("--requests", type=int, default=240, help="requests per policy (default 240)")
    defaults = f"(default {LOAD}; {KEPT_LOAD} with --keep)"
    add("--load", type=float, help=f"arrival rate as a share of the prefill capacity {defaults}")
    add("--policy", choices=policy_names(), default="sbs", help="policy to show (default sbs)")
    add("--trigger", choices=TRIGGERS, default="adaptive", help="trigger of sbs (default adaptive)")
    immediate = [policy for policy in policy_names() if policy != "sbs"]
    says = "the immediate policy to compare with (default round_robin)"
    add("--baseline", choices=immediate, default="round_robin", help=says)
    add("--seed", type=int, default=1, help="seed of the arrivals (default 1)")
    add("--json", type=Path, metavar="FILE", help="write the result here")
    add("--out", type=Path, default=Path("out/demo"), help="logs and pictures (default out/demo)")
    switch("--skip-token-match", help="leave the real-compute check out")
    keeping = parser.add_argument_group("a cluster to look at")
    add = keeping.add_argument
    says = (
        "no comparison: cluster, router and dashboard under load until Ctrl-C, though engines die"
    )
    add("--keep", action="store_true", help=says)
    add("--port", type=int, default=30000, help="port of the router, with --keep (default 30000)")
    add("--prometheus-port", type=int, default=29000, help="port of its metrics (default 29000)")
    return parser


def parse_topology(text: str) -> tuple[int, int]:
    """``3P1D`` -> (3, 1). Raises: ValueError, with what to write instead."""
    match = re.fullmatch(r"(\d+)P(\d+)D", text, re.IGNORECASE)
    if match is None or "0" in match.groups():
        raise ValueError(f"--topology {text!r}: write e.g. 3P1D (three prefill, one decode)")
    return int(match[1]), int(match[2])


def attention_tp_of(tp: int | None, dp_size: int) -> int:
    """Processes of a DP rank. Raises: ValueError, with what to write instead."""
    if tp is None:
        return 1
    sizes = [str(dp_size * n) for n in range(1, NUM_HEADS + 1) if NUM_HEADS % n == 0]
    if str(tp) not in sizes:
        raise ValueError(
            f"--tp {tp}: with --dp {dp_size} it must be {', '.join(sizes[:-1])} or "
            f"{sizes[-1]}, as the tiny model has {NUM_HEADS} attention heads to share"
        )
    return tp // dp_size


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; exit code 0 only if every request completed and the tokens match."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        args.topology_counts = parse_topology(args.topology)
        if args.load is None:
            args.load = KEPT_LOAD if args.keep else LOAD
        if args.requests < 1 or args.load <= 0 or args.dp < 1:
            raise ValueError("--requests, --load and --dp must be greater than 0")
        args.attention_tp = attention_tp_of(args.tp, args.dp)
        if args.dwdp and (args.dp < 2 or args.attention_tp > 1):
            raise ValueError("--dwdp needs --dp of at least 2, and --tp as large as --dp or none")
    except ValueError as error:
        parser.error(str(error))
    _check_keep(args, parser)
    if (lacking := without_sglang("demo", on_cpu=True)) is not None:
        parser.error(lacking)
    if args.rust_server:
        os.environ[RUST_SERVER_ENV] = "1"  # engines start from this process's environment
    console = Console()
    try:
        if args.keep:
            return keep(args, _policy_flags(args.policy, args.trigger), console)
        result = asyncio.run(_demo(args, console))
    except KeyboardInterrupt:
        console.print("interrupted; everything started was stopped")
        return 130
    except (RuntimeError, OSError) as error:
        console.print(f"[red]the demo failed:[/] {error}", highlight=False)
        return 1
    if write_json(args.json, result):
        console.print(f"written: {args.json}")
    failed = sum(p["failed"] for p in result["policies"].values())
    return 0 if failed == 0 and result["token_match"] is not False else 1


def write_json(path: Path | None, result: Any) -> bool:
    """Write it, if a file was named; its folder is made."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    return path is not None


def _check_keep(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the program with code 2 for a flag that means nothing with, or without, ``--keep``."""
    meaningless, why = (
        (("requests", "baseline", "json", "skip_token_match"), "--keep compares nothing")
        if args.keep
        else (("port", "prometheus_port"), "only --keep serves at a fixed port")
    )
    for name in meaningless:
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')}: {why}; leave it out")
    for name in ("port", "prometheus_port"):
        if not 1 <= getattr(args, name) <= 65535:
            parser.error(f"--{name.replace('_', '-')} must be a number in 1..65535")
    if args.port == args.prometheus_port:
        parser.error("--port and --prometheus-port must differ")


async def _demo(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    args.out.mkdir(parents=True, exist_ok=True)
    prefill, decode = args.topology_counts
    started_s = time.monotonic()
    if (lacking := without_matplotlib()) is not None:
        console.print(f"there will be no picture of the passes: {lacking}", soft_wrap=True)
    console.print(
        f"[bold]1.[/] {args.topology}, dp={args.dp}, attention tp={args.attention_tp}, "
        f"SGLang {version('sglang')}, tiny MoE, virtual GPU"
        + (", Rust server" if uses_rust_server(os.environ) else "")
        + (", DWDP" if args.dwdp else "")
    )
    shape = {"attention_tp": args.attention_tp, "dwdp": args.dwdp}
    async with running_rig(prefill, decode, args.dp, args.out, console, **shape) as rig:
        qps = args.load * rig.capacity_qps
        workload = Workload(qps=qps, requests=args.requests, seed=args.seed)
        console.print(
            f"[bold]2.[/] {args.requests} requests at {workload.qps:.1f}/s "
            f"({args.load:.0%} of capacity) through each policy"
        )
        runs = [
            await rig.run(policy, _policy_flags(policy, args.trigger), workload)
            for policy in (args.policy, args.baseline)
        ]
        policies = {run.label: _policy_result(run, rig) for run in runs}
    _print_runs(runs, console)
    picture = args.out / "timeline.png"
    if draw_timeline(runs, picture):
        console.print(f"timeline: {picture}")
    token_match: bool | None = None
    if not args.skip_token_match:
        console.print("[bold]3.[/] tokens through the router against one engine asked directly")
        flags = dwdp_flags(DP_SIZE) if args.dwdp else []
        report = await match_tokens(args.out, console, args.attention_tp, flags)
        token_match = report.matches
        console.print(
            f"   {report.prompts} prompts over {report.pairs} prefill x decode rank pairs: "
            + ("[green]all tokens equal[/]" if token_match else f"[red]{report.difference}[/]")
        )
    console.print(f"done in {time.monotonic() - started_s:.0f} s")
    return {
        "sglang_version": version("sglang"),
        "topology": args.topology,
        "policies": policies,
        "token_match": token_match,
    }


def _policy_flags(policy: str, trigger: str) -> list[str]:
    return ["--policy", policy, *(["--sbs-trigger", trigger] if policy == "sbs" else [])]


def _policy_result(run: Run, rig: Rig) -> dict[str, Any]:
    engines, statistics = run.engines, run.passes()
    prefill, decode = rig.rank_names("p"), rig.rank_names("d")
    names = ("passes", "chunk_utilization", "active_ranks", "active_rank_count", "max_over_mean")
    return {
        "requests": len(run.samples),
        "completed": len(run.completed),
        "failed": run.failed,
        "errors": run.errors[:5],
        "ttft_ms": msgspec.structs.asdict(run.ttft),
        "prefill_ranks": {k: engines.prefill_ranks[k] for k in prefill},
        "decode_ranks": {k: engines.decode_ranks[k] for k in decode},
        "endforward": {k: engines.endforward[k] for k in (*prefill, *decode)},
        **{name: getattr(statistics, name) for name in names},
    }


def result_table(title: str, names: Sequence[str], figures: Sequence[str]) -> Table:
    """Columns of names, then of figures, whole at 80 columns: headers take several lines before
    anything is cut."""
    table = Table(title=title, show_edge=False, pad_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True)
    for figure in figures:
        table.add_column(figure, justify="right", overflow="fold")
    return table


def _print_runs(runs: Sequence[Run], console: Console) -> None:
    labels = [run.label for run in runs]
    table = result_table("requests per DP rank (EndForward messages)", ["rank"], labels)
    served = [run.engines.prefill_ranks + run.engines.decode_ranks for run in runs]
    for rank in sorted({*chain(*served)}, key=lambda name: (name[0] != "p", name)):
        columns = zip(served, runs, strict=True)
        counts = (f"{count[rank]} ({run.engines.endforward[rank]})" for count, run in columns)
        table.add_row(rank, *counts)
    console.print(table)
    summary = result_table(
        "time to first token",
        ["policy"],
        ["completed", "mean ms", "p50 ms", "p99 ms", "tokens per pass", "ranks busy"],
    )
    for run in runs:
        ttft, passes = run.ttft, run.passes()
        summary.add_row(
            run.label,
            f"{len(run.completed)}/{len(run.samples)}",
            f"{ttft.mean:.0f}",
            f"{ttft.p50:.0f}",
            f"{ttft.p99:.0f}",
            f"{passes.tokens_per_pass:.0f}",
            f"{passes.active_ranks:.0%}",
        )
    console.print(summary)
    for run in runs:
        for error in run.errors[:3]:
            console.print(f"[red]{run.label}:[/] {error}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
