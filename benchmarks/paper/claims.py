"""A claim of a paper beside what several seeds say of it, and the verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from sglang_sbs.simulator.experiments.tables import ResultTable
from sglang_sbs.trial.ratios import student_975

TOLERANCE = 0.10
"""A claim reproduces if the simulated mean is within this share of the paper's."""

Unit = Literal["", "K", "%", "pp", "T", "x"]
"""``%`` and ``pp``: the figures are shares, 0.15 is 15 %. ``T``: of a forward pass."""
_FORMS: dict[Unit, Callable[[float], str]] = {
    "": "{:.1f}".format,
    "K": lambda value: f"{value / 1e3:.1f}K",
    "%": "{:.1%}".format,
    "pp": lambda value: f"{100 * value:.1f} pp",
    "T": "{:.3f} T".format,
    "x": "{:.1f} x".format,
}
Side = Literal["more", "less", ""]
Verdict = Literal["reproduced", "better", "sbs only", "open", "not reproduced"]
VERDICTS: dict[Verdict, str] = {
    "reproduced": f"the mean is within {TOLERANCE:.0%} of the paper's figure; where it gives none, "
    "all of the interval is a gain",
    "better": "it is beyond the paper's figure, on the good side",
    "sbs only": "not with the paper's rule, but with sbs, the default, as well or better",
    "open": "the mean is not, but its interval reaches so far",
    "not reproduced": "see why",
}


class Estimate(msgspec.Struct, frozen=True):
    """A mean over seeds with its 95 % confidence interval."""

    mean: float
    half: float = math.nan
    """Half the interval's width (Student's t over seeds); NaN for a single seed."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Return the estimate from one value per seed; NaN without any."""
        if not values:
            return cls(math.nan)
        mean = statistics.fmean(values)
        if len(values) == 1:
            return cls(mean)
        spread = statistics.stdev(values) / math.sqrt(len(values))
        return cls(mean, student_975(len(values) - 1) * spread)

    @property
    def low(self) -> float:
        """The lower end of the interval; the mean itself for a single seed."""
        return self.mean if math.isnan(self.half) else self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean if math.isnan(self.half) else self.mean + self.half


BySeed = Mapping[int, float]


def change(mine: BySeed, base: BySeed) -> list[float]:
    """Return the relative change from ``base`` to ``mine``, seed by seed: both had the same
    arrivals, so what a seed brings to both cancels out."""
    return [mine[seed] / base[seed] - 1 if base[seed] else math.nan for seed in mine]


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of the paper beside ours. Percentages as shares: 0.15 is 15 %."""

    what: str
    source: str
    """Where the paper says it."""
    baseline: str
    """Compared against what; empty for an absolute figure of the method itself."""
    paper: tuple[float, float]
    """The range the paper gives; both ends equal for a single figure, the upper one infinite where
    it only says that there is a gain."""
    literal: Estimate
    ours: Estimate | None = None
    """The default configuration of this project, where the claim is about the method."""
    unit: Unit = ""
    good: Side = ""
    """Which side is better, where the claim is about the method."""
    why: str = ""
    """Why it may not reproduce."""

    @property
    def verdict(self) -> Verdict:
        """The verdict, explained in :data:`VERDICTS`; only claims about the method can be
        ``better`` or ``sbs only``."""
        if self._near(self.literal):
            return "reproduced"
        if self._beyond(self.literal):
            return "better"
        if self.ours is not None and (self._near(self.ours) or self._beyond(self.ours)):
            return "sbs only"
        low, high = self._reach
        reaches = self.literal.low <= high and self.literal.high >= low
        return "open" if reaches and not math.isnan(self.literal.half) else "not reproduced"

    @property
    def _reach(self) -> tuple[float, float]:
        low, high = self.paper
        return low * (1 - TOLERANCE), high * (1 + TOLERANCE)

    def _near(self, estimate: Estimate) -> bool:
        low, high = self._reach
        return estimate.low > low if math.isinf(high) else low <= estimate.mean <= high

    def _beyond(self, estimate: Estimate) -> bool:
        low, high = self._reach
        return (self.good == "more" and estimate.mean > high) or (
            self.good == "less" and estimate.mean < low
        )

    def row(self) -> dict[str, Any]:
        """For JSON: the fields and the verdict; a reason only where one is needed."""
        fields = msgspec.to_builtins(self)
        needed = self.verdict not in ("reproduced", "better")
        return {**fields, "why": self.why if needed else "", "verdict": self.verdict}


def claims_table(claims: Sequence[Claim], title: str) -> ResultTable:
    """The paper's figure, its rule as simulated, the default of this project, and the verdict."""
    table = ResultTable(
        f"{title}; means over seeds with 95 % intervals (Student's t)",
        ["claim", "against", "paper", "paper's rule, simulated", "sbs", "verdict"],
    )
    for claim in claims:
        found = [
            "-" if x is None else _estimate(x, claim.unit) for x in (claim.literal, claim.ours)
        ]
        table.rows.append([claim.what, claim.baseline or "-", _range(claim), *found, claim.verdict])
    return table


def summary(claims: Sequence[Claim]) -> list[str]:
    """How many have which verdict, and then why the others do not reproduce."""
    counts = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in VERDICTS}
    counted = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    reasons: dict[tuple[str, str], list[Claim]] = {}
    for claim in claims:
        if claim.verdict not in ("reproduced", "better"):
            reasons.setdefault((claim.verdict, claim.why), []).append(claim)
    whys = (
        f"{verdict}: {'; '.join(map(_named, missed))}. {why}".rstrip()
        for (verdict, why), missed in reasons.items()
    )
    return [f"{len(claims)} figures: {counted}.", *whys]


def _named(claim: Claim) -> str:
    return f"{claim.what}{f' against {claim.baseline}' if claim.baseline else ''}"


def _range(claim: Claim) -> str:
    low, high = (_FORMS[claim.unit](edge) for edge in claim.paper)
    if math.isinf(claim.paper[1]):
        return f"> {low}"
    return low if low == high else f"{low} to {high}"


def _estimate(estimate: Estimate, unit: Unit) -> str:
    half = "" if math.isnan(estimate.half) else f" ± {_FORMS[unit](estimate.half)}"
    return f"{_FORMS[unit](estimate.mean)}{half}"
