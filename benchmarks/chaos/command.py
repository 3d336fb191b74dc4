"""``scripts/chaos``: real faults on a real SGLang cluster (CPU, virtual GPU time) under load."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.chaos import faults, run, tables
from benchmarks.chaos.etcd_process import etcd_binary
from benchmarks.chaos.ha import faults as ha_faults
from benchmarks.chaos.ha import run as ha_run
from benchmarks.chaos.ha.site import AGREEMENTS
from benchmarks.chaos.ha.site import running_site as running_ha_site
from benchmarks.command_line import command_parser
from benchmarks.demo.load import Workload
from benchmarks.demo.virtual_cluster import CHUNK_TOKENS, progress_printer
from sglang_sbs.cluster.local import ClusterStartError, Progress
from sglang_sbs.cluster.readiness import NotReadyError

_FILE_WIDTH = 180

Site = Callable[[argparse.Namespace, Callable[[Progress], None]], AbstractAsyncContextManager[Any]]


@dataclass(frozen=True)
class Kind:
    """A kind of faults, and how to run one. ``seconds`` and the like are defaults of flags."""

    faults: Mapping[str, Any]
    site: Site
    run_fault: Callable[..., Awaitable[Any]]
    columns: tables.Columns
    seconds: float
    qps: float
    prefill: int
    least_prefill: int
    out: Path


ENGINES = Kind(
    faults.BY_NAME,
    lambda args, progress: run.running_site(args.prefill, args.out, progress),
    run.run_fault,
    tables.OF_ENGINES,
    seconds=10.0,
    qps=8.0,
    prefill=3,
    least_prefill=2,  # one of them is stopped
    out=Path("out/chaos"),
)
SCHEDULERS = Kind(
    ha_faults.BY_NAME,
    lambda args, progress: running_ha_site(args.prefill, args.out, progress, args.election),
    ha_run.run_fault,
    tables.OF_SCHEDULERS,
    seconds=6.0,
    qps=4.0,
    prefill=1,
    least_prefill=1,
    out=Path("out/chaos-ha"),
)


def _summaries(kind: Kind) -> str:
    return "\n".join(f"  {name:<15} {fault.summary}" for name, fault in kind.faults.items())


_EPILOG = f"""\
examples:
  scripts/chaos                                          all of them, about 10 minutes on two cores
  scripts/chaos --faults kill-decode,lose-100 --seconds 5
  scripts/chaos --ha --json out/ha.json                  about 6 minutes on two cores
  scripts/chaos --ha --election order --faults kill-scheduler,split-brain

faults:
{_summaries(ENGINES)}

faults with --ha: two front ends and two schedulers, each a process tree of its own on 127.0.0.1 and
127.0.0.2; clients ask the other front end when theirs is gone, as behind a load balancer:
{_summaries(SCHEDULERS)}
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line of ``scripts/chaos``."""
    parser = command_parser(
        "chaos",
        "Break things under load and count what clients see of it. Exit code 1 if an "
        "accepted request was left without an answer or the router's books kept something; with "
        f"--ha also if one waited {ha_run.PAUSE_LIMIT_S:.0f} s or longer.",
        _EPILOG,
    )
    add = parser.add_argument
    add("--ha", action="store_true", help="break schedulers and front ends on two addresses")
    add("--faults", help="comma-separated (default all)")

    def number(name: str, of: Callable[[str], float], what: str) -> None:
        usual, with_ha = (getattr(kind, name) for kind in (ENGINES, SCHEDULERS))
        add(f"--{name}", type=of, help=f"{what} (default {usual:g}; with --ha {with_ha:g})")

    number("seconds", float, "of load after each fault")
    number("qps", float, "requests per second")
    number("prefill", int, "prefill instances")
    add(
        "--election",
        choices=AGREEMENTS,
        help="with --ha: how the schedulers agree: by etcd, by a Lease "
        "(of a stand-in) or by the order in which they are named (default: etcd if it is here, "
        "else order)",
    )
    add("--json", type=Path, metavar="FILE", help="write one object per fault here")
    add("--out", type=Path, help=f"logs ({ENGINES.out}; with --ha {SCHEDULERS.out})")
    return parser


def parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, Kind, list[Any]]:
    """The command line, what is broken, and how. Ends the program with code 2 if it cannot be."""
    parser = build_parser()
    args = parser.parse_args(argv)
    kind = SCHEDULERS if args.ha else ENGINES
    for name in ("seconds", "qps", "prefill", "out"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(kind, name))
    names = args.faults.split(",") if args.faults else list(kind.faults)
    unknown = [name for name in names if name not in kind.faults]
    if unknown:
        parser.error(f"--faults: {unknown[0]!r} is not one of {', '.join(kind.faults)}")
    if not (math.isfinite(args.seconds) and args.seconds > 0 and 0 < args.qps <= 100):
        parser.error("--seconds must be greater than 0, --qps between 0 and 100")
    if args.prefill < kind.least_prefill:
        parser.error(f"--prefill must be at least {kind.least_prefill}")
    if args.election and not args.ha:
        parser.error("--election: only with --ha")
    chosen = [kind.faults[name] for name in names]
    if args.ha:
        args.election = args.election or ("etcd" if etcd_binary() else "order")
        if args.election == "etcd" and not etcd_binary():
            parser.error("--election etcd: none is here (Debian: apt-get install etcd-server)")
        chosen = [fault for fault in chosen if args.election != "order" or not fault.needs_store]
    return args, kind, chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Run the faults; the exit code."""
    args, kind, chosen = parsed(sys.argv[1:] if argv is None else argv)
    # The table needs room, also in a file.
    console = Console() if sys.stdout.isatty() else Console(width=_FILE_WIDTH)
    if args.ha:
        console.print(f"the schedulers agree by: {args.election}")
    try:
        results = asyncio.run(_run(args, kind, chosen, console))
    except (ClusterStartError, NotReadyError, RuntimeError, TimeoutError) as error:
        console.print(f"[red]{error or 'it did not become well again in time'}[/]", highlight=False)
        return 2
    console.print(tables.table(kind.columns, results))
    for result in results:
        for note in result.notes:
            console.print(f"{result.fault}: {note}", markup=False, highlight=False)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    return 0 if all(result.passed for result in results) else 1


async def _run(
    args: argparse.Namespace, kind: Kind, chosen: Sequence[Any], console: Console
) -> list[Any]:
    args.out.mkdir(parents=True, exist_ok=True)
    workload = Workload(qps=args.qps, requests=1, max_prompt_tokens=CHUNK_TOKENS, max_new_tokens=40)
    results = []
    async with kind.site(args, progress_printer(console)) as site:
        for fault in chosen:
            result = await kind.run_fault(site, fault, workload=workload, tail_s=args.seconds)
            results.append(result)
            word = "passed" if result.passed else "FAILED"
            console.print(f"{fault.name}: {word}; {tables.outcome(result)}", highlight=False)
    return results


if __name__ == "__main__":
    sys.exit(main())
