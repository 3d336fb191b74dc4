"""``sglang-sbs evaluate``: estimates how another policy would have served recorded traffic."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console

from sglang_sbs.evaluate.fitting.recording import read_recording
from sglang_sbs.evaluate.replayed import RAN, run
from sglang_sbs.evaluate.verdict import Evaluation
from sglang_sbs.evaluate.workload import Workload, workload_of
from sglang_sbs.simulator.experiments.sweep import POLICY_CONFIGS
from sglang_sbs.simulator.options.common import (
    Flag,
    add_all,
    check_outputs,
    names,
    open_console,
    positive,
    progress,
)
from sglang_sbs.simulator.parallel import Row, Task, run_all

DEFAULT_POLICIES = "sbs,eta,round_robin"
_DRAWS = 3

_EXAMPLES = f"""\
policies: {", ".join(POLICY_CONFIGS)}

The first line is the answer, for example:
  On this hour (12,431 requests, load 0.62) sbs would have had 0.78x (0.74 to 0.83) the mean TTFT of
  the recorded run; the model reproduces this run to 3 % in the mean and 6 % in the p99.
The interval is of 95 %. If the model is more than 10 % off, the line has the error and no ratio.

examples:
  sglang-sbs evaluate traffic.events
  sglang-sbs evaluate router.events --policies sbs,least_tokens --html page.html --json out.json

exit codes: 0 there is an answer; 1 no answer, because the model does not reproduce the recorded
run; 2 the log or a flag cannot be used; 130 interrupted, after printing the results so far
"""

# fmt: off
_FLAGS = (
    Flag("--policies", "", str, DEFAULT_POLICIES,
        f"policies to compare with the recorded run (default {DEFAULT_POLICIES})"),
    Flag("--html", "", Path, None, "write a page that refers to no other file", "FILE"),
    Flag("--json", "", Path, None, "write the numbers", "FILE"),
    Flag("--draws", "", positive, _DRAWS,
        f"simulations of each policy, with other random latencies (default {_DRAWS})", "N"),
    Flag("--workers", "", positive, None, "processes (default: cores)", "N"),
)
# fmt: on


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-sbs evaluate",
        description="Estimate the time to first token (TTFT) that each policy would have had on\n"
        "recorded traffic. EVENTS is an event log of `sglang-sbs observe`, or of our router\n"
        "(--sbs-event-log) under any policy. It must have the engines' reports of their passes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log", type=Path, metavar="EVENTS", help="the event log")
    add_all(parser, _FLAGS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code (see ``--help``)."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    args = parser.parse_args(words)
    policies = names(args.policies, POLICY_CONFIGS, "--policies", parser)
    check_outputs(args, parser)
    interrupted = False
    stderr = Console(stderr=True)
    try:
        with stderr.status(f"reading {args.log}"):
            work = workload_of(read_recording(args.log))
            verdict = Evaluation(work)
    except (OSError, ValueError) as error:
        text = str(error)
        named = text if str(args.log) in text else f"{args.log} {text}"
        print(f"sglang-sbs evaluate: {named}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sglang-sbs evaluate: interrupted", file=sys.stderr)
        return 130
    try:
        _simulate(verdict, policies, args, stderr)
    except KeyboardInterrupt:
        interrupted = True
        print("sglang-sbs evaluate: interrupted; this is what there is so far", file=sys.stderr)
    _show(verdict, args, words)
    if interrupted:
        return 130
    return 0 if verdict.accepted else 1


def _simulate(
    verdict: Evaluation, policies: Sequence[str], args: argparse.Namespace, stderr: Console
) -> None:
    """Simulate the recorded placement, then the policies, and add the results to ``verdict``. If
    the model does not reproduce the recorded run, no policy is simulated."""
    work, draws = verdict.work, range(args.draws)
    with progress(stderr, args.draws * (1 + len(policies))) as step:

        def take(row: Row) -> None:
            verdict.add(row)
            step(row["policy"] or "the recorded run")

        run_all(_tasks(work, [RAN], draws), take, args.workers)
        if verdict.accepted:
            run_all(_tasks(work, policies, draws), take, args.workers)


def _tasks(work: Workload, policies: Sequence[str], draws: range) -> list[Task]:
    lean = replace(work, passes=())  # sent to other processes
    return [(run, (lean, policy, draw)) for policy in policies for draw in draws]


def _show(verdict: Evaluation, args: argparse.Namespace, words: Sequence[str]) -> None:
    console = open_console()
    # Files first: a reader of the text may close the pipe early.
    if args.html is not None:
        from sglang_sbs.evaluate.page import write

        write(args.html, verdict, f"Command: sglang-sbs evaluate {' '.join(words)}")
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(verdict.json())) + b"\n")
    for sentence in verdict.sentences():
        console.print(sentence, highlight=False, soft_wrap=True)
    for table in verdict.tables():
        table.print(console)
    for path in filter(None, (args.html, args.json)):
        console.print(f"written: {path}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
