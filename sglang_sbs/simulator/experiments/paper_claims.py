"""The figures of arXiv 2512.16134 and what of the simulated rows each is held against.

Owns the paper's figures, and why some do not reproduce. Must not know how rows are produced or
drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_sbs.simulator.experiments.claims import Claim, Side, Unit
from sglang_sbs.simulator.experiments.estimate import BySeed, Estimate, change
from sglang_sbs.simulator.experiments.queueing import QUEUEING
from sglang_sbs.simulator.experiments.tables import ResultTable, mean_of
from sglang_sbs.simulator.parallel import Row

BASELINES = ("random_rank", "least_tokens", "eta")
"""``random_rank`` is SGLang's default placement under PD disaggregation. The paper does not name
its baseline; the other two are stronger immediate policies."""
PAPER_POLICIES = ("random_rank", "least_tokens", "eta", "sbs_paper", "sbs")
TTFT_SHARES = (0.4, 0.6, 0.8, 1.0)
"""Of the baseline's peak (paper section 5.1)."""
LABELS = {"paper-3k": "0-3K", "paper-long": "3-64K"}
_GAIN = (0.0, float("inf"))
"""The paper says that there is a gain, without a figure."""

_FULLER_BASELINE = (
    "SGLang's own placement (random_rank) fills chunks better than the paper's unnamed baseline at "
    "the same QPS and TTFT: there is less left to gain. Half-empty chunks at this QPS need passes "
    "whose time does not follow the heaviest rank, and then any policy has them."
)
_OVERSHOOT = (
    "Algorithm 2 puts a prompt on a rank with any room left, so a rank gets more than its chunk, "
    "and the rest of a prompt takes a pass of which the trigger does not know."
)
_LATE = (
    "The paper's trigger dispatches at EndForward, so an instance is idle until the batch is "
    "there; sbs sends ahead of the end."
)
_ROTATION = (
    "In strict rotation a batch goes to the next instance although its ranks still compute prompts "
    "of several chunks, while others are idle."
)
_QUEUED = "At its peak the baseline has requests queued on every rank, which fill its chunks."
_UNEQUAL_RANKS = (
    "The paper's baseline band needs ranks that stay unequal (skewed); round robin, which is "
    "SGLang's, is closer to balance, and even perfect balance would not gain 15 % on it."
)
_PEAK = "It is the most of any rank in any step, and rises with the time that is looked at."


def by_seed(rows: Sequence[Row], key: str, **fields: Any) -> dict[int, float]:
    """A figure of each seed: the rows with these values in these fields, one per seed."""
    return {
        row["seed"]: row[key]
        for row in rows
        if key in row and all(row.get(name) == value for name, value in fields.items())
    }


def _estimate(values: BySeed) -> Estimate:
    return Estimate.of(list(values.values()))


def _reduction(mine: BySeed, base: BySeed) -> list[float]:
    return [-one for one in change(mine, base)]


def prefill_claims(rows: Sequence[Row], cost: str) -> list[Claim]:
    """Sections 3.3, 5.1 and 5.2.1, and of the abstract what is about prefill."""
    return [
        *table_1_claims(rows, cost),
        *ttft_claims(rows, cost),
        *long_claims(rows, cost),
        *balance_claims(rows, cost),
    ]


