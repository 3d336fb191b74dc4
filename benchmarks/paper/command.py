"""``scripts/paper-claims``: the paper's every claim beside ours, and its figures."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import orjson

from benchmarks.command_line import command_parser, interruptible
from benchmarks.decode.results import decode_table
from benchmarks.decode.runs import DecodeJob, run_decode, run_decode_outcome
from benchmarks.paper import paper_claims
from benchmarks.paper.claims import VERDICTS, Claim, claims_table, summary
from benchmarks.paper.queueing import queueing_job, queueing_row
from sglang_sbs.simulator.cluster.cost import cost_name, find_cost
from sglang_sbs.simulator.experiments.page import Part, Picture, policies_table, write_page
from sglang_sbs.simulator.experiments.sweep import Job, max_load, run_job, run_outcome
from sglang_sbs.simulator.experiments.tables import ResultTable, mean_of
from sglang_sbs.simulator.options import common
from sglang_sbs.simulator.options.common import run_with_progress
from sglang_sbs.simulator.parallel import Row, Task
from sglang_sbs.simulator.workloads.scenario import make_scenario

_PROG = "scripts/paper-claims"
_DECODE_POLICIES = ("skewed", "round_robin", "least_requests", "sbs_iqr", "sbs_potential")
_KV_PICTURE = ("skewed", "round_robin", "sbs_iqr", "sbs_potential")
_INTRODUCTION = (
    "The paper's figures (arXiv 2512.16134) beside simulations of them. Everything here is "
    "simulated; the scheduler is the router's own object."
)

_VERDICTS = "\n".join(f"  {one:<15} {words}" for one, words in VERDICTS.items())
_EPILOG = f"""\
The baseline is random_rank: SGLang's default placement under PD disaggregation. Its peak is the
rate at which the mean TTFT reaches 0.8 s (chunk 3K), 1.0 s (5K) or 4 s (3-64K; the paper gives
none). QPS are per prefill instance; for the whole 3P cluster Table 1 would need passes longer than
the TTFT it reports. "skewed" is decode placement with persistent rank weights from 0.3 to 1.7.
Gains are taken seed by seed: policies see the same arrivals.

verdicts:
{_VERDICTS}

example:
  scripts/paper-claims --quick --out out/paper --json paper.json
"""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is simulated: seconds per run, decode steps, and of those the warm-up."""

    short_s: float = 80.0
    long_s: float = 200.0
    steps: int = 12_000
    warm_up_steps: int = 3_000
    picture_steps: int = 5_000
    prefill_instances: int = 3
    """As in the paper's cluster."""
    search: tuple[float, float] = (0.7, 1.4)
    """Loads between which the capacity of the 0-3K workload is searched first."""
    tolerance: float = 0.01
    """Of the capacities, as a share."""
    queueing_instances: tuple[int, ...] = (3, 12)
    """The paper expects an order of magnitude above 10."""
    overlap: bool = False
    """The paper's analysis has passes that take what waits when they start."""

    @property
    def spec(self) -> dict[str, Any]:
        return {"prefill_instances": self.prefill_instances, "overlap": self.overlap}

    def seconds(self, scenario: str) -> float:
        return self.long_s if scenario == "paper-long" else self.short_s


QUICK = Effort(short_s=40.0, long_s=80.0, steps=8_000, picture_steps=4_000)


def build_parser() -> argparse.ArgumentParser:
    what = "Simulate every claim of arXiv 2512.16134 and say which reproduce."
    parser = command_parser(_PROG, what, _EPILOG)
    seeds_help = "seeds, of which means and intervals are (default 3)"
    common.add_common(parser, default_seeds=3, seeds_help=seeds_help)
    common.add_overlap(parser, default=False)
    parser.add_argument("--quick", action="store_true", help="shorter runs, rougher figures")
    out_help = "page and pictures (out/paper); wants matplotlib"
    parser.add_argument("--out", type=Path, default=Path("out/paper"), help=out_help)
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
    return report(costs, common.seeds(args), effort, args.out, json=args.json, workers=args.workers)


