"""``sglang-sbs simulate paper``: the paper's every claim beside ours, and its figures.

Owns what is run for it and the report. The claims and their verdicts are :mod:`.claims`'s.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from sglang_sbs.simulator.cluster.cost import cost_name, find_cost
from sglang_sbs.simulator.experiments.claims import (
    PAPER_POLICIES,
    TTFT_SHARES,
    Claim,
    claims_table,
    decode_claims,
    long_verdict,
    table_1_claims,
    ttft_claims,
    ttft_table,
)
from sglang_sbs.simulator.experiments.decode_runs import DecodeJob, run_decode, run_decode_outcome
from sglang_sbs.simulator.experiments.sweep import Job, max_load, run_job, run_outcome
from sglang_sbs.simulator.experiments.tables import ResultTable, decode_table, mean_of
from sglang_sbs.simulator.options.common import (
    add_common,
    add_overlap,
    check_outputs,
    cost_words,
    open_console,
    run_with_progress,
    seeds,
    write_json,
)
from sglang_sbs.simulator.parallel import Row, Task
from sglang_sbs.simulator.workloads.scenario import make_scenario

_BASELINE = "random_rank"
_DECODE_POLICIES = ("skewed", "round_robin", "least_requests", "sbs_iqr", "sbs_potential")
_KV_PICTURE = ("skewed", "round_robin", "sbs_iqr", "sbs_potential")
_GANTT_POLICIES = (_BASELINE, "sbs_paper", "sbs")
_WORKLOADS = {"paper-3k": "0-3K, chunk 3K", "paper-long": "3-64K, chunk 16K"}

_EPILOG = """\
The baseline is random_rank: SGLang's default placement under PD disaggregation. Its peak is the
rate at which the mean TTFT reaches 0.8 s (chunk 3K), 1.0 s (5K) or 4 s (3-64K; the paper gives
none). QPS are per prefill instance; for the whole 3P cluster Table 1 would need passes longer than
the TTFT it reports. "skewed" is decode placement with persistent rank weights from 0.3 to 1.7.

example:
  sglang-sbs simulate paper --quick --out out/paper
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
    overlap: bool = False
    """The paper's analysis has passes that take what waits when they start."""

    @property
    def spec(self) -> dict[str, Any]:
        """The cluster."""
        return {"prefill_instances": self.prefill_instances, "overlap": self.overlap}


QUICK = Effort(short_s=40.0, long_s=80.0, steps=8_000, picture_steps=4_000)