def table_1_claims(rows: Sequence[Row], cost: str) -> list[Claim]:
    """Table 1: max QPS per prefill instance and chunk utilisation at a mean TTFT."""
    claims: list[Claim] = []
    gains: dict[str, list[list[float]]] = {"sbs_paper": [], "sbs": []}
    for scenario, label, off, on, gain in (
        ("paper-3k", "3K, 0.8 s", (57.0, 0.5183), (70.0, 0.887), 0.228),
        ("paper-5k", "5K, 1.0 s", (70.0, 0.530), (79.0, 0.880), 0.129),
    ):
        mine = [r for r in rows if (r["scenario"], r["cost"]) == (scenario, cost)]
        qps, use = {}, {}
        for policy in ("random_rank", "sbs_paper", "sbs"):
            runs = [r for r in mine if r["policy"] == policy and "max_qps" in r]
            qps[policy] = {r["seed"]: r["max_qps"] / r["prefill_instances"] for r in runs}
            use[policy] = by_seed(runs, "chunk_utilization")
        claims += _off_and_on("max QPS per instance", label, (off[0], on[0]), qps, "")
        over = {one: change(qps[one], qps["random_rank"]) for one in gains}
        claims.append(_gain(f"QPS gain ({label})", "Table 1", (gain, gain), over))
        for one, values in over.items():
            gains[one].append(values)
        claims += _off_and_on("chunk utilisation", label, (off[1], on[1]), use, "%")
        more = on[1] - off[1]
        claims.append(
            Claim(
                what=f"utilisation gain ({label})",
                source="Table 1",
                baseline="random_rank",
                paper=(more, more),
                literal=_difference(use["sbs_paper"], use["random_rank"]),
                ours=_difference(use["sbs"], use["random_rank"]),
                unit="pp",
                good="more",
                why=_FULLER_BASELINE,
            )
        )
    both = {
        one: [sum(pair) / len(pair) for pair in zip(*values, strict=True)]
        for one, values in gains.items()
    }
    return [*claims, _gain("throughput gain, mean of both", "abstract", (0.15, 0.20), both)]


def _off_and_on(
    what: str, label: str, paper: tuple[float, float], found: Mapping[str, BySeed], unit: Unit
) -> list[Claim]:
    """A line of Table 1 without and with SBS."""
    off, on = paper
    return [
        Claim(
            what=f"{what}, off ({label})",
            source="Table 1",
            baseline="random_rank",
            paper=(off, off),
            literal=_estimate(found["random_rank"]),
            unit=unit,
            why=_FULLER_BASELINE,
        ),
        Claim(
            what=f"{what}, on ({label})",
            source="Table 1",
            baseline="",
            paper=(on, on),
            literal=_estimate(found["sbs_paper"]),
            ours=_estimate(found["sbs"]),
            unit=unit,
            good="more",
            why=_OVERSHOOT,
        ),
    ]


def _gain(
    what: str, source: str, paper: tuple[float, float], over: dict[str, list[float]]
) -> Claim:
    return Claim(
        what=what,
        source=source,
        baseline="random_rank",
        paper=paper,
        literal=Estimate.of(over["sbs_paper"]),
        ours=Estimate.of(over["sbs"]),
        unit="%",
        good="more",
        why=_FULLER_BASELINE,
    )


def _difference(mine: BySeed, base: BySeed) -> Estimate:
    return Estimate.of([mine[seed] - base[seed] for seed in mine])


def ttft_claims(rows: Sequence[Row], cost: str) -> list[Claim]:
    """Section 5.1: mean TTFT at 40-100 % of the baseline's peak, 0-3K."""
    claims = [
        _less(
            _at(rows, "paper-3k", cost, share),
            "ttft_mean_s",
            f"TTFT reduction at {share:.0%} of the baseline's peak (0-3K)",
            "abstract, section 5.1",
            (0.30, 0.40),
            _LATE,
        )
        for share in TTFT_SHARES
    ]
    lighter = [one for one, share in zip(claims, TTFT_SHARES, strict=True) if share < 0.8]
    best = max(lighter, key=lambda claim: claim.literal.mean)
    ours = max((one.ours for one in lighter if one.ours), key=lambda one: one.mean)
    most = Claim(
        what="most TTFT reduction below 80 % (0-3K)",
        source="section 5.1",
        baseline="random_rank",
        paper=(0.40, 0.40),
        literal=best.literal,
        ours=ours,
        unit="%",
        good="more",
        why=_LATE,
    )
    return [*claims, most]


