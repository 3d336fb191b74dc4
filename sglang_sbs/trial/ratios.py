"""Ratios of mean TTFT with 95 % intervals, as numbers and text, and reasons why SBS may gain
nothing.

Every command and page that compares policies uses these, so that they all mean the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

NO_GAIN = 0.98
"""A ratio above this counts as no gain."""
NO_LOSS = 1.02
LOW_LOAD = 0.3
FULL_LOAD = 1.0
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""0.975 quantiles of Student's t, by degrees of freedom from one on."""

Part = tuple[float, int]
"""Sum of TTFTs in seconds, and number of requests, of one part of a run (e.g. one minute)."""


class Ratio(NamedTuple):
    """Mean TTFT of one side divided by the other's, with the bounds of its 95 % interval."""

    ratio: float
    low: float
    high: float

    @property
    def certain(self) -> bool:
        """Whether the interval excludes 1."""
        return self.high < 1 or self.low > 1

    def words(self) -> str:
        """Format as ``0.78x (0.74 to 0.83)``, without unknown bounds."""
        if math.isinf(self.high):
            return f"{self.ratio:.2f}x"
        return f"{self.ratio:.2f}x ({self.low:.2f} to {self.high:.2f})"


def student_975(degrees: int) -> float:
    """Return the 0.975 quantile of Student's t (Abramowitz and Stegun 26.7.5 for many degrees)."""
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    return 1.960 + 2.372 / degrees + 2.823 / degrees**2 + 2.556 / degrees**3


def ratio_of_means(ours: Sequence[Part], theirs: Sequence[Part]) -> Ratio:
    """Return the ratio of two means over the same parts of a run, and its interval from batch means
    of a ratio estimator.

    Requests of one part share passes and queues, so parts are the independent units and not
    requests. With one part the bounds are 0 and infinity. Each side needs a request, and ``theirs``
    a sum above 0."""
    sum_s, number = sum(s for s, _ in ours), sum(n for _, n in ours)
    other_s, others = sum(s for s, _ in theirs), sum(n for _, n in theirs)
    ratio, count = sum_s / number / (other_s / others), len(ours)
    if count < 2:
        return Ratio(ratio, 0.0, math.inf)
    squares = sum(
        (x / sum_s - n / number - y / other_s + m / others) ** 2
        for (x, n), (y, m) in zip(ours, theirs, strict=True)
    )
    half = ratio * student_975(count - 1) * math.sqrt(count / (count - 1) * squares)
    return Ratio(ratio, max(0.0, ratio - half), ratio + half)


def joined(words: Iterable[str]) -> str:
    """Return ``a``, ``a and b`` or ``a, b and c``; ``words`` must not be empty."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


@dataclass(frozen=True, slots=True)
class Circumstances:
    policy: str
    holding: bool
    load: float
    """Load as a share of what full chunks on every DP rank would compute."""
    ranks: int
    """Number of DP ranks that share the widest barrier."""
    overtaxed: bool = False
    """True if there are too many requests for an estimate."""


def why_no_gain(about: Circumstances) -> str:
    """Return the likeliest reason why holding gains nothing over immediate dispatch."""
    if about.policy != "sbs":
        return f"the policy is {about.policy}, which is not sbs"
    if not about.holding:
        return "batches do not arrive whole at the engines, so requests leave at once"
    if about.load < LOW_LOAD:
        return (
            f"the load is low ({about.load:.2f} of what full chunks would compute): most requests "
            "find an idle instance"
        )
    if about.load > FULL_LOAD:
        return f"prefill is overloaded ({about.load:.2f}): chunks are full under every policy"
    if about.ranks <= 2:
        ranks = "one DP rank" if about.ranks == 1 else "two DP ranks"
        return f"{ranks} per instance: there is little to wait for at the barrier"
    return "no cause is apparent from load, DP ranks or batches that arrive split"
