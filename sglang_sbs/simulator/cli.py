"""``sglang-sbs simulate``: policies against each other in simulated time.

Runs are :mod:`.experiments.sweep`'s, tables :mod:`.experiments.tables`'s, pictures
:mod:`.experiments.plots`'s; ``simulate paper`` and ``simulate plan`` have modules of their own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sglang_sbs.simulator.cluster.decode import REQUESTS_PER_RANK, STEP_COSTS, DecodeSpec
from sglang_sbs.simulator.cluster.spec import TopologyError
from sglang_sbs.simulator.experiments.bound import main as bound_main
from sglang_sbs.simulator.experiments.decode_runs import DECODE_POLICIES, DecodeJob, run_decode
from sglang_sbs.simulator.experiments.matrix import main as matrix_main
from sglang_sbs.simulator.experiments.paper import main as paper_main
from sglang_sbs.simulator.experiments.plan import main as plan_main
from sglang_sbs.simulator.experiments.sweep import (
    POLICY_CONFIGS,
    EmptyWindowError,
    Job,
    max_load,
    run_job,
)
from sglang_sbs.simulator.experiments.tables import (
    ResultTable,
    balance_tables,
    cache_tables,
    capacity_tables,
    class_tables,
    day_tables,
    decode_table,
    load_tables,
    loop_tables,
    pool_tables,
)
from sglang_sbs.simulator.options.classes import add_classes, classes_of, slo_fields
from sglang_sbs.simulator.options.cluster import (
    add_cluster,
    add_topology,
    cluster_fields,
    topology_fields,
)
from sglang_sbs.simulator.options.common import (
    add_common,
    add_prefill_runs,
    check_outputs,
    check_prefill_runs,
    cost_words,
    given,
    names,
    numbers,
    open_console,
    positive,
    positive_number,
    run_with_progress,
    seeds,
    write_json,
)
from sglang_sbs.simulator.options.scheduler import add_scheduler, scheduler_fields
from sglang_sbs.simulator.parallel import Row, Task
from sglang_sbs.simulator.replay import replay
from sglang_sbs.simulator.workloads.arrivals import TraceError
from sglang_sbs.simulator.workloads.scenario import (
    AGENTIC,
    DECODE,
    SCENARIOS,
    ScenarioError,
    make_scenario,
)

DEFAULT_POLICIES = "sbs,sbs_paper,eta,least_tokens,round_robin,random_rank"

_COMMANDS = {"paper": paper_main, "plan": plan_main, "matrix": matrix_main, "bound": bound_main}
AGENTIC_S = 200.0
"""Simulated seconds of agents, unless told otherwise: a turn with its answer takes 20."""

_TABLES = (
    load_tables,
    day_tables,
    balance_tables,
    loop_tables,
    class_tables,
    cache_tables,
    pool_tables,
)

_EXAMPLE = f"""\
scenarios: {", ".join(SCENARIOS)}
policies:  {", ".join(POLICY_CONFIGS)}; for paper-decode {", ".join(DECODE_POLICIES)}

examples:
  sglang-sbs simulate paper-3k --loads 0.4,0.6,0.8,1.0 --seeds 3 --plot ttft.png
  sglang-sbs simulate paper-3k --max-qps --slo-ttft 0.4 --chunks 2048,3072,4096,6144
  sglang-sbs simulate trace:requests.jsonl --policies sbs,eta --loads 0.6,0.8 --plot page.html
  sglang-sbs simulate trace:conversation_trace.jsonl --load-counts uncached --loads 0.5 \\
      --policies sbs,sbs_basic,cache_aware,session,least_tokens --duration 420
  sglang-sbs simulate paper-3k --at 30:drain:p1,40:up:p1,50:down:p2,70:up:p2 --duration 100
  sglang-sbs simulate paper-3k --instance count=2,dp=8 --instance dp=4,speed=0.5 --jitter 0.15
  sglang-sbs simulate paper-3k --prefill 128 --pools 16   16 schedulers of 8 instances each
  sglang-sbs simulate fixed:1600 --loads 0.6,0.8  every prompt has 1600 tokens
  sglang-sbs simulate paper-3k --priority-share 0.2 --policies sbs,sbs_equal --loads 0.9,1.2
  sglang-sbs simulate agentic --policies sbs,cache_aware,eta,session --loads 0.5,1.0
  sglang-sbs simulate paper-decode --seeds 3
  sglang-sbs simulate --replay router.events      re-run a log of --sbs-event-log, bit for bit