def long_claims(rows: Sequence[Row], cost: str) -> list[Claim]:
    """Section 5.1, 3-64K: "maintains its performance advantage", "suppresses tail latency"."""
    return [
        _less(
            _at(rows, "paper-long", cost, share),
            key,
            f"{name} reduction at {share:.0%} (3-64K)",
            "section 5.1, Figure 6b",
            _GAIN,
            _ROTATION,
        )
        for key, name in (("ttft_mean_s", "TTFT"), ("ttft_p99_s", "p99 TTFT"))
        for share in TTFT_SHARES
    ]


def balance_claims(rows: Sequence[Row], cost: str) -> list[Claim]:
    """Figures 3 and 4: SBS has smaller bubbles behind the heaviest rank."""
    return [
        _less(
            _at(rows, "paper-3k", cost, share),
            "max_over_mean",
            f"heaviest rank / mean, less by, at {share:.0%} (0-3K)",
            "section 3.3, Figures 3 and 4",
            _GAIN,
            _QUEUED,
        )
        for share in (TTFT_SHARES[0], TTFT_SHARES[-1])
    ]


def _at(rows: Sequence[Row], scenario: str, cost: str, share: float) -> list[Row]:
    wanted = (scenario, cost, share)
    return [r for r in rows if (r["scenario"], r["cost"], r.get("peak_share")) == wanted]


def _less(
    rows: Sequence[Row], key: str, what: str, source: str, paper: tuple[float, float], why: str
) -> Claim:
    """By how much less SBS has of something than the baseline."""
    base = by_seed(rows, key, policy="random_rank")
    return Claim(
        what=what,
        source=source,
        baseline="random_rank",
        paper=paper,
        literal=Estimate.of(_reduction(by_seed(rows, key, policy="sbs_paper"), base)),
        ours=Estimate.of(_reduction(by_seed(rows, key, policy="sbs"), base)),
        unit="%",
        good="more",
        why=why,
    )


def queueing_claims(rows: Sequence[Row]) -> list[Claim]:
    """Section 3.2: an immediate dispatch waits T/2 in the engine however many instances there are,
    a staggered one T/2N in the scheduler."""
    mine = [r for r in rows if r["scenario"] == QUEUEING]
    counts = sorted({r["prefill_instances"] for r in mine})
    claims: list[Claim] = []
    for count in counts:
        waits = {
            policy: by_seed(mine, "wait_passes", policy=policy, prefill_instances=count)
            for policy in ("random_rank", "sbs_paper", "sbs")
        }
        claims += [
            Claim(
                what=f"wait, immediate, {count} instances",
                source="section 3.2",
                baseline="random_rank",
                paper=(0.5, 0.5),
                literal=_estimate(waits["random_rank"]),
                unit="T",
                why="Ranks chosen at random get more than a chunk now and then: a pass more.",
            ),
            Claim(
                what=f"wait, staggered, {count} instances",
                source="section 3.2",
                baseline="",
                paper=(0.5 / count, 0.5 / count),
                literal=_estimate(waits["sbs_paper"]),
                ours=_estimate(waits["sbs"]),
                unit="T",
                good="less",
                why=_OVERSHOOT,
            ),
        ]
    base = waits["random_rank"]
    shorter = {one: [base[s] / waits[one][s] for s in base] for one in ("sbs_paper", "sbs")}
    return [
        *claims,
        Claim(
            what=f"wait shorter by, {counts[-1]} instances",
            source="section 3.2",
            baseline="random_rank",
            paper=(float(counts[-1]), float(counts[-1])),
            literal=Estimate.of(shorter["sbs_paper"]),
            ours=Estimate.of(shorter["sbs"]),
            unit="x",
            good="more",
            why=_OVERSHOOT,
        ),
    ]


