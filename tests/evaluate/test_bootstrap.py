"""Intervals of ratios hold the truth as often as they say."""

from __future__ import annotations

import random

import pytest

from sglang_sbs.evaluate.bootstrap import MOST_BLOCKS, blocks_of, ratios
from sglang_sbs.evaluate.verdict import _with_model_error
from sglang_sbs.trial.ratios import Ratio


def test_blocks_are_of_equal_time_and_not_too_many():
    times_s = [index / 10 for index in range(1000)]
    blocks = blocks_of(times_s, 10.0)
    assert blocks[0] == 0
    assert max(blocks) == 8  # 99.9 s hold nine blocks of at least 10 s
    assert max(blocks.count(number) for number in range(9)) <= 112
    assert max(blocks_of(times_s, 0.01)) == MOST_BLOCKS - 1


def test_a_known_ratio_is_found():
    values = [1.0 + index % 7 for index in range(500)]
    found = ratios([[0.5 * value for value in values]], [values], [i // 25 for i in range(500)])
    for estimate in (found.mean, found.p99):
        assert (estimate.ratio, estimate.low, estimate.high) == pytest.approx((0.5, 0.5, 0.5))


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    held = 0
    for trial in range(60):
        rng = random.Random(trial)
        ran, other, blocks = [], [], []
        for block in range(15):
            # Requests of one moment share its queue, so single requests are not independent.
            busy, gain = rng.lognormvariate(0, 0.5), rng.lognormvariate(-0.3, 0.3)
            for _ in range(20):
                value = busy * rng.expovariate(1)
                ran.append(value)
                other.append(gain * value)
                blocks.append(block)
        truth = 2.718281828 ** (-0.3 + 0.3**2 / 2)
        found = ratios([other], [ran], blocks, seed=trial).mean
        held += found.low <= truth <= found.high
    assert 0.85 * 60 <= held < 60


def test_draws_that_differ_widen_the_interval():
    blocks = [i // 25 for i in range(500)]
    values = [1.0] * 500
    same = ratios([values], [values], blocks).mean
    drawn = ratios([[0.9] * 500, [1.1] * 500], [values], blocks).mean
    assert (same.low, same.high) == (1.0, 1.0)
    assert drawn.ratio == pytest.approx(1.0)
    assert drawn.low < 0.91
    assert drawn.high > 1.09


def test_an_interval_has_the_error_of_the_model() -> None:
    wide = _with_model_error(Ratio(0.5, 0.46, 0.54))
    assert wide == pytest.approx((0.5, 0.44, 0.56), abs=5e-4)  # hypot(0.04, 9 % of 0.5)
    assert _with_model_error(Ratio(0.5, 0.0, 1.0)).low == 0.0