more (each has --help):
  sglang-sbs simulate paper       the paper's claims beside ours, with its figures
  sglang-sbs simulate matrix      is sbs nowhere worse than any other policy? cell by cell
  sglang-sbs simulate bound       how small the mean TTFT could be, whoever schedules
  sglang-sbs simulate plan        how many instances and what chunk a workload needs
"""


def build_parser() -> tuple[argparse.ArgumentParser, list[argparse.Action]]:
    """The command line of ``sglang-sbs simulate``, and what of it describes a prefill cluster."""
    parser = argparse.ArgumentParser(
        prog="sglang-sbs simulate",
        usage="%(prog)s SCENARIO [options]",
        description="Simulate a PD cluster that is driven by the router's own scheduler.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", nargs="?", help="what to simulate (see below)")
    parser.add_argument(
        "--loads",
        type=numbers,
        default=[0.6, 0.8, 1.0],
        help="shares of the scenario's nominal rate (0.6,0.8,1.0)",
    )
    add_prefill_runs(parser, DEFAULT_POLICIES)
    add_common(parser)
    parser.add_argument(
        "--step-cost",
        choices=list(STEP_COSTS),
        default="h100",
        help="decode step cost of paper-decode (h100)",
    )
    parser.add_argument(
        "--decode-ranks",
        type=positive,
        default=DecodeSpec().ranks,
        metavar="N",
        help=f"DP ranks of paper-decode, {REQUESTS_PER_RANK} requests each ({DecodeSpec().ranks})",
    )
    parser.add_argument(
        "--max-qps",
        action="store_true",
        help="search the capacity: the most that is served with the mean TTFT of the SLO and "
        "without a refusal",
    )
    parser.add_argument(
        "--slo-ttft", type=positive_number, help="mean TTFT in seconds (the scenario's)"
    )
    parser.add_argument("--replay", type=Path, metavar="LOG", help="re-run a router's event log")
    add_scheduler(parser)
    return parser, [*add_cluster(parser), *add_topology(parser), *add_classes(parser)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run; exit code 2 for bad arguments, 1 if a replay differs or has nothing to replay, 130 if
    interrupted."""
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        print("sglang-sbs simulate: interrupted", file=sys.stderr)
        return 130


def _main(words: list[str]) -> int:
    if words and words[0] in _COMMANDS:
        return _COMMANDS[words[0]](words[1:])
    parser, cluster_actions = build_parser()
    args = parser.parse_args(words)
    if args.replay is not None:
        return _replay(args.replay)
    if args.scenario is None:
        parser.error(f"name a scenario: {', '.join(SCENARIOS)} (or --replay LOG)")
    decode = args.scenario == DECODE
    without = _without_meaning(cluster_actions, decode=decode, max_qps=args.max_qps)
    for name in sorted(given(words, args, parser) & without.keys()):
        parser.error(f"--{name.replace('_', '-')}: {without[name]}")
    if args.scenario == AGENTIC and "duration" not in given(words, args, parser):
        args.duration = AGENTIC_S
    check_prefill_runs(args, parser)
    check_outputs(args, parser)
    console = open_console()
    tasks = _decode_tasks(args, parser) if decode else _prefill_tasks(args, parser)
    try:
        rows = run_with_progress(tasks, console, args.workers)
    except EmptyWindowError as error:
        parser.error(f"--duration: {error}")
    if decode:
        tables = [decode_table(rows)]
    elif args.max_qps:
        tables = capacity_tables(rows)
    else:
        tables = [table for some in _TABLES for table in some(rows)]
    for table in tables:
        table.print(console)
    if args.plot is not None:
        _plot(args.plot, args.scenario, rows, tables, words, decode=decode, capacity=args.max_qps)
        console.print(f"written: {args.plot}")
    if args.json is not None:
        write_json(rows, args.json, console)
    return 0


