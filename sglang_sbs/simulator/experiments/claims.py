"""The claims of arXiv 2512.16134, section 5, and how they compare with simulated rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import msgspec

from sglang_sbs.simulator.experiments.tables import ResultTable, groups, mean_of
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


class Claim(msgspec.Struct, frozen=True):
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


def _claim(
    source: str,
    what: str,
    baseline: str,
    paper: float,
    literal: float,
    ours: float | None = None,
    *,
    unit: Unit = "",
) -> Claim:
    return Claim(what, source, baseline, (paper, paper), literal, ours, unit)


def table_1_claims(rows: Sequence[Row], cost: str) -> list[Claim]:
    """Table 1: max QPS per prefill instance and chunk utilisation at a mean TTFT."""
    claims = []
    claim = partial(_claim, "Table 1")
    figures = (
        ("paper-3k", "3K, 0.8 s", (57.0, 0.5183), (70.0, 0.887), 0.228),
        ("paper-5k", "5K, 1.0 s", (70.0, 0.530), (79.0, 0.880), 0.129),
    )
    runs = groups((r for r in rows if "max_qps" in r), "scenario", "cost", "policy")
    for scenario, label, off, on, gain in figures:
        mine = {policy: runs[scenario, cost, policy] for policy in PAPER_POLICIES}
        qps = {
            policy: mean_of(some, "max_qps") / some[0]["prefill_instances"]
            for policy, some in mine.items()
        }
        use = {policy: mean_of(some, "chunk_utilization") for policy, some in mine.items()}
        base, literal, ours = (qps[policy] for policy in ("random_rank", "sbs_paper", "sbs"))
        gains = [one / base - 1 if base else math.nan for one in (literal, ours)]
        claims += [
            claim(f"max QPS per instance, off ({label})", "random_rank", off[0], base),
            claim(f"max QPS per instance, on ({label})", "", on[0], literal, ours),
            claim(f"QPS gain ({label})", "random_rank", gain, *gains, unit="%"),
            claim(
                f"chunk utilisation, off ({label})",
                "random_rank",
                off[1],
                use["random_rank"],
                unit="%",
            ),
            claim(
                f"chunk utilisation, on ({label})",
                "",
                on[1],
                use["sbs_paper"],
                use["sbs"],
                unit="%",
            ),
        ]
    return claims


def ttft_claims(rows: Sequence[Row], cost: str) -> list[Claim]:
    """Section 5.1: mean TTFT at 40-100 % of the baseline's peak, 0-3K. (The paper gives no figures
    for 3-64K, only that the advantage remains.)"""
    means = ttft_means(rows, "paper-3k", cost)
    claims = []
    for share in TTFT_SHARES:
        base = means["random_rank", share]
        literal, ours = (1 - means[policy, share] / base for policy in ("sbs_paper", "sbs"))
        what = f"TTFT reduction at {share:.0%} of the baseline's peak (0-3K)"
        source = "abstract, section 5.1"
        claims.append(Claim(what, source, "random_rank", (0.30, 0.40), literal, ours, "%"))
    return claims


def ttft_means(rows: Sequence[Row], scenario: str, cost: str) -> dict[tuple[str, float], float]:
    """(policy, share of the baseline's peak) -> mean TTFT in seconds."""
    runs = groups(
        (r for r in rows if "peak_share" in r), "scenario", "cost", "policy", "peak_share"
    )
    return {
        (policy, share): mean_of(runs[scenario, cost, policy, share], "ttft_mean_s")
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
        return f"{claim}against random_rank (cost {cost}), the literal rule does at all loads."
    shares = ", ".join(f"{share:.0%}" for share in lost)
    return f"{claim}against random_rank (cost {cost}), the literal rule loses it at {shares}."


def decode_claims(rows: Sequence[Row]) -> list[Claim]:
    """Section 5.2.2: the KV band over ranks and the throughput."""
    runs = groups(rows, "scenario", "policy")

    def value(policy: str, key: str) -> float:
        return mean_of(runs["paper-decode", policy], key)

    claim = partial(_claim, "section 5.2.2")
    edges = (("lower", "kv_sigma_low", 40e3, 60e3), ("upper", "kv_sigma_high", 130e3, 100e3))
    claims = [
        claim(f"KV band, {edge} edge, baseline", baseline, off, value(baseline, key), unit="K")
        for baseline in ("skewed", "round_robin")
        for edge, key, off, _ in edges
    ]
    for edge, key, _, on in edges:
        both = (value(policy, key) for policy in ("sbs_iqr", "sbs_potential"))
        claims.append(claim(f"KV band, {edge} edge, SBS", "", on, *both, unit="K"))
    for baseline in ("skewed", "round_robin"):
        base = value(baseline, "tokens_per_s")
        gains = (value(one, "tokens_per_s") / base - 1 for one in ("sbs_iqr", "sbs_potential"))
        claims.append(claim("decode throughput gain", baseline, 0.15, *gains, unit="%"))
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
