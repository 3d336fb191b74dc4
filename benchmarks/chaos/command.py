"""``scripts/chaos``: real faults on a real SGLang cluster (CPU, virtual GPU time) under load.

Owns the command line and the table. Must not know how a fault is made or measured.
"""

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

from benchmarks.chaos.faults import ALL, BY_NAME
from benchmarks.chaos.ha.command import main as ha_main
from benchmarks.chaos.run import DP_SIZE, Fault, FaultResult, run_fault, running_site
from benchmarks.command_line import command_parser
from sglang_sbs.cluster.local import ClusterStartError
from sglang_sbs.demo.load import Workload
from sglang_sbs.demo.virtual_cluster import (
    CHUNK_TOKENS,
    add_tp_argument,
    attention_tp_of,
    progress_printer,
)

_FILE_WIDTH = 180

_EXAMPLE = """\
examples:
  scripts/chaos                                          all of them, about 10 minutes on two cores
  scripts/chaos --faults kill-decode,lose-100 --seconds 5

faults:
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line of ``scripts/chaos``."""
    parser = command_parser(
        "chaos",
        "Break things under load and count what clients see of it. Exit code 1 if an "
        "accepted request was left without an answer or the router's books kept something.",
        _EXAMPLE + "\n".join(f"  {fault.name:<15} {fault.summary}" for fault in ALL),
    )
    parser.add_argument("--faults", default=",".join(BY_NAME), help="comma-separated (default all)")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of load after each fault (default 10)"
    )
    parser.add_argument("--qps", type=float, default=8.0, help="requests per second (default 8)")
    parser.add_argument("--prefill", type=int, default=3, help="prefill instances (default 3)")
    parser.set_defaults(dp=DP_SIZE)
    parser.add_argument(
        "--ha",
        action="store_true",
        help="break schedulers and front ends on two addresses instead: scripts/chaos --ha --help",
    )
    add_tp_argument(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one object per fault here")
    parser.add_argument("--out", type=Path, default=Path("out/chaos"), help="logs (out/chaos)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the faults; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--ha" in words:
        return ha_main([word for word in words if word != "--ha"])
    parser = build_parser()
    args = parser.parse_args(words)
    names = args.faults.split(",")
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        parser.error(f"--faults: {unknown[0]!r} is not one of {', '.join(BY_NAME)}")
    if not (math.isfinite(args.seconds) and args.seconds > 0 and 0 < args.qps <= 100):
        parser.error("--seconds must be greater than 0, --qps between 0 and 100")
    if args.prefill < 2:
        parser.error("--prefill must be at least 2: one of them is stopped")
    try:
        args.attention_tp = attention_tp_of(args)
    except ValueError as error:
        parser.error(str(error))
    # The table needs room, also in a file.
    console = Console() if sys.stdout.isatty() else Console(width=_FILE_WIDTH)
    try:
        results = asyncio.run(_run(args, [BY_NAME[name] for name in names], console))
    except (ClusterStartError, RuntimeError) as error:
        console.print(f"[red]{error}[/]", highlight=False)
        return 2
    console.print(_table(results))
    for result in results:
        for note in result.notes:
            console.print(f"{result.fault}: {note}", markup=False, highlight=False)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    return 0 if all(result.passed for result in results) else 1


async def _run(
    args: argparse.Namespace, faults: Sequence[Fault], console: Console
) -> list[FaultResult]:
    args.out.mkdir(parents=True, exist_ok=True)
    workload = Workload(qps=args.qps, requests=1, max_prompt_tokens=CHUNK_TOKENS, max_new_tokens=40)
    results = []
    async with running_site(
        args.prefill, args.out, progress_printer(console), args.attention_tp
    ) as site:
        for fault in faults:
            result = await run_fault(site, fault, workload=workload, tail_s=args.seconds)
            results.append(result)
            word = "passed" if result.passed else "FAILED"
            console.print(f"{fault.name}: {word}, {_outcome(result)}", highlight=False)
    return results


def _outcome(result: FaultResult) -> str:
    parts = [f"{result.answered} of {result.accepted} answered"]
    parts += [f"{count} x {label}" for label, count in sorted(result.errors.items())]
    if result.cut_off:
        parts.append(f"{result.cut_off} cut off")
    if result.unanswered:
        parts.append(f"{result.unanswered} unanswered")
    if result.left_over:
        parts.append(f"left over: {result.left_over}")
    return ", ".join(parts)


def _table(results: Sequence[FaultResult]) -> Table:
    table = Table(title="what clients saw")
    for column in ("fault", "accepted", "answered", "errors", "cut off", "unanswered"):
        table.add_column(column, justify="left" if column in ("fault", "errors") else "right")
    for column in ("streams then: ended/error/cut", "lasted s", "recovered s"):
        table.add_column(column, justify="right")
    table.add_column("TTFT ms before (worst)", justify="right")
    table.add_column("during (worst)", justify="right")
    table.add_column("left over", justify="right")
    for one in results:
        streams = one.streams
        table.add_row(
            one.fault,
            str(one.accepted),
            str(one.answered),
            "\n".join(f"{count} x {label}" for label, count in sorted(one.errors.items())),
            str(one.cut_off),
            str(one.unanswered),
            f"{streams.running}: {streams.answered}/{streams.error}/{streams.cut_off}",
            f"{one.fault_s:.1f}",
            "no" if one.recovery_s is None else f"{one.recovery_s:.1f}",
            f"{1e3 * one.ttft_before_s:.0f} ({1e3 * one.ttft_worst_before_s:.0f})",
            f"{1e3 * one.ttft_during_s:.0f} ({1e3 * one.ttft_worst_s:.0f})",
            str(sum(one.left_over.values())),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
