"""``sglang-sbs simulate trial``: how often a trial is right, and after how many slots.

The router's own trial (:mod:`sglang_sbs.trial`) runs on simulated clusters, where the true
difference is known. A policy can be compared with itself: ``--difference 0.2`` then delays the
observed answers of the baseline so that the true ratio of the mean TTFTs is 0.8."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import median

import msgspec

from sglang_sbs.scheduling import Command, Event, Scheduler
from sglang_sbs.scheduling.events import PolicySwitched, PrefillDone, RequestArrived
from sglang_sbs.scheduling.policy_registry import spec_of
from sglang_sbs.simulator.cluster.outcome import Outcome
from sglang_sbs.simulator.cluster.simulation import Simulation
from sglang_sbs.simulator.experiments.sweep import Job, scenario_of, scheduler_config
from sglang_sbs.simulator.experiments.tables import ResultTable, groups
from sglang_sbs.simulator.options import common
from sglang_sbs.simulator.options.common import Flag, run_with_progress
from sglang_sbs.simulator.parallel import Interrupted, Row
from sglang_sbs.simulator.workloads.scenario import AGENTIC, SCENARIOS
from sglang_sbs.trial.ratios import Ratio
from sglang_sbs.trial.spec import LEAST_SLOTS, TrialSpec
from sglang_sbs.trial.trial import Switch, Trial

_STEP_S = 1.0
_POLICY = common.checked(
    str, lambda name: spec_of(name) is not None, "a policy of `sglang-sbs policies`"
)
_EPILOG = """\
Each run is a trial of --policy against --baseline on a simulated cluster, with arrivals and an
order of slots from its seed. With --difference 0.2 every answer of the baseline is observed later,
so that a policy against itself has 0.80x the mean TTFT of its baseline.

examples:
  sglang-sbs simulate trial                        sbs against sbs: how often a difference is seen
  sglang-sbs simulate trial --difference 0.2       how many slots until 20 % is certain
  sglang-sbs simulate trial --baseline round_robin --prefill 3 --runs 20
"""
# fmt: off
_FLAGS = (
    Flag("--scenario", "", str, "paper-3k", "arrivals and cluster (paper-3k)"),
    Flag("--policy", "", _POLICY, "sbs", "in force when the trial begins (sbs)", "NAME"),
    Flag("--baseline", "", _POLICY, "sbs", "compared with it (sbs)", "NAME"),
    Flag("--difference", "", common.checked(float, lambda x: 0 <= x < 1, "a share, as in 0.2"),
        0.0, "how much less the policy's TTFT is observed to be (0)"),
    Flag("--loads", "", common.numbers, [0.4, 0.6, 0.8],
        "shares of the nominal rate (0.4,0.6,0.8)"),
    Flag("--runs", "", common.positive, 20, "trials per load (20)"),
    Flag("--slot", "", common.positive_number, 60.0, "seconds of a slot (60)"),
    Flag("--slots", "", common.checked(int, lambda n: n >= LEAST_SLOTS and n % 2 == 0,
        f"an even number from {LEAST_SLOTS} on"), 10, "most slots of a trial (10)"),
    Flag("--width", "", common.not_negative, 0.0,
        "end when the interval is narrower than this (0: never)"),
    Flag("--prefill", "", common.positive, 1, "prefill instances (1)"),
    Flag("--dp", "", common.positive, 8, "DP ranks of each (8)"),
    Flag("--burstiness", "", common.positive_number, 1.0,
        "coefficient of variation of the gaps between arrivals (1)"),
)  # fmt: skip
# fmt: on


def build_parser() -> argparse.ArgumentParser:
    what = "Show how often the verdict of a trial is right, and after how many slots."
    parser = common.command("trial", what, _EPILOG)
    common.add_all(parser, _FLAGS)
    common.add_runs(parser, default_seeds=None, seeds_help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Return 0; 2 for bad arguments; 130 if interrupted."""
    parser = build_parser()
    args = parser.parse_args(argv)
    common.check_outputs(args, parser)
    if args.scenario == AGENTIC:
        parser.error(f"--scenario: one of {', '.join(SCENARIOS)}, without {AGENTIC}")
    shape = {
        "prefill_instances": args.prefill,
        "dp_size": args.dp,
        "burstiness": args.burstiness,
    }
    args.duration = args.slot * (args.slots + 2)
    common.checked_scenario(args, parser, args.scenario, shape)
    job = Job(args.scenario, args.policy, 1.0, 0, args.duration, spec=shape)
    spec = TrialSpec(args.baseline, slot_s=args.slot, slots=args.slots, width=args.width)
    seeds = range(args.first_seed, args.first_seed + args.runs)
    tasks = [
        (run_trial, (replace(job, load=load, seed=seed), spec, args.difference))
        for load, seed in product(args.loads, seeds)
    ]
    console = common.open_console()
    interrupted = False
    try:
        rows = run_with_progress(tasks, console, args.workers)
    except Interrupted as error:
        rows, interrupted = common.kept(error, len(tasks), "simulate trial"), True
    table_of(rows).print(console)
    common.write_json(rows, args.json, console)
    return 130 if interrupted else 0


