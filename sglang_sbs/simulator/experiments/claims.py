"""The claims of arXiv 2512.16134, section 5, and how they compare with simulated rows.

Owns the paper's figures and the verdicts. Must not know how rows are produced or drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from sglang_sbs.simulator.experiments.tables import ResultTable, mean_of
from sglang_sbs.simulator.parallel import Row

TOLERANCE = 0.10
"""A claim reproduces if the simulated figure is within this share of the paper's."""
BASELINES = ("random_rank", "least_tokens", "eta")
"""``random_rank`` is SGLang's default placement under PD disaggregation. The paper does not name
its baseline; the other two are stronger immediate policies."""
PAPER_POLICIES = ("random_rank", "least_tokens", "eta", "sbs_paper", "sbs")
TTFT_SHARES = (0.4, 0.6, 0.8, 1.0)
"""Of the baseline's peak (paper section 5.1)."""

Unit = Literal["", "K", "%"]


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of the paper beside ours. Percentages as shares: 0.15 is 15 %."""

    what: str
    source: str
    """Where the paper says it."""
    baseline: str
    """Compared against what; empty for an absolute figure of the method itself."""
    paper: tuple[float, float]
    """The range the paper gives; both ends equal for a single figure."""
    literal: float
    """The paper's configuration as simulated here."""
    ours: float | None = None
    """The default configuration of this project, where the claim is about the method."""
    unit: Unit = ""

    @property
    def reproduces(self) -> bool:
        """Whether the literal figure is in the paper's range, give or take the tolerance."""
        low, high = self.paper
        return low * (1 - TOLERANCE) <= self.literal <= high * (1 + TOLERANCE)


def table_1_claims(rows: Sequence[Row], cost: str) -> list[Claim]:
    """Table 1: max QPS per prefill instance and chunk utilisation at a mean TTFT."""
    claims = []
    figures = (
        ("paper-3k", "3K, 0.8 s", (57.0, 0.5183), (70.0, 0.887), 0.228),
        ("paper-5k", "5K, 1.0 s", (70.0, 0.530), (79.0, 0.880), 0.129),
    )
    for scenario, label, off, on, gain in figures:
        mine = [r for r in rows if (r["scenario"], r["cost"]) == (scenario, cost)]
        qps, use = {}, {}
        for policy in PAPER_POLICIES:
            runs = [r for r in mine if r["policy"] == policy and "max_qps" in r]
            qps[policy] = mean_of(runs, "max_qps") / runs[0]["prefill_instances"]
            use[policy] = mean_of(runs, "chunk_utilization")
        base = qps["random_rank"]
        baseline = "random_rank"
        source = "Table 1"
        claims += [
            Claim(
                what=f"max QPS per instance, off ({label})",
                source=source,
                baseline=baseline,
                paper=(off[0], off[0]),
                literal=base,
            ),
            Claim(
                what=f"max QPS per instance, on ({label})",
                source=source,
                baseline="",
                paper=(on[0], on[0]),
                literal=qps["sbs_paper"],
                ours=qps["sbs"],
            ),
            Claim(
                what=f"QPS gain ({label})",
                source=source,
                baseline=baseline,
                paper=(gain, gain),
                literal=qps["sbs_paper"] / base - 1 if base else math.nan,
                ours=qps["sbs"] / base - 1 if base else math.nan,
                unit="%",
            ),
            *_use_claims(label, off[1], on[1], use),
        ]
    return claims


def _use_claims(label: str, off: float, on: float, use: Mapping[str, float]) -> list[Claim]:
    """Chunk utilisation of Table 1; ``use``: what was simulated, by policy."""
    return [
        Claim(
            what=f"chunk utilisation, off ({label})",
            source="Table 1",
            baseline="random_rank",
            paper=(off, off),
            literal=use["random_rank"],
            unit="%",
        ),
        Claim(
            what=f"chunk utilisation, on ({label})",
            source="Table 1",
            baseline="",
            paper=(on, on),
            literal=use["sbs_paper"],
            ours=use["sbs"],
            unit="%",
        ),
    ]


def ttft_claims(rows: Sequence[Row], cost: str) -> list[Claim]:
    """Section 5.1: mean TTFT at 40-100 % of the baseline's peak, 0-3K. (The paper gives no figures
    for 3-64K, only that the advantage remains.)"""
    means = ttft_means(rows, "paper-3k", cost)
    return [
        Claim(
            what=f"TTFT reduction at {share:.0%} of the baseline's peak (0-3K)",
            source="abstract, section 5.1",
            baseline="random_rank",
            paper=(0.30, 0.40),
            literal=1 - means["sbs_paper", share] / means["random_rank", share],
            ours=1 - means["sbs", share] / means["random_rank", share],
            unit="%",
        )
        for share in TTFT_SHARES
    ]


