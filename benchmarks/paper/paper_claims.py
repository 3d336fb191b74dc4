"""The figures of arXiv 2512.16134, what of the simulated rows each is held against, and why some do
not reproduce."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.paper.claims import BySeed, Claim, Estimate, Side, Unit, change
from benchmarks.paper.queueing import QUEUEING
from sglang_sbs.simulator.experiments.tables import ResultTable, mean_of
from sglang_sbs.simulator.parallel import Row

BASELINE = "random_rank"
"""SGLang's default placement under PD disaggregation. The paper does not name its baseline."""
BASELINES = (BASELINE, "least_tokens", "eta")
"""The other two are stronger immediate policies."""
RULES = ("sbs_paper", "sbs")
"""The paper's rule and the default of this project; of decode below."""
DECODE_RULES = ("sbs_iqr", "sbs_potential")
PAPER_POLICIES = (*BASELINES, *RULES)
TTFT_SHARES = (0.4, 0.6, 0.8, 1.0)
"""Loads as shares of the baseline's peak (paper section 5.1)."""
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
_RANDOM = "Ranks chosen at random get more than a chunk now and then: a pass more."
_UNEQUAL_RANKS = (
    "The paper's baseline band needs ranks that stay unequal (skewed); round robin, which is "
    "SGLang's, is closer to balance, and even perfect balance would not gain 15 % on it."
)
_PEAK = "It is the most of any rank in any step, and rises with the time that is looked at."

_Paper = float | tuple[float, float]
_Values = Sequence[float] | BySeed


def by_seed(rows: Sequence[Row], key: str, **fields: Any) -> dict[int, float]:
    """A figure of each seed: the rows with these values in these fields, one per seed."""
    return {
        row["seed"]: row[key]
        for row in rows
        if key in row and all(row.get(name) == value for name, value in fields.items())
    }


def _estimate(values: _Values) -> Estimate:
    return Estimate.of(list(values.values() if isinstance(values, Mapping) else values))


def _claim(
    what: str,
    source: str,
    baseline: str,
    paper: _Paper,
    found: Iterable[_Values],
    why: str,
    *,
    unit: Unit = "%",
    good: Side = "more",
) -> Claim:
    """``found``: by the paper's configuration, and by ours where the claim is about the method."""
    literal, *ours = map(_estimate, found)
    return Claim(
        what=what,
        source=source,
        baseline=baseline,
        paper=paper if isinstance(paper, tuple) else (paper, paper),
        literal=literal,
        ours=ours[0] if ours else None,
        unit=unit,
        good=good,
        why=why,
    )


def prefill_claims(rows: Sequence[Row], cost: str) -> list[Claim]:
    """Sections 3.3, 5.1 and 5.2.1, and of the abstract what is about prefill."""
    kinds = (table_1_claims, ttft_claims, long_claims, balance_claims)
    return [claim for kind in kinds for claim in kind(rows, cost)]


def table_1_claims(rows: Sequence[Row], cost: str) -> list[Claim]:
    """Table 1: max QPS per prefill instance and chunk utilisation at a mean TTFT."""
    claims: list[Claim] = []
    gains: list[list[list[float]]] = [[] for _ in RULES]
    for scenario, label, off, on, gain in (
        ("paper-3k", "3K, 0.8 s", (57.0, 0.5183), (70.0, 0.887), 0.228),
        ("paper-5k", "5K, 1.0 s", (70.0, 0.530), (79.0, 0.880), 0.129),
    ):
        qps, use = {}, {}
        for policy in (BASELINE, *RULES):
            runs = capacities(rows, scenario, cost, policy)
            qps[policy] = {r["seed"]: r["max_qps"] / r["prefill_instances"] for r in runs}
            use[policy] = by_seed(runs, "chunk_utilization")
        over = [change(qps[rule], qps[BASELINE]) for rule in RULES]
        more = [[use[rule][s] - use[BASELINE][s] for s in use[rule]] for rule in RULES]
        for so_far, values in zip(gains, over, strict=True):
            so_far.append(values)
        claims += [
            *_off_and_on("max QPS per instance", label, (off[0], on[0]), qps, ""),
            _gain(f"QPS gain ({label})", gain, over),
            *_off_and_on("chunk utilisation", label, (off[1], on[1]), use, "%"),
            _gain(f"utilisation gain ({label})", on[1] - off[1], more, unit="pp"),
        ]
    both = [[sum(pair) / len(pair) for pair in zip(*some, strict=True)] for some in gains]
    mean = _gain("throughput gain, mean of both", (0.15, 0.20), both, source="abstract")
    return [*claims, mean]