def decode_claims(rows: Sequence[Row]) -> list[Claim]:
    """Section 5.2.2, Figures 7 and 8: the KV band over ranks and the throughput."""

    def found(policy: str, key: str) -> dict[int, float]:
        return by_seed(rows, key, scenario="paper-decode", policy=policy)

    absolute: list[tuple[str, str, str, float, Side]] = [
        *(
            (f"KV {name}, baseline", baseline, key, figure, "")
            for baseline in ("skewed", "round_robin")
            for name, key, figure in (
                ("band, lower edge", "kv_sigma_low", 40e3),
                ("band, upper edge", "kv_sigma_high", 130e3),
                ("peak", "kv_peak", 150e3),
            )
        ),
        ("KV band, lower edge, SBS", "", "kv_sigma_low", 60e3, "more"),
        ("KV band, upper edge, SBS", "", "kv_sigma_high", 100e3, "less"),
    ]
    claims = [
        Claim(
            what=what,
            source="section 5.2.2, Figure 7",
            baseline=baseline,
            paper=(figure, figure),
            literal=_estimate(found(baseline or "sbs_iqr", key)),
            ours=None if baseline else _estimate(found("sbs_potential", key)),
            unit="K",
            good=good,
            why=_PEAK if key == "kv_peak" else _UNEQUAL_RANKS,
        )
        for what, baseline, key, figure, good in absolute
    ]
    for baseline in ("skewed", "round_robin"):
        for what, key, paper, sign in (
            ("KV band narrower by", "kv_band", (0.40, 0.40), -1),
            ("KV peak lower by", "kv_peak", _GAIN, -1),
            ("decode throughput gain", "tokens_per_s", (0.15, 0.15), 1),
        ):
            base = found(baseline, key)
            over = {
                policy: [sign * one for one in change(found(policy, key), base)]
                for policy in ("sbs_iqr", "sbs_potential")
            }
            claims.append(_decode_gain(what, baseline, paper, over))
    return claims


def _decode_gain(
    what: str, baseline: str, paper: tuple[float, float], over: Mapping[str, list[float]]
) -> Claim:
    return Claim(
        what=what,
        source="section 5.2.2, Figures 7 and 8",
        baseline=baseline,
        paper=paper,
        literal=Estimate.of(over["sbs_iqr"]),
        ours=Estimate.of(over["sbs_potential"]),
        unit="%",
        good="more",
        why=_UNEQUAL_RANKS,
    )


def ttft_table(rows: Sequence[Row], scenario: str, cost: str) -> ResultTable:
    """Mean TTFT of every policy and the change of both SBS against every baseline."""
    at = {"scenario": scenario, "cost": cost}

    def figures(policy: str, share: float) -> dict[int, float]:
        return by_seed(rows, "ttft_mean_s", policy=policy, peak_share=share, **at)

    table = ResultTable(
        f"mean TTFT in s at shares of random_rank's peak, {LABELS[scenario]}; cost {cost}",
        ["policy", *(f"{share:.0%}" for share in TTFT_SHARES)],
    )
    for policy in PAPER_POLICIES:
        means = [_estimate(figures(policy, share)).mean for share in TTFT_SHARES]
        table.rows.append([policy, *(f"{mean:.3f}" for mean in means)])
    for policy in ("sbs_paper", "sbs"):
        for baseline in BASELINES:
            over = [
                Estimate.of(change(figures(policy, share), figures(baseline, share)))
                for share in TTFT_SHARES
            ]
            table.rows.append([f"{policy} vs {baseline}", *(f"{one.mean:+.0%}" for one in over)])
    return table


def capacity_table(rows: Sequence[Row], slos_s: dict[str, float], cost: str) -> ResultTable:
    """Table 1 with the stronger baselines beside it.

    Args:
        slos_s: the mean TTFT of each scenario.
    """
    table = ResultTable(
        f"max QPS per prefill instance and chunk utilisation there; cost {cost}",
        ["policy", *(f"{name}, mean TTFT {slo_s:g} s" for name, slo_s in slos_s.items())],
    )
    for policy in PAPER_POLICIES:
        cells = []
        for scenario in slos_s:
            key = (scenario, cost, policy)
            mine = [
                r for r in rows if (r["scenario"], r["cost"], r["policy"]) == key and "max_qps" in r
            ]
            qps = mean_of(mine, "max_qps") / mine[0]["prefill_instances"]
            cells.append(f"{qps:.1f} {mean_of(mine, 'chunk_utilization'):.0%}")
        table.rows.append([policy, *cells])
    return table