def ttft_means(rows: Sequence[Row], scenario: str, cost: str) -> dict[tuple[str, float], float]:
    """(policy, share of the baseline's peak) -> mean TTFT in seconds."""
    mine = [r for r in rows if (r["scenario"], r["cost"]) == (scenario, cost) and "peak_share" in r]
    return {
        (policy, share): mean_of(
            [r for r in mine if (r["policy"], r["peak_share"]) == (policy, share)], "ttft_mean_s"
        )
        for policy in PAPER_POLICIES
        for share in TTFT_SHARES
    }


def ttft_table(rows: Sequence[Row], scenario: str, label: str, cost: str) -> ResultTable:
    """Mean TTFT of every policy and the change of both SBS against every baseline."""
    means = ttft_means(rows, scenario, cost)
    table = ResultTable(
        f"mean TTFT in s at shares of random_rank's peak, {label}; cost {cost}",
        ["policy", *(f"{share:.0%}" for share in TTFT_SHARES)],
    )
    for policy in PAPER_POLICIES:
        table.rows.append([policy, *(f"{means[policy, share]:.3f}" for share in TTFT_SHARES)])
    for policy in ("sbs_paper", "sbs"):
        for baseline in BASELINES:
            changes = [means[policy, s] / means[baseline, s] - 1 for s in TTFT_SHARES]
            table.rows.append([f"{policy} vs {baseline}", *(f"{c:+.0%}" for c in changes)])
    return table


def long_verdict(rows: Sequence[Row], cost: str) -> str:
    """Whether the advantage remains for 3-64K, in a sentence."""
    means = ttft_means(rows, "paper-long", cost)
    lost = [s for s in TTFT_SHARES if means["sbs_paper", s] >= means["random_rank", s]]
    claim = "3-64K: the paper says that SBS keeps its advantage, without figures. Simulated "
    if not lost:
        return (
            claim + "against random_rank (cost " + cost + "), the literal rule does at all loads."
        )
    shares = ", ".join(f"{share:.0%}" for share in lost)
    return claim + f"against random_rank (cost {cost}), the literal rule loses it at {shares}."


def decode_claims(rows: Sequence[Row]) -> list[Claim]:
    """Section 5.2.2: the KV band over ranks and the throughput."""
    by_policy = {
        policy: [r for r in rows if r["scenario"] == "paper-decode" and r["policy"] == policy]
        for policy in ("skewed", "round_robin", "sbs_iqr", "sbs_potential")
    }
    value = {
        (policy, key): mean_of(mine, key)
        for policy, mine in by_policy.items()
        for key in ("kv_sigma_low", "kv_sigma_high", "tokens_per_s")
    }
    claims = []
    for baseline in ("skewed", "round_robin"):
        for edge, key, figure in (
            ("lower", "kv_sigma_low", 40e3),
            ("upper", "kv_sigma_high", 130e3),
        ):
            claims.append(
                Claim(
                    what=f"KV band, {edge} edge, baseline",
                    source="section 5.2.2",
                    baseline=baseline,
                    paper=(figure, figure),
                    literal=value[baseline, key],
                    unit="K",
                )
            )
    for edge, key, figure in (("lower", "kv_sigma_low", 60e3), ("upper", "kv_sigma_high", 100e3)):
        claims.append(
            Claim(
                what=f"KV band, {edge} edge, SBS",
                source="section 5.2.2",
                baseline="",
                paper=(figure, figure),
                literal=value["sbs_iqr", key],
                ours=value["sbs_potential", key],
                unit="K",
            )
        )
    for baseline in ("skewed", "round_robin"):
        base = value[baseline, "tokens_per_s"]
        claims.append(
            Claim(
                what="decode throughput gain",
                source="section 5.2.2",
                baseline=baseline,
                paper=(0.15, 0.15),
                literal=value["sbs_iqr", "tokens_per_s"] / base - 1,
                ours=value["sbs_potential", "tokens_per_s"] / base - 1,
                unit="%",
            )
        )
    return claims


def claims_table(claims: Sequence[Claim], title: str) -> ResultTable:
    """The paper's figure, its rule as simulated, the default of this project, and the verdict."""
    table = ResultTable(
        title,
        ["claim", "against", "paper", "literal, simulated", "ours", f"within {TOLERANCE:.0%}"],
    )
    for claim in claims:
        low, high = (_text(edge, claim.unit) for edge in claim.paper)
        table.rows.append(
            [
                claim.what,
                claim.baseline or "-",
                low if low == high else f"{low} to {high}",
                _text(claim.literal, claim.unit),
                "-" if claim.ours is None else _text(claim.ours, claim.unit),
                "yes" if claim.reproduces else "NO",
            ]
        )
    return table


def _text(value: float, unit: Unit) -> str:
    if unit == "%":
        return f"{value:.1%}"
    return f"{value / 1e3:.0f}K" if unit == "K" else f"{value:.1f}"
