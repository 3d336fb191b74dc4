"""``sglang-sbs simulate``: compares policies in simulated time."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from sglang_sbs.simulator.experiments import plan, sweep, tables, trials, verdict
from sglang_sbs.simulator.experiments.idle_flags import refuse_idle_flags
from sglang_sbs.simulator.options import cluster, common, scheduler
from sglang_sbs.simulator.options.common import Flag, names, run_with_progress
from sglang_sbs.simulator.parallel import Interrupted, Task
from sglang_sbs.simulator.replay import replay
from sglang_sbs.simulator.workloads.scenario import AGENTIC, SCENARIOS

DEFAULT_POLICIES = "sbs,sbs_paper,eta,least_tokens,round_robin,random_rank"

_COMMANDS = {"plan": plan.main, "trial": trials.main}
AGENTIC_S = 200.0
"""Default simulated seconds of agents: a turn with its answer takes 20."""

_EXAMPLE = f"""\
scenarios: {", ".join(SCENARIOS)}
policies:  {", ".join(sweep.POLICY_CONFIGS)}

The first lines are the answer, as of `simulate paper-3k --loads 0.7,1.0 --policies sbs,eta`:
  sbs has 0.84x (0.83 to 0.86) the mean TTFT of eta at load 0.7 and 0.49x (0.48 to 0.50) that of
  eta at load 1.
TTFT is the time to first token; parentheses have the 95 % interval. The lines also show where sbs
gains nothing or loses. The tables below have every policy: mean / p99 TTFT, how full chunks are,
active DP ranks per pass. The defaults take about a minute; Ctrl-C shows the results so far.

examples:
  sglang-sbs simulate paper-3k --loads 0.4,0.6,0.8,1.0 --seeds 3 --plot ttft.png
  sglang-sbs simulate paper-3k --max-qps --slo-ttft 0.4 --chunks 2048,3072,4096,6144
  sglang-sbs simulate trace:requests.jsonl --policies sbs,eta --loads 0.6,0.8 --plot page.html
  sglang-sbs simulate trace:router.events --chunks 4096   the arrivals of an --sbs-event-log
  sglang-sbs simulate trace:conversation_trace.jsonl --load-counts uncached --loads 0.5 \\
      --policies sbs,sbs_basic,cache_aware,session,least_tokens --duration 420
  sglang-sbs simulate paper-3k --at 30:drain:p1,40:up:p1,50:down:p2,70:up:p2 --duration 100
  sglang-sbs simulate paper-3k --instance count=2,dp=8 --instance dp=4,speed=0.5 --jitter 0.15
  sglang-sbs simulate paper-3k --prefill 128 --pools 16   16 schedulers of 8 instances each
  sglang-sbs simulate fixed:1600 --loads 0.6,0.8  every prompt has 1600 tokens
  sglang-sbs simulate paper-3k --priority-share 0.2 --policies sbs,sbs_equal --loads 0.9,1.2
  sglang-sbs simulate agentic --policies sbs,cache_aware,eta,session --loads 0.5,1.0
  sglang-sbs simulate --replay router.events      re-run a log of --sbs-event-log, bit for bit

more (each has --help):
  sglang-sbs simulate plan        how many instances and what chunk a workload needs
  sglang-sbs simulate trial       how often is the verdict of a trial right?
"""


# fmt: off
_LOADS = [0.6, 0.8, 1.0]
_FLAGS = (
    Flag("--loads", "", common.numbers, None,
        "shares of the scenario's nominal rate (0.6,0.8,1.0)"),
    Flag("--max-qps", "", bool, False,
        "search the capacity: the most that is served with the mean TTFT of the SLO and "
        "without a refusal"),
    Flag("--slo-ttft", "", common.positive_number, None,
        "mean TTFT in seconds (the scenario's)"),
    Flag("--replay", "", Path, None, "re-run a router's event log", "LOG"),
)
# fmt: on


def build_parser() -> argparse.ArgumentParser:
    what = (
        "Shows the gain of SBS on a workload before you have a cluster: simulates prefill and\n"
        "decode instances that the router's own scheduler drives, under several policies and\n"
        "loads. Load 1.0 is the scenario's nominal rate. Numbers in parentheses are defaults."
    )
    parser = common.command("", what, _EXAMPLE, "SCENARIO [options]")
    parser.add_argument("scenario", nargs="?", help="what to simulate (see below)")
    common.add_prefill_runs(parser, DEFAULT_POLICIES)
    common.add_common(parser)
    common.add_all(parser, _FLAGS)
    scheduler.add_scheduler(parser)
    cluster.add_cluster(parser)
    cluster.add_topology(parser)
    scheduler.add_classes(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit code 2 for bad arguments, 1 if a replay differs or contains nothing to
    replay, 130 if interrupted."""
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        print("sglang-sbs simulate: interrupted", file=sys.stderr)
        return 130