def build_parser() -> argparse.ArgumentParser:
    """The command line of ``sglang-sbs simulate paper``."""
    parser = argparse.ArgumentParser(
        prog="sglang-sbs simulate paper",
        usage="%(prog)s [options]",
        description="Simulate every claim of arXiv 2512.16134 and say which reproduce.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_common(parser)
    add_overlap(parser, default=False)
    parser.add_argument("--quick", action="store_true", help="shorter runs, rougher figures")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/paper"),
        help="page and pictures (out/paper); wants matplotlib",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; exit code 2 for bad arguments."""
    parser = build_parser()
    args = parser.parse_args(argv)
    check_outputs(args, parser)
    costs = cost_words(args.cost, parser)
    return report(
        costs,
        seeds(args),
        replace(QUICK if args.quick else Effort(), overlap=args.overlap),
        args.out,
        json=args.json,
        workers=args.workers,
    )


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
    console = open_console()
    rows = run_with_progress(capacity_tasks(costs, seeds, effort), console, workers)
    rows += run_with_progress(ttft_tasks(rows, costs, seeds, effort), console, workers)
    for row in rows:
        if "max_qps" not in row:
            row["peak_share"] = _share_of_peak(
                row["load"], peak_load(rows, row["scenario"], row["cost"])
            )
    rows += run_with_progress(decode_tasks(seeds, effort), console, workers)

    tables: list[ResultTable] = []
    remarks: list[str] = []
    claims: list[Claim] = []
    for cost in map(cost_name, costs):
        mine = [*table_1_claims(rows, cost), *ttft_claims(rows, cost)]
        tables.append(claims_table(mine, f"prefill, cost {cost}"))
        tables.append(baselines_table(rows, cost))
        tables += [ttft_table(rows, name, label, cost) for name, label in _WORKLOADS.items()]
        remarks.append(long_verdict(rows, cost))
        claims += mine
    decode_rows = [r for r in rows if r["scenario"] == "paper-decode"]
    mine = decode_claims(decode_rows)
    claims += mine
    tables += [claims_table(mine, "decode, step cost h100"), decode_table(decode_rows)]
    remarks.append(verdict(claims))
    for table in tables:
        table.print(console)
    for remark in remarks:
        console.print(remark, highlight=False)
    write_out(out, rows, claims, tables, remarks, costs, seeds[0], effort)
    console.print(f"written: {out / 'paper.html'}, pictures and claims.json beside it")
    if json is not None:
        write_json(rows, json, console)
    return 0


def capacity_tasks(costs: Sequence[str], seeds: Sequence[int], effort: Effort) -> list[Task]:
    """The searches for Table 1 and for the baseline's peaks."""
    tasks: list[Task] = []
    for cost in costs:
        for seed in seeds:
            for name, policies, duration_s in (
                ("paper-3k", PAPER_POLICIES, effort.short_s),
                ("paper-5k", PAPER_POLICIES, effort.short_s),
                ("paper-long", (_BASELINE,), effort.long_s),
            ):
                slo_s = make_scenario(name).slo_ttft_s
                low, high = (0.2, 1.2) if name == "paper-long" else effort.search
                tasks += [
                    (
                        max_load,
                        (
                            Job(name, policy, 1.0, seed, duration_s, cost, effort.spec),
                            slo_s,
                            low,
                            high,
                            effort.tolerance,
                        ),
                    )
                    for policy in policies
                ]
    return tasks


def peak_load(rows: Sequence[Row], scenario: str, cost: str) -> float:
    """The baseline's peak as a load of the scenario, mean over seeds."""
    key = (scenario, cost, _BASELINE)
    mine = [r for r in rows if (r["scenario"], r["cost"], r["policy"]) == key and "max_qps" in r]
    return mean_of(mine, "load")


def ttft_tasks(
    rows: Sequence[Row], costs: Sequence[str], seeds: Sequence[int], effort: Effort
) -> list[Task]:
    """Every policy at shares of the baseline's peak."""
    tasks: list[Task] = []
    for cost in costs:
        for name, duration_s in (("paper-3k", effort.short_s), ("paper-long", effort.long_s)):
            peak = peak_load(rows, name, cost_name(cost))
            tasks += [
                (run_job, (Job(name, policy, share * peak, seed, duration_s, cost, effort.spec),))
                for seed in seeds
                for share in TTFT_SHARES
                for policy in PAPER_POLICIES
            ]
    return tasks


def _share_of_peak(load: float, peak: float) -> float:
    return min(TTFT_SHARES, key=lambda share: abs(share * peak - load))


def decode_tasks(seeds: Sequence[int], effort: Effort) -> list[Task]:
    """Every decode policy."""
    return [
        (run_decode, (DecodeJob(policy, seed, "h100", effort.steps, effort.warm_up_steps),))
        for policy in _DECODE_POLICIES
        for seed in seeds
    ]


def baselines_table(rows: Sequence[Row], cost: str) -> ResultTable:
    """Table 1 with the stronger baselines beside it."""
    scenarios = ("paper-3k", "paper-5k")
    table = ResultTable(
        f"max QPS per prefill instance and chunk utilisation there; cost {cost}",
        [
            "policy",
            *(f"{name}, mean TTFT {make_scenario(name).slo_ttft_s:g} s" for name in scenarios),
        ],
    )
    for policy in PAPER_POLICIES:
        cells = []
        for scenario in scenarios:
            key = (scenario, cost, policy)
            mine = [
                r for r in rows if (r["scenario"], r["cost"], r["policy"]) == key and "max_qps" in r
            ]
            qps = mean_of(mine, "max_qps") / mine[0]["prefill_instances"]
            cells.append(f"{qps:.1f} {mean_of(mine, 'chunk_utilization'):.0%}")
        table.rows.append([policy, *cells])
    return table


def verdict(claims: Sequence[Claim]) -> str:
    """What does not reproduce, in words."""
    missed = [c for c in claims if not c.reproduces]
    kept = f"{len(claims) - len(missed)} of {len(claims)} figures reproduce within 10 %."
    if not missed:
        return kept
    listed = "; ".join(f"{c.what}{f' against {c.baseline}' if c.baseline else ''}" for c in missed)
    return f"{kept} Not reproduced: {listed}."


def write_out(
    out: Path,
    rows: Sequence[Row],
    claims: Sequence[Claim],
    tables: Sequence[ResultTable],
    remarks: Sequence[str],
    costs: Sequence[str],
    seed: int,
    effort: Effort,
) -> None:
    """The page, the pictures and the claims."""
    from sglang_sbs.simulator.experiments import plots
    from sglang_sbs.simulator.experiments.page import Part, Picture, policies_table, write_page

    loads = [r for r in rows if "peak_share" in r]
    gantt: dict[str, Any] = {}
    scenario = make_scenario("paper-3k", cost=find_cost(costs[0]), **effort.spec)
    for policy in _GANTT_POLICIES:
        gantt[policy] = run_outcome(scenario, Job("paper-3k", policy, 1.0, seed, 20.0, costs[0]))
    kv = {
        policy: run_decode_outcome(
            DecodeJob(policy, seed, "h100", effort.picture_steps, effort.warm_up_steps)
        )
        for policy in _KV_PICTURE
    }
    figures = {
        "ttft": (
            "TTFT by load",
            plots.ttft_by_load(loads, "peak_share", "load (share of random_rank's peak)"),
        ),
        "kv-band": ("KV load of the decode DP ranks over time", plots.kv_bands(kv)),
        "timeline": (
            f"Forward passes at {scenario.nominal_qps / len(scenario.spec.prefill):g} QPS per "
            f"instance, cost {cost_name(costs[0])}",
            plots.pass_timeline(gantt, dict(scenario.spec.prefill)),
        ),
    }
    parts: list[Part] = [
        "The paper's figures (arXiv 2512.16134) beside simulations of them. Everything here is "
        "simulated; the scheduler is the router's own object.",
        _EPILOG,
        *remarks,
        *tables,
    ]
    out.mkdir(parents=True, exist_ok=True)
    for name, (caption, figure) in figures.items():
        png = plots.png_of(figure)
        (out / f"{name}.png").write_bytes(png)
        parts.append(Picture(caption, png))
    parts.append(policies_table([*(row["policy"] for row in rows), *kv]))
    write_page(
        out / "paper.html", "Staggered Batch Scheduling: the paper's claims, simulated", parts
    )
    listed = [{**_fields(claim), "reproduces": claim.reproduces} for claim in claims]
    (out / "claims.json").write_bytes(orjson.dumps(listed, option=orjson.OPT_INDENT_2))


def _fields(claim: Claim) -> dict[str, Any]:
    return {name: getattr(claim, name) for name in claim.__struct_fields__}
