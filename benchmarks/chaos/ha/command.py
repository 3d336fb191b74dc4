"""``scripts/chaos --ha``: the command line and the table."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.chaos.etcd_process import etcd_binary
from benchmarks.chaos.ha.faults import ALL, BY_NAME, Fault
from benchmarks.chaos.ha.run import PAUSE_LIMIT_S, HaResult, run_fault
from benchmarks.chaos.ha.site import AGREEMENTS, running_site
from benchmarks.command_line import command_parser
from sglang_sbs.cluster.local import ClusterStartError
from sglang_sbs.cluster.readiness import NotReadyError
from sglang_sbs.demo.load import Workload
from sglang_sbs.demo.virtual_cluster import CHUNK_TOKENS, progress_printer

_FILE_WIDTH = 160
_EXAMPLE = """\
examples:
  scripts/chaos --ha --json out/ha.json                 all of them, about 6 minutes on two cores
  scripts/chaos --ha --faults kill-scheduler,split-brain

faults:
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line of ``scripts/chaos --ha``."""
    parser = command_parser(
        "chaos --ha",
        "Two front ends and two schedulers, each a process tree of its own on 127.0.0.1 and "
        "127.0.0.2, on a real cluster: break some of them under load and count what clients see. "
        "Clients ask the other front end when theirs is gone, as behind a load balancer. Exit "
        f"code 1 if a request was lost, one waited {PAUSE_LIMIT_S:.0f} s or longer, or the books "
        "kept something.",
        _EXAMPLE + "\n".join(f"  {fault.name:<15} {fault.summary}" for fault in ALL),
    )
    parser.add_argument("--faults", default=",".join(BY_NAME), help="comma-separated (default all)")
    parser.add_argument(
        "--election",
        choices=AGREEMENTS,
        help="how the schedulers agree: by etcd, by a Lease (a stand-in plays the Kubernetes API) "
        "or by the order in which they are named (default: etcd if it is here, else order)",
    )
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="of load after each fault (default 6)"
    )
    parser.add_argument("--qps", type=float, default=4.0, help="requests per second (default 4)")
    parser.add_argument("--prefill", type=int, default=1, help="prefill instances (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one object per fault here")
    parser.add_argument("--out", type=Path, default=Path("out/chaos-ha"), help="logs (%(default)s)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the faults; the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    names = args.faults.split(",")
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        parser.error(f"--faults: {unknown[0]!r} is not one of {', '.join(BY_NAME)}")
    if not (math.isfinite(args.seconds) and args.seconds > 0 and 0 < args.qps <= 100):
        parser.error("--seconds must be greater than 0, --qps between 0 and 100")
    agreement = args.election or ("etcd" if etcd_binary() else "order")
    if agreement == "etcd" and not etcd_binary():
        parser.error("--election etcd: there is no etcd here (Debian: apt-get install etcd-server)")
    console = Console() if sys.stdout.isatty() else Console(width=_FILE_WIDTH)
    faults = [BY_NAME[name] for name in names]
    console.print(f"the schedulers agree by: {agreement}")
    if agreement == "order":
        faults = [fault for fault in faults if not fault.needs_store]
    try:
        results = asyncio.run(_run(args, agreement, faults, console))
    except (ClusterStartError, NotReadyError, RuntimeError, TimeoutError) as error:
        console.print(f"[red]{error or 'it did not become well again in time'}[/]", highlight=False)
        return 2
    console.print(_table(results))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    return 0 if all(result.passed for result in results) else 1


async def _run(
    args: argparse.Namespace, agreement: str, faults: Sequence[Fault], console: Console
) -> list[HaResult]:
    args.out.mkdir(parents=True, exist_ok=True)
    workload = Workload(qps=args.qps, requests=1, max_prompt_tokens=CHUNK_TOKENS, max_new_tokens=40)
    results = []
    async with running_site(args.prefill, args.out, progress_printer(console), agreement) as places:
        for fault in faults:
            result = await run_fault(places, fault, workload=workload, tail_s=args.seconds)
            results.append(result)
            word = "passed" if result.passed else "FAILED"
            console.print(f"{fault.name}: {word}; {'; '.join(result.notes)}", highlight=False)
    return results


def _table(results: Sequence[HaResult]) -> Table:
    table = Table(title="what clients saw")
    for column in ("fault", "requests", "lost", "longest pause s", "before s", "asked again"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for column in ("taken over after s", "as before after s", "left over", "errors"):
        table.add_column(column, justify="left" if column == "errors" else "right")
    for one in results:
        table.add_row(
            one.fault,
            str(one.requests),
            str(one.lost),
            f"{one.longest_pause_s:.2f}",
            f"{one.longest_before_s:.2f}",
            str(one.repeated),
            "" if one.takeover_s is None else f"{one.takeover_s:.1f}",
            "no" if one.recovery_s is None else f"{one.recovery_s:.1f}",
            str(sum(one.left_over.values())),
            ", ".join(f"{count} x {label}" for label, count in sorted(one.errors.items())),
        )
    return table
