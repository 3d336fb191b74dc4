"""Ratios of two runs of the same arrivals, with intervals from a bootstrap over blocks of time."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean

import msgspec

from sglang_sbs.trial.ratios import Ratio, student_975

REPLICATES = 1000
MOST_BLOCKS = 60
LEAST_BLOCKS = 8
_ALPHA = 0.05
_Z_975 = 1.960


class Ratios(msgspec.Struct, frozen=True):
    mean: Ratio
    p99: Ratio


def blocks_of(times_s: Sequence[float], block_s: float) -> list[int]:
    """Return the block number of each time; the first time begins block 0. ``block_s``: seconds;
    blocks are longer if there would be more than :data:`MOST_BLOCKS`."""
    first_s, span_s = times_s[0], times_s[-1] - times_s[0]
    count = max(1, min(MOST_BLOCKS, int(span_s / block_s)))
    return [min(count - 1, int(count * (at_s - first_s) / max(1e-9, span_s))) for at_s in times_s]


def ratios(
    other: Sequence[Sequence[float]],
    ran: Sequence[Sequence[float]],
    blocks: Sequence[int],
    seed: int = 0,
) -> Ratios:
    """Return mean and p99 of ``other`` over those of ``ran``.

    Each side is a list of draws, i.e. simulations of the same arrivals. A draw has one value in
    seconds per request, and ``blocks`` the block of each request. A replicate takes blocks with
    replacement, the same ones for both sides, and one draw of each side, so it varies like one real
    run. Percentile intervals are expanded for few blocks (Hesterberg 2015, section 4.3)."""
    numbers = sorted(set(blocks))
    ours, theirs = ([_Draw(values, blocks) for values in side] for side in (other, ran))
    rng = random.Random(seed)
    every = Counter(dict.fromkeys(numbers, 1))
    means, p99s = [], []
    for _ in range(REPLICATES):
        weights = Counter(rng.choices(numbers, k=len(numbers)))
        mine, of_ran = rng.choice(ours), rng.choice(theirs)
        means.append(mine.mean(weights) / of_ran.mean(weights))
        p99s.append(mine.p99(weights) / of_ran.p99(weights))

    mean = fmean(draw.mean(every) for draw in ours) / fmean(draw.mean(every) for draw in theirs)
    p99 = fmean(draw.p99(every) for draw in ours) / fmean(draw.p99(every) for draw in theirs)
    return Ratios(_interval(mean, means, len(numbers)), _interval(p99, p99s, len(numbers)))


class _Draw:
    def __init__(self, values: Sequence[float], blocks: Sequence[int]) -> None:
        self._sums: dict[int, float] = defaultdict(float)
        self._counts: Counter[int] = Counter()
        for value, block in zip(values, blocks, strict=True):
            self._sums[block] += value
            self._counts[block] += 1
        self._longest_first = sorted(zip(values, blocks, strict=True), reverse=True)

    def mean(self, weights: Counter[int]) -> float:
        total = sum(weight * self._sums[block] for block, weight in weights.items())
        return total / sum(weight * self._counts[block] for block, weight in weights.items())

    def p99(self, weights: Counter[int]) -> float:
        above = 0.01 * sum(weight * self._counts[block] for block, weight in weights.items())
        for value, block in self._longest_first:
            above -= weights[block]
            if above < 0:
                return value
        return self._longest_first[-1][0]


def _interval(value: float, replicates: list[float], blocks: int) -> Ratio:
    ordered = sorted(replicates)
    wider = student_975(max(1, blocks - 1)) / _Z_975 * (blocks / max(1, blocks - 1)) ** 0.5
    tail = int(_ALPHA / 2 * len(ordered))
    low, high = ordered[tail], ordered[-1 - tail]
    # The log of a ratio is closer to symmetric than the ratio.
    return Ratio(
        value,
        min(value, value * (low / value) ** wider),
        max(value, value * (high / value) ** wider),
    )