def _main(words: list[str]) -> int:
    if words and words[0] in _COMMANDS:
        return _COMMANDS[words[0]](words[1:])
    parser = build_parser()
    args = parser.parse_args(words)
    if args.replay is not None:
        others = common.given(build_parser(), words) - {"--replay"}
        if others:
            parser.error(f"--replay: {', '.join(sorted(others))}: without effect, leave it out")
        return _replay(args.replay)
    if args.scenario is None:
        parser.error(f"name a scenario: {', '.join(SCENARIOS)} (or --replay LOG)")
    if args.max_qps and args.loads is not None:
        parser.error("--loads: --max-qps searches for the load")
    if args.slo_ttft is not None and not args.max_qps:
        parser.error("--slo-ttft: only --max-qps searches for the load that meets it")
    args.duration = args.duration or (AGENTIC_S if args.scenario == AGENTIC else common.DURATION_S)
    common.check_outputs(args, parser)
    console = common.open_console()
    tasks, expected_s = _tasks(args, parser, common.given(build_parser(), words))
    interrupted = False
    try:
        rows = run_with_progress(tasks, console, args.workers, expected_s)
    except sweep.EmptyWindowError as error:
        parser.error(f"--duration: {error}")
    except Interrupted as error:
        rows, interrupted = common.kept(error, len(tasks), "simulate"), True
    shown = (tables.capacity_tables if args.max_qps else tables.result_tables)(rows)
    sentences = (verdict.of_capacity if args.max_qps else verdict.of_loads)(rows)
    for sentence in sentences:
        console.print(sentence, highlight=False, soft_wrap=True)
    for table in shown:
        table.print(console)
    if args.plot is not None:
        from sglang_sbs.simulator.experiments import plots

        figure = (plots.capacity_by_chunk if args.max_qps else plots.ttft_by_load)(rows)
        name, command = args.scenario, f"Command: sglang-sbs simulate {' '.join(words)}"
        title = f"Simulation of {name}"
        plots.write(args.plot, figure, rows, title, name, [*sentences, *shown], command)
        console.print(f"written: {args.plot}")
    common.write_json(rows, args.json, console)
    return 130 if interrupted else 0


def _tasks(
    args: argparse.Namespace, parser: argparse.ArgumentParser, flags: set[str]
) -> tuple[list[Task], float]:
    """Return the runs to simulate, and their approximate CPU seconds."""
    policies = names(args.policies or DEFAULT_POLICIES, sweep.POLICY_CONFIGS, "--policies", parser)
    costs = common.cost_words(args.cost, parser)
    spec = {
        **cluster.cluster_fields(args),
        **cluster.topology_fields(args, parser),
        **common.fields_of(args, scheduler.CLASSES),
    }
    scenario = common.checked_scenario(args, parser, args.scenario, spec)
    refuse_idle_flags(args, flags, policies, scenario, parser)
    slo_s = args.slo_ttft or scenario.slo_ttft_s
    config, classes = scheduler.scheduler_fields(args), scheduler.classes_of(args, parser)
    base = sweep.Job(args.scenario, "", 1.0, 0, args.duration, config=config, classes=classes)
    tasks: list[Task] = []
    expected_s = 0.0
    shapes = [{**spec, "chunk_tokens": chunk} for chunk in args.chunks or ()] or [spec]
    for cost, shape, seed, policy in product(costs, shapes, common.seeds(args), policies):
        job = replace(base, policy=policy, seed=seed, cost=cost, spec=shape)
        loads = args.loads or _LOADS
        if args.max_qps:
            tasks.append((sweep.max_load, (job, slo_s)))
            loads = sweep.SEARCHED_LOADS
        else:
            tasks += [(sweep.run_job, (job.at_load(load),)) for load in loads]
        expected_s += sum(sweep.expected_s(scenario, job.at_load(load)) for load in loads)
    return tasks, expected_s


def _replay(path: Path) -> int:
    try:
        result = replay(path)
    except (OSError, ValueError) as error:
        print(f"sglang-sbs simulate: --replay: {error}", file=sys.stderr)
        return 2
    if result.torn_bytes:
        print(
            f"{path} is cut off: its last {result.torn_bytes} bytes are not a whole record, as "
            "after a router was killed, and are left out",
            file=sys.stderr,
        )
    if not result.events:
        print(f"{path} holds no events: there is nothing to reproduce", file=sys.stderr)
        return 1
    if result.difference:
        print(f"differs at event {result.events}: {result.difference}")
        return 1
    print(f"{result.events} events, {result.commands} commands: all decisions reproduced exactly")
    return 0


if __name__ == "__main__":
    sys.exit(main())
