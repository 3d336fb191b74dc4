"""``scripts/paper-decode``: decode ranks by each rule, beside perfect balance."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product

from benchmarks.command_line import command_parser, interruptible
from benchmarks.decode.results import decode_summary, decode_table
from benchmarks.decode.runs import DECODE_POLICIES, SCENARIO, DecodeJob, run_decode
from benchmarks.decode.simulation import REQUESTS_PER_RANK, STEP_COSTS, DecodeSpec
from sglang_sbs.simulator.options import common, scheduler
from sglang_sbs.simulator.options.common import PLOT, Flag, names, run_with_progress
from sglang_sbs.simulator.parallel import Task

_PROG = "scripts/paper-decode"
_RANKS = DecodeSpec().ranks
_EPILOG = f"""\
policies: {", ".join(DECODE_POLICIES)}

examples:
  scripts/paper-decode --seeds 3
  scripts/paper-decode --policies sbs_iqr --sbs-iqr-k 3 --plot decode.html
"""
# fmt: off
_FLAGS = (
    Flag("--step-cost", "", tuple(STEP_COSTS), "h100", "cost of a decode step (h100)"),
    Flag("--decode-ranks", "", common.positive, _RANKS,
        f"decode DP ranks, {REQUESTS_PER_RANK} requests each ({_RANKS})", "N"),
    PLOT,
)
# fmt: on


def build_parser() -> argparse.ArgumentParser:
    what = "Simulate the paper's decode experiment: a closed loop, placed by each rule."
    parser = command_parser(_PROG, what, _EPILOG)
    parser.add_argument("--policies", default=",".join(DECODE_POLICIES), help="(all of them)")
    common.add_runs(parser)
    common.add_all(parser, _FLAGS)
    scheduler.add_scheduler(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; exit code 2 for bad arguments."""
    parser = build_parser()
    args = parser.parse_args(argv)
    return interruptible(_PROG, lambda: _run(args, parser))


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    policies = names(args.policies, DECODE_POLICIES, "--policies", parser)
    common.check_outputs(args, parser)
    more = {"ranks": args.decode_ranks, "config": scheduler.scheduler_fields(args)}
    tasks: list[Task] = [
        (run_decode, (DecodeJob(policy, seed, args.step_cost, **more),))
        for policy, seed in product(policies, common.seeds(args))
    ]
    console = common.open_console()
    rows = run_with_progress(tasks, console, args.workers)
    table = decode_table(rows)
    table.print(console)
    if args.plot is not None:
        from sglang_sbs.simulator.experiments import plots

        title = "Simulation of the paper's decode experiment"
        plots.write(args.plot, decode_summary(rows), rows, title, SCENARIO, [table])
        console.print(f"written: {args.plot}")
    common.write_json(rows, args.json, console)
    return 0
