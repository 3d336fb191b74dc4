"""The interval of a trial holds at every look."""

from __future__ import annotations

import math
import random

import pytest

from sglang_sbs.trial.sequential import EFFECT, half_width, interval


def bayes_factor(values: list[float], mean: float) -> float:
    """The mixture as published: of the t statistic, with a normal prior of the effect size."""
    n = len(values)
    average = sum(values) / n
    square = sum((value - average) ** 2 for value in values) / (n - 1)
    t2 = n * (average - mean) ** 2 / square
    k = 1 + n * EFFECT**2
    return ((1 + t2 / (n - 1)) / (1 + t2 / ((n - 1) * k))) ** (n / 2) / math.sqrt(k)


@pytest.mark.parametrize("n", [3, 4, 7, 30])
def test_its_bounds_are_where_the_mixture_reaches_one_over_alpha(n: int) -> None:
    rng = random.Random(n)
    values = [rng.gauss(0.3, 0.1) for _ in range(n)]
    mean, low, high = interval(values, 0.05)
    assert low < mean < high
    for bound in (low, high):
        assert bayes_factor(values, bound) == pytest.approx(20.0)


def test_too_few_differences_give_no_bound() -> None:
    assert half_width([0.1], 0.05) == math.inf
    assert half_width([0.1, 0.2], 0.05) == math.inf
    assert half_width([0.1, 0.2, 0.1], 0.05) < math.inf


def test_of_four_hundred_who_look_after_each_difference_few_are_ever_wrong() -> None:
    rng = random.Random(7)
    wrong = 0
    for _ in range(400):
        values: list[float] = []
        for _ in range(30):
            values.append(rng.gauss(0.0, 1.0))
            if abs(sum(values) / len(values)) > half_width(values, 0.05):
                wrong += 1
                break
    assert wrong <= 20
    # An interval that holds for one look only is wrong far more often: the looks do matter.
    assert wrong > 0
