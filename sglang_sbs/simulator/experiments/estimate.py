"""What several seeds say of one figure: its mean, and how far off that may be."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec

_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571)
"""Student's t for 95 %, two-sided, with 1 to 5 degrees of freedom."""
_Z_975 = 1.959964


class Estimate(msgspec.Struct, frozen=True):
    """A mean over seeds with its 95 % confidence interval."""

    mean: float
    half: float = math.nan
    """Half the interval's width (Student's t over seeds); NaN for a single seed."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Of one value per seed; NaN without any."""
        if not values:
            return cls(math.nan)
        mean = statistics.fmean(values)
        if len(values) == 1:
            return cls(mean)
        spread = statistics.stdev(values) / math.sqrt(len(values))
        return cls(mean, student_t(len(values) - 1) * spread)

    @property
    def low(self) -> float:
        """The lower end of the interval; the mean itself for a single seed."""
        return self.mean if math.isnan(self.half) else self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean if math.isnan(self.half) else self.mean + self.half


def student_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t (Cornish and Fisher's expansion above the table)."""
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    z = _Z_975
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return z + first + second + third


BySeed = Mapping[int, float]
"""A figure of each seed."""


def change(mine: BySeed, base: BySeed) -> list[float]:
    """By how much ``mine`` is over ``base``, as a share of it, seed by seed: both had the same
    arrivals, so what a seed brings to both cancels out."""
    return [mine[seed] / base[seed] - 1 if base[seed] else math.nan for seed in mine]