def _without_meaning(
    cluster: Sequence[argparse.Action], *, decode: bool, max_qps: bool
) -> dict[str, str]:
    """The flags that a run would not look at, and why."""
    if not decode:
        flags = {
            "step_cost": f"decode steps are in {DECODE} only; the cost of passes is --cost",
            "decode_ranks": f"decode is in {DECODE} only; those of prefill are --dp",
        }
        if max_qps:
            flags["loads"] = "--max-qps searches for the load"
        else:
            flags["slo_ttft"] = "only --max-qps searches for the load that meets it"
        return flags
    return {
        **{action.dest: f"{DECODE} has no prefill cluster" for action in cluster},
        "chunks": f"{DECODE} has no prefill cluster",
        "max_qps": f"this searches the prefill capacity; {DECODE} has none",
        "slo_ttft": f"this is of the prefill capacity; {DECODE} has none",
        "cost": f"{DECODE} has no prefill passes; the cost of its steps is --step-cost",
        "loads": f"{DECODE} has one load, {REQUESTS_PER_RANK} requests per rank in a closed loop",
        "duration": f"{DECODE} has a fixed number of steps",
    }


def _decode_tasks(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Task]:
    default = ",".join(DECODE_POLICIES)
    policies = names(args.policies or default, DECODE_POLICIES, "--policies", parser)
    config = scheduler_fields(args)
    return [
        (run_decode, (DecodeJob(p, s, args.step_cost, ranks=args.decode_ranks, config=config),))
        for p in policies
        for s in seeds(args)
    ]


def _prefill_tasks(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Task]:
    policies = names(args.policies or DEFAULT_POLICIES, POLICY_CONFIGS, "--policies", parser)
    costs = cost_words(args.cost, parser)
    spec = {**cluster_fields(args), **topology_fields(args, parser), **slo_fields(args)}
    try:
        scenario = make_scenario(args.scenario, **spec)
    except (ScenarioError, TraceError) as error:
        parser.error(str(error))
    except TopologyError as error:
        parser.error(f"--at {error}")
    if args.duration <= scenario.warm_up_s:
        parser.error(f"--duration must be longer than the warm-up of {scenario.warm_up_s:g} s")
    slo_s = args.slo_ttft or scenario.slo_ttft_s
    config, classes = scheduler_fields(args), classes_of(args, parser)
    base = Job(args.scenario, "", 1.0, 0, args.duration, config=config, classes=classes)
    tasks: list[Task] = []
    for cost in costs:
        for chunk in args.chunks or [None]:
            shape = spec if chunk is None else {**spec, "chunk_tokens": chunk}
            for seed in seeds(args):
                for policy in policies:
                    job = replace(base, policy=policy, seed=seed, cost=cost, spec=shape)
                    if args.max_qps:
                        tasks.append((max_load, (job, slo_s)))
                    else:
                        tasks += [(run_job, (job.at_load(load),)) for load in args.loads]
    return tasks


def _plot(
    path: Path,
    scenario: str,
    rows: Sequence[Row],
    tables: Sequence[ResultTable],
    words: Sequence[str],
    *,
    decode: bool,
    capacity: bool,
) -> None:
    from sglang_sbs.simulator.experiments import plots
    from sglang_sbs.simulator.experiments.page import Part, Picture, policies_table, write_page

    if decode:
        figure = plots.decode_summary(rows)
    else:
        figure = plots.capacity_by_chunk(rows) if capacity else plots.ttft_by_load(rows)
    if path.suffix != ".html":
        plots.save(figure, path)
        return
    command = f"Command: sglang-sbs simulate {' '.join(words)}"
    picture = Picture(scenario, plots.png_of(figure))
    parts: list[Part] = [command, *tables, picture, policies_table(r["policy"] for r in rows)]
    write_page(path, f"Simulation of {scenario}", parts)


def _replay(path: Path) -> int:
    try:
        result = replay(path)
    except (OSError, ValueError) as error:
        print(f"sglang-sbs simulate: --replay: {error}", file=sys.stderr)
        return 2
    if result.torn_bytes:
        print(
            f"{path} is torn: its last {result.torn_bytes} bytes are no whole record and are left "
            "out, as when a router was killed",
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
