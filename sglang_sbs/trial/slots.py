"""Counts the requests in the slots of a trial, and computes the difference between the two slots of
a pair.

A request belongs to the slot in which it arrived. It counts if it arrived after the slot's first
third; before, the queues that the other policy left behind would distort the result.

TTFT depends on the number of tokens that happened to arrive, so the difference of a pair is
adjusted for it. Log mean TTFT is regressed on the logs of the token rate and of the mean prompt
length. The samples are blocks (an eighth of a slot's counted part each), and each slot has its own
intercept. The coefficients do not change when the two policies swap their names, so the adjustment
favours neither."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

BLOCKS = 8
LEAST_REQUESTS = 10
"""A slot needs this many counted requests with an answer; otherwise its pair is not compared."""
_LEAST_IN_BLOCK = 3
_PER_E = 50
"""Buckets of the TTFT histogram per factor of e, so that percentiles are exact to 1 %."""


@dataclass(slots=True)
class Block:
    """Requests that arrived in an eighth of the counted part of a slot."""

    requests: int = 0
    tokens: int = 0
    answered: int = 0
    ttft_s: float = 0.0
    """Sum of the TTFTs of the answered requests."""


def covariates(requests: int, tokens: int) -> tuple[float, float]:
    """Return the adjustment's variables: logarithms of the tokens and of the mean prompt length."""
    tokens = max(1, tokens)
    return math.log(tokens), math.log(tokens / requests)


@dataclass(slots=True)
class Slot:
    """Requests that arrived while one of the two policies was in force."""

    arm: int
    """0: the policy that the trial started with; 1: the baseline."""
    begin_s: float
    length_s: float
    arrived: int = 0
    """Number of requests in the whole slot. The next three fields count the whole slot as well."""
    refused: int = 0
    exceeded: int = 0
    """Number of requests whose TTFT was longer than the trial's limit (``p99_s``)."""
    unanswered: int = 0
    """Number of requests that failed or were cancelled before the first token."""
    open: int = 0
    """Number of counted requests still waiting for their first token."""
    blocks: list[Block] = field(default_factory=lambda: [Block() for _ in range(BLOCKS)])

    def place_of(self, at_s: float) -> float:
        """Return the position of a time within the slot: 0 is the start, 1 the end."""
        return (at_s - self.begin_s) / self.length_s

    def block_of(self, place: float) -> Block | None:
        """Return the block of arrivals at ``place``; None: they do not count."""
        if not 1 / 3 <= place < 1:
            return None
        return self.blocks[min(BLOCKS - 1, int((place - 1 / 3) * 1.5 * BLOCKS))]

    @property
    def answered(self) -> int:
        return sum(block.answered for block in self.blocks)

    @property
    def mean_s(self) -> float:
        return sum(block.ttft_s for block in self.blocks) / self.answered

    @property
    def covariates(self) -> tuple[float, float]:
        blocks = self.blocks
        return covariates(sum(b.requests for b in blocks), sum(b.tokens for b in blocks))


@dataclass(slots=True)
class Adjustment:
    """Regression of log mean TTFT on the two :func:`covariates` within slots, kept as the sums of
    its normal equations."""

    xx: list[float] = field(default_factory=lambda: [0.0] * 3)
    xy: list[float] = field(default_factory=lambda: [0.0] * 2)

    def add(self, slot: Slot) -> None:
        rows = [
            (*covariates(block.requests, block.tokens), math.log(block.ttft_s / block.answered))
            for block in slot.blocks
            if block.answered >= _LEAST_IN_BLOCK and block.ttft_s > 0
        ]
        if len(rows) < 2:
            return
        u0, v0, y0 = (sum(column) / len(rows) for column in zip(*rows, strict=True))
        for u, v, y in rows:
            self.xx[0] += (u - u0) ** 2
            self.xx[1] += (u - u0) * (v - v0)
            self.xx[2] += (v - v0) ** 2
            self.xy[0] += (u - u0) * (y - y0)
            self.xy[1] += (v - v0) * (y - y0)

    @property
    def coefficients(self) -> tuple[float, float]:
        """Coefficients of the two covariates; 0 for one that does not vary (e.g. all prompts have
        the same length). That of the token rate is not negative. Where clients wait for an answer
        before they send again, slow answers cause a low rate, and the rate contains the effect of
        the policies."""
        a, b, c = self.xx
        p, q = self.xy
        determinant = a * c - b * b
        if determinant > 1e-6 * a * c:
            rate, length = (c * p - b * q) / determinant, (a * q - b * p) / determinant
        else:
            rate, length = (p / a if a > 1e-9 else 0.0), 0.0
        if rate < 0:
            return 0.0, (q / c if c > 1e-9 else 0.0)
        return rate, length


@dataclass(frozen=True, slots=True)
class SlotPair:
    difference: float
    """Logarithm of the policy's mean TTFT divided by the baseline's."""
    covariates: tuple[float, float]
    """Covariates (see :func:`covariates`) of the policy's slot minus those of the baseline's."""

    def adjusted(self, by: Sequence[float]) -> float:
        moved = sum(b * x for b, x in zip(by, self.covariates, strict=True))
        return self.difference - moved


def pair_of(slot: Slot, other: Slot) -> SlotPair | None:
    """Compare a pair's slots, in any order; None if one has too few answered requests."""
    policy, baseline = (slot, other) if slot.arm == 0 else (other, slot)
    if min(policy.answered, baseline.answered) < LEAST_REQUESTS:
        return None
    mean_s, base_s = policy.mean_s, baseline.mean_s
    if min(mean_s, base_s) <= 0:
        return None
    ours, theirs = policy.covariates, baseline.covariates
    return SlotPair(math.log(mean_s / base_s), (ours[0] - theirs[0], ours[1] - theirs[1]))


@dataclass(slots=True)
class Arm:
    slots: int = 0
    requests: int = 0
    """Number of counted requests that were answered."""
    ttft_s: float = 0.0
    """Sum of the TTFTs of ``requests``, in seconds."""
    refused: int = 0
    unanswered: int = 0
    thirds: list[list[float]] = field(default_factory=lambda: [[0, 0.0] for _ in range(3)])
    """Number of answered requests and sum of their TTFTs, by the third of a slot they arrived
    in."""
    _buckets: Counter[int] = field(default_factory=Counter)

    def waited(self, ttft_s: float) -> None:
        self.requests += 1
        self.ttft_s += ttft_s
        self._buckets[round(_PER_E * math.log(max(1e-4, min(ttft_s, 1e6))))] += 1

    def over(self, slot: Slot) -> None:
        self.slots += 1
        self.refused += slot.refused
        self.unanswered += slot.unanswered

    def quantile_s(self, share: float) -> float | None:
        left = math.ceil(share * self.requests)
        for bucket, number in sorted(self._buckets.items()):
            left -= number
            if left <= 0:
                return math.exp(bucket / _PER_E)
        return None
