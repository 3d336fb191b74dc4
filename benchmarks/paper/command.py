"""``scripts/paper-claims``: the paper's every claim beside ours."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from benchmarks.command_line import command_parser, interruptible
from benchmarks.paper import paper_claims
from benchmarks.paper.claims import VERDICTS, Claim, claims_table, summary
from benchmarks.paper.decode import DECODE_POLICIES, SCENARIO, decode_table, run_decode
from benchmarks.paper.queueing import queueing_job, queueing_row
from sglang_sbs.simulator.cluster.cost import cost_name
from sglang_sbs.simulator.experiments.sweep import Job, max_load, run_job
from sglang_sbs.simulator.experiments.tables import ResultTable, mean_of
from sglang_sbs.simulator.options import common
from sglang_sbs.simulator.options.common import run_with_progress
from sglang_sbs.simulator.parallel import Row, Task
from sglang_sbs.simulator.workloads.scenario import make_scenario

_PROG = "scripts/paper-claims"
_VERDICTS = "\n".join(f"  {verdict:<15} {words}" for verdict, words in VERDICTS.items())
_EPILOG = f"""\
The baseline is random_rank: SGLang's default placement under PD disaggregation. Its peak is the
rate at which the mean TTFT reaches 0.8 s (chunk 3K), 1.0 s (5K) or 4 s (3-64K; the paper gives
none). QPS are per prefill instance; for the whole 3P cluster Table 1 would need passes longer than
the TTFT it reports. "skewed" is decode placement with persistent rank weights from 0.3 to 1.7.
Gains are taken seed by seed: policies see the same arrivals.

verdicts:
{_VERDICTS}

example:
  scripts/paper-claims --quick --json paper.json
"""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is simulated: seconds per run, decode steps, and of those the warm-up."""

    short_s: float = 80.0
    long_s: float = 200.0
    steps: int = 12_000
    warm_up_steps: int = 3_000
    prefill_instances: int = 3
    search: tuple[float, float] = (0.7, 1.4)
    """Loads between which the capacity of the 0-3K workload is searched first."""
    tolerance: float = 0.01
    """Accepted error of the capacities, as a share."""
    queueing_instances: tuple[int, ...] = (3, 12)
    """The paper expects an order of magnitude above 10."""
    overlap: bool = False
    """The paper's analysis has passes that take what waits when they start."""

    @property
    def spec(self) -> dict[str, Any]:
        return {"prefill_instances": self.prefill_instances, "overlap": self.overlap}

    def seconds(self, scenario: str) -> float:
        return self.long_s if scenario == "paper-long" else self.short_s


QUICK = Effort(short_s=40.0, long_s=80.0, steps=8_000)


def build_parser() -> argparse.ArgumentParser:
    what = "Simulate every claim of arXiv 2512.16134 and say which reproduce."
    parser = command_parser(_PROG, what, _EPILOG)
    seeds_help = "seeds, of which means and intervals are (default 3)"
    common.add_common(parser, default_seeds=3, seeds_help=seeds_help)
    common.add_overlap(parser, default=False)
    parser.add_argument("--quick", action="store_true", help="shorter runs, rougher figures")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; exit code 2 for bad arguments, 130 if interrupted."""
    return interruptible(_PROG, lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    common.check_outputs(args, parser)
    costs = common.cost_words(args.cost, parser)
    effort = replace(QUICK if args.quick else Effort(), overlap=args.overlap)
    console = common.open_console()
    rows = simulate(
        costs, common.seeds(args), effort, lambda t: run_with_progress(t, console, args.workers)
    )
    claims, tables = judge(rows, costs)
    for table in tables:
        table.print(console)
    remarks = summary(claims)
    for remark in remarks:
        console.print(remark, highlight=False)
    judged = [claim.row() for claim in claims]
    common.write_json({"claims": judged, "rows": rows}, args.json, console)
    return 0


def simulate(
    costs: Sequence[str],
    seeds: Sequence[int],
    effort: Effort,
    run: Callable[[list[Task]], list[Row]],
) -> list[Row]:
    """The rows of all claims, in three steps: the second's loads are shares of the peaks that the
    first finds."""
    rows = run(capacity_tasks(costs, seeds, effort))
    rows += run(ttft_tasks(rows, costs, seeds, effort))
    for row in rows:
        if "max_qps" not in row:
            share = row["load"] / peak_load(rows, row["scenario"], row["cost"])
            row["peak_share"] = min(paper_claims.TTFT_SHARES, key=lambda known: abs(known - share))
    steps = effort.steps, effort.warm_up_steps
    tasks: list[Task] = [
        (run_decode, (policy, seed, *steps)) for policy, seed in product(DECODE_POLICIES, seeds)
    ]
    counts = effort.queueing_instances
    for count, policy, seed in product(counts, (paper_claims.BASELINE, *paper_claims.RULES), seeds):
        tasks.append((queueing_row, (queueing_job(policy, count, seed, effort.short_s),)))
    return rows + run(tasks)


def judge(rows: Sequence[Row], costs: Sequence[str]) -> tuple[list[Claim], list[ResultTable]]:
    claims: list[Claim] = []
    tables: list[ResultTable] = []
    slos_s = {name: make_scenario(name).slo_ttft_s for name in ("paper-3k", "paper-5k")}
    for cost in map(cost_name, costs):
        mine = paper_claims.prefill_claims(rows, cost)
        tables += [
            claims_table(mine, f"prefill, cost {cost}"),
            paper_claims.capacity_table(rows, slos_s, cost),
            *(paper_claims.ttft_table(rows, name, cost) for name in paper_claims.LABELS),
        ]
        claims += mine
    decode_rows = [r for r in rows if r["scenario"] == SCENARIO]
    for mine, title in (
        (paper_claims.queueing_claims(rows), "queueing, passes of one length T"),
        (paper_claims.decode_claims(decode_rows), "decode, step cost h100"),
    ):
        tables.append(claims_table(mine, title))
        claims += mine
    return claims, [*tables, decode_table(decode_rows)]


def capacity_tasks(costs: Sequence[str], seeds: Sequence[int], effort: Effort) -> list[Task]:
    """The searches for Table 1 and for the baseline's peaks."""
    tasks: list[Task] = []
    for cost, seed, name in product(costs, seeds, ("paper-3k", "paper-5k", "paper-long")):
        long = name == "paper-long"
        low, high = (0.2, 1.2) if long else effort.search
        search = make_scenario(name).slo_ttft_s, low, high, effort.tolerance
        for policy in (paper_claims.BASELINE,) if long else paper_claims.PAPER_POLICIES:
            job = Job(name, policy, 1.0, seed, effort.seconds(name), cost, effort.spec)
            tasks.append((max_load, (job, *search)))
    return tasks


def peak_load(rows: Sequence[Row], scenario: str, cost: str) -> float:
    """The baseline's peak as a load of the scenario, mean over seeds."""
    return mean_of(paper_claims.capacities(rows, scenario, cost, paper_claims.BASELINE), "load")


def ttft_tasks(
    rows: Sequence[Row], costs: Sequence[str], seeds: Sequence[int], effort: Effort
) -> list[Task]:
    """Every policy at shares of the baseline's peak."""
    tasks: list[Task] = []
    for cost, name in product(costs, paper_claims.LABELS):
        peak = peak_load(rows, name, cost_name(cost))
        seconds = effort.seconds(name)
        for seed, share, policy in product(
            seeds, paper_claims.TTFT_SHARES, paper_claims.PAPER_POLICIES
        ):
            job = Job(name, policy, share * peak, seed, seconds, cost, effort.spec)
            tasks.append((run_job, (job,)))
    return tasks