def report(
    costs: Sequence[str],
    seeds: Sequence[int],
    effort: Effort,
    out: Path,
    *,
    json: Path | None = None,
    workers: int | None = None,
) -> int:
    """All of it; see the module."""
    console = common.open_console()
    rows = simulate(costs, seeds, effort, lambda t: run_with_progress(t, console, workers))
    claims, tables = judge(rows, costs)
    for table in tables:
        table.print(console)
    remarks = summary(claims)
    for remark in remarks:
        console.print(remark, highlight=False)
    judged = [claim.row() for claim in claims]
    write_out(out, rows, [_INTRODUCTION, _EPILOG, *remarks, *tables], costs[0], seeds[0], effort)
    (out / "claims.json").write_bytes(orjson.dumps(judged, option=orjson.OPT_INDENT_2))
    console.print(f"written: {out / 'paper.html'}, pictures and claims.json beside it")
    common.write_json({"claims": judged, "rows": rows}, json, console)
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
            row["peak_share"] = min(paper_claims.TTFT_SHARES, key=lambda one: abs(one - share))
    steps = effort.steps, effort.warm_up_steps
    tasks: list[Task] = [
        (run_decode, (DecodeJob(policy, seed, "h100", *steps),))
        for policy, seed in product(_DECODE_POLICIES, seeds)
    ]
    counts = effort.queueing_instances
    for count, policy, seed in product(counts, (paper_claims.BASELINE, *paper_claims.RULES), seeds):
        tasks.append((queueing_row, (queueing_job(policy, count, seed, effort.short_s),)))
    others = run(tasks)
    for row in others:
        if "kv_sigma_high" in row:
            row["kv_band"] = row["kv_sigma_high"] - row["kv_sigma_low"]
    return rows + others


def judge(rows: Sequence[Row], costs: Sequence[str]) -> tuple[list[Claim], list[ResultTable]]:
    """Every claim held against the rows."""
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
    decode_rows = [r for r in rows if r["scenario"] == "paper-decode"]
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


def write_out(
    out: Path, rows: Sequence[Row], told: Sequence[Part], cost: str, seed: int, effort: Effort
) -> None:
    """The page with what is told, and the pictures (of this cost and seed)."""
    from benchmarks.paper import pictures
    from sglang_sbs.simulator.experiments import plots

    scenario = make_scenario("paper-3k", cost=find_cost(cost), **effort.spec)
    gantt = {
        policy: run_outcome(scenario, Job("paper-3k", policy, 1.0, seed, 20.0, cost))
        for policy in (paper_claims.BASELINE, *paper_claims.RULES)
    }
    steps = effort.picture_steps, effort.warm_up_steps
    kv = {one: run_decode_outcome(DecodeJob(one, seed, "h100", *steps)) for one in _KV_PICTURE}
    loads = [r for r in rows if "peak_share" in r]
    ttft = plots.ttft_by_load(loads, "peak_share", "load (share of random_rank's peak)")
    qps = scenario.nominal_qps / len(scenario.spec.prefill)
    timeline = f"Forward passes at {qps:g} QPS per instance, cost {cost_name(cost)}"
    parts = list(told)
    out.mkdir(parents=True, exist_ok=True)
    for name, caption, figure in (
        ("ttft", "TTFT by load", ttft),
        ("kv-band", "KV load of the decode DP ranks over time", pictures.kv_bands(kv)),
        ("timeline", timeline, pictures.pass_timeline(gantt, dict(scenario.spec.prefill))),
    ):
        png = plots.png_of(figure)
        (out / f"{name}.png").write_bytes(png)
        parts.append(Picture(caption, png))
    parts.append(policies_table([*(row["policy"] for row in rows), *kv]))
    title = "Staggered Batch Scheduling: the paper's claims, simulated"
    write_page(out / "paper.html", title, parts)