def run_trial(job: Job, spec: TrialSpec, difference: float) -> Row:
    """Run one trial of ``job.policy`` on the job's cluster. One rank of eight gets an eighth of the
    load, because nominal rates are for eight."""
    scenario = scenario_of(job)
    load = job.load * scenario.spec.dp_size / 8
    arrivals = scenario.at_load(load, job.duration_s, job.seed)
    assert isinstance(arrivals, list)
    trial = Trial(spec, scheduler_config(job.policy).policy, job.seed)
    tried = TriedScheduler(Scheduler(scheduler_config(job.policy, job.seed)), trial, difference)
    cluster = msgspec.structs.replace(scenario.spec, seed=job.seed)
    simulation = Simulation(Outcome(), tried, cluster)
    simulation.start(arrivals)
    now_s = 0.0
    while trial.ended is None and now_s < job.duration_s + 2 * spec.slot_s:
        now_s += _STEP_S
        simulation.go_on(now_s)
        tried.advance(now_s)
    verdict = trial.verdict or Ratio(math.nan, math.nan, math.nan)
    return {
        "load": job.load,
        "seed": job.seed,
        "policy": job.policy,
        "baseline": spec.baseline,
        "cause": trial.ended.cause if trial.ended is not None else "",
        "slots": trial.done,
        "requests": sum(arm.requests for arm in trial.arms),
        **verdict._asdict(),
        "certain": verdict.certain,
        "truth": 1 - difference if job.policy == spec.baseline else math.nan,
    }


class TriedScheduler:
    """A simulated cluster's scheduler under the control of a trial."""

    def __init__(self, scheduler: Scheduler, trial: Trial, difference: float) -> None:
        self._scheduler = scheduler
        self._trial = trial
        self._late = difference / (1 - difference)
        """Delay after which an answer of the baseline is observed, relative to its TTFT."""
        self._arrived_s: dict[str, float] = {}
        """Arrival times, by rid, of the requests of the baseline's slots that have no answer
        yet."""
        self._switches: list[Switch] = []

    def handle(self, event: Event, now_s: float) -> list[Command]:
        trial = self._trial
        if isinstance(event, RequestArrived):
            if trial.current is None and not trial.done and trial.ended is None:
                self._take(trial.begin(now_s))
            if self._late and trial.current is not None and trial.current.arm == 1:
                self._arrived_s[event.rid] = now_s
        commands: list[Command] = []
        for switch in self._switches:
            if switch.policy != self._scheduler.config.policy:
                commands += self._scheduler.handle(PolicySwitched(policy=switch.policy), now_s)
        self._switches.clear()
        commands += self._scheduler.handle(event, now_s)
        seen_s = now_s
        if isinstance(event, PrefillDone):
            since_s = self._arrived_s.pop(event.rid, now_s)
            seen_s += self._late * (now_s - since_s)
        trial.observe(event, commands, seen_s)
        return commands

    def advance(self, now_s: float) -> None:
        """Advance the trial. A switch takes effect with the next event."""
        self._take(self._trial.advance(now_s))

    def _take(self, steps: Sequence[object]) -> None:
        self._switches += [step for step in steps if isinstance(step, Switch)]


def table_of(rows: Sequence[Row]) -> ResultTable:
    first = rows[0]
    table = ResultTable(
        f"Trials of {first['policy']} against {first['baseline']}",
        ["load", "trials", "certain", "wrong", "interval holds", "ratio", "slots, median", "most"],
    )
    every = {"all": list(rows), **{f"{k[0]:g}": v for k, v in groups(rows, "load").items()}}
    for name, some in every.items():
        certain = [row for row in some if row["certain"]]
        known = [row for row in some if not math.isnan(row["truth"])]
        holds = sum(row["low"] <= row["truth"] <= row["high"] for row in known)
        wrong = sum(
            row["low"] > 1 >= row["truth"] or row["high"] < 1 <= row["truth"]
            for row in certain
            if not math.isnan(row["truth"])
        )
        slots = [row["slots"] for row in some]
        table.rows.append(
            [
                name,
                str(len(some)),
                str(len(certain)),
                str(wrong) if known else "",
                f"{holds} of {len(known)}" if known else "",
                f"{median(row['ratio'] for row in some):.3f}",
                f"{median(slots):g}",
                str(max(slots)),
            ]
        )
    return table