def _off_and_on(
    what: str, label: str, paper: tuple[float, float], found: Mapping[str, BySeed], unit: Unit
) -> list[Claim]:
    """A line of Table 1 without and with SBS."""
    off, on = f"{what}, off ({label})", f"{what}, on ({label})"
    base, rules = [found[BASELINE]], [found[rule] for rule in RULES]
    return [
        _claim(off, "Table 1", BASELINE, paper[0], base, _FULLER_BASELINE, unit=unit, good=""),
        _claim(on, "Table 1", "", paper[1], rules, _OVERSHOOT, unit=unit),
    ]


def _gain(
    what: str, paper: _Paper, over: Sequence[_Values], *, source: str = "Table 1", unit: Unit = "%"
) -> Claim:
    return _claim(what, source, BASELINE, paper, over, _FULLER_BASELINE, unit=unit)


def ttft_claims(rows: Sequence[Row], cost: str) -> list[Claim]:
    """Section 5.1: mean TTFT at 40-100 % of the baseline's peak, 0-3K."""
    less = [_less(rows, "paper-3k", cost, share, "ttft_mean_s") for share in TTFT_SHARES]
    what, source = "TTFT reduction at {:.0%} of the baseline's peak (0-3K)", "abstract, section 5.1"
    claims = [
        _claim(what.format(share), source, BASELINE, (0.30, 0.40), values, _LATE)
        for share, values in zip(TTFT_SHARES, less, strict=True)
    ]
    lighter = [values for share, values in zip(TTFT_SHARES, less, strict=True) if share < 0.8]
    most = [
        max(some, key=lambda figure: _estimate(figure).mean) for some in zip(*lighter, strict=True)
    ]
    what = "most TTFT reduction below 80 % (0-3K)"
    return [*claims, _claim(what, "section 5.1", BASELINE, 0.40, most, _LATE)]


def long_claims(rows: Sequence[Row], cost: str) -> list[Claim]:
    """Section 5.1, 3-64K: "maintains its performance advantage", "suppresses tail latency"."""
    claims, source = [], "section 5.1, Figure 6b"
    for key, name in (("ttft_mean_s", "TTFT"), ("ttft_p99_s", "p99 TTFT")):
        for share in TTFT_SHARES:
            what = f"{name} reduction at {share:.0%} (3-64K)"
            less = _less(rows, "paper-long", cost, share, key)
            claims.append(_claim(what, source, BASELINE, _GAIN, less, _ROTATION))
    return claims


def balance_claims(rows: Sequence[Row], cost: str) -> list[Claim]:
    """Figures 3 and 4: SBS has smaller bubbles behind the heaviest rank."""
    claims, source = [], "section 3.3, Figures 3 and 4"
    for share in (TTFT_SHARES[0], TTFT_SHARES[-1]):
        what = f"heaviest rank / mean, less by, at {share:.0%} (0-3K)"
        less = _less(rows, "paper-3k", cost, share, "max_over_mean")
        claims.append(_claim(what, source, BASELINE, _GAIN, less, _QUEUED))
    return claims


def _less(
    rows: Sequence[Row], scenario: str, cost: str, share: float, key: str
) -> list[list[float]]:
    """Return the relative reduction of a figure by SBS against the baseline, by rule."""
    at = {"scenario": scenario, "cost": cost, "peak_share": share}
    base = by_seed(rows, key, policy=BASELINE, **at)
    return [_signed(-1, by_seed(rows, key, policy=rule, **at), base) for rule in RULES]


def _signed(sign: int, mine: BySeed, base: BySeed) -> list[float]:
    return [sign * difference for difference in change(mine, base)]


def queueing_claims(rows: Sequence[Row]) -> list[Claim]:
    """Section 3.2: an immediate dispatch waits T/2 in the engine however many instances there are,
    a staggered one T/2N in the scheduler."""
    source, claims = "section 3.2", []
    counts = sorted({row["prefill_instances"] for row in rows if row["scenario"] == QUEUEING})
    for count in counts:
        at = {"scenario": QUEUEING, "prefill_instances": count}
        base, *waits = (
            by_seed(rows, "wait_passes", policy=policy, **at) for policy in (BASELINE, *RULES)
        )
        what = f"wait, immediate, {count} instances"
        claims.append(_claim(what, source, BASELINE, 0.5, [base], _RANDOM, unit="T", good=""))
        what = f"wait, staggered, {count} instances"
        claims.append(
            _claim(what, source, "", 0.5 / count, waits, _OVERSHOOT, unit="T", good="less")
        )
    shorter = [[base[seed] / mine[seed] for seed in base] for mine in waits]
    what, paper = f"wait shorter by, {counts[-1]} instances", float(counts[-1])
    return [*claims, _claim(what, source, BASELINE, paper, shorter, _OVERSHOOT, unit="x")]


def decode_claims(rows: Sequence[Row]) -> list[Claim]:
    """Section 5.2.2, Figures 7 and 8: the KV band over ranks and the throughput."""

    def found(policy: str, key: str) -> dict[int, float]:
        return by_seed(rows, key, scenario="paper-decode", policy=policy)

    baselines = ("skewed", "round_robin")
    absolute: list[tuple[str, str, str, float, Side]] = [
        *(
            (f"KV {name}, baseline", baseline, key, figure, "")
            for baseline in baselines
            for name, key, figure in (
                ("band, lower edge", "kv_sigma_low", 40e3),
                ("band, upper edge", "kv_sigma_high", 130e3),
                ("peak", "kv_peak", 150e3),
            )
        ),
        ("KV band, lower edge, SBS", "", "kv_sigma_low", 60e3, "more"),
        ("KV band, upper edge, SBS", "", "kv_sigma_high", 100e3, "less"),
    ]
    claims = []
    for what, baseline, key, figure, good in absolute:
        values = [found(policy, key) for policy in ([baseline] if baseline else DECODE_RULES)]
        why, source = _PEAK if key == "kv_peak" else _UNEQUAL_RANKS, "section 5.2.2, Figure 7"
        claims.append(_claim(what, source, baseline, figure, values, why, unit="K", good=good))
    gains: tuple[tuple[str, str, _Paper, int], ...] = (
        ("KV band narrower by", "kv_band", 0.40, -1),
        ("KV peak lower by", "kv_peak", _GAIN, -1),
        ("decode throughput gain", "tokens_per_s", 0.15, 1),
    )
    for baseline in baselines:
        for what, key, paper, sign in gains:
            over = [
                _signed(sign, found(decode_rule, key), found(baseline, key))
                for decode_rule in DECODE_RULES
            ]
            source = "section 5.2.2, Figures 7 and 8"
            claims.append(_claim(what, source, baseline, paper, over, _UNEQUAL_RANKS))
    return claims


def ttft_table(rows: Sequence[Row], scenario: str, cost: str) -> ResultTable:
    """Mean TTFT of every policy and the change of both SBS against every baseline."""
    at = {"scenario": scenario, "cost": cost}

    def figures(policy: str) -> list[dict[int, float]]:
        """Return the figures at each share."""
        return [
            by_seed(rows, "ttft_mean_s", policy=policy, peak_share=share, **at)
            for share in TTFT_SHARES
        ]

    table = ResultTable(
        f"mean TTFT in s at shares of random_rank's peak, {LABELS[scenario]}; cost {cost}",
        ["policy", *(f"{share:.0%}" for share in TTFT_SHARES)],
    )
    for policy in PAPER_POLICIES:
        table.rows.append(
            [policy, *(f"{_estimate(figure).mean:.3f}" for figure in figures(policy))]
        )
    for rule in RULES:
        for baseline in BASELINES:
            over = map(change, figures(rule), figures(baseline))
            cells = (f"{_estimate(figure).mean:+.0%}" for figure in over)
            table.rows.append([f"{rule} vs {baseline}", *cells])
    return table


def capacities(rows: Sequence[Row], scenario: str, cost: str, policy: str) -> list[Row]:
    wanted = (scenario, cost, policy)
    found = [row for row in rows if (row["scenario"], row["cost"], row["policy"]) == wanted]
    return [row for row in found if "max_qps" in row]


def capacity_table(rows: Sequence[Row], slos_s: dict[str, float], cost: str) -> ResultTable:
    """Table 1 with the stronger baselines beside it; ``slos_s``: the mean TTFT of each scenario."""
    table = ResultTable(
        f"max QPS per prefill instance and chunk utilisation there; cost {cost}",
        ["policy", *(f"{name}, mean TTFT {slo_s:g} s" for name, slo_s in slos_s.items())],
    )
    for policy in PAPER_POLICIES:
        cells = []
        for scenario in slos_s:
            mine = capacities(rows, scenario, cost, policy)
            qps = mean_of(mine, "max_qps") / mine[0]["prefill_instances"]
            cells.append(f"{qps:.1f} {mean_of(mine, 'chunk_utilization'):.0%}")
        table.rows.append([policy, *cells])
    return table
