"""How `scripts/compare-routers` finds the load at the SLO, and what it makes of it."""

from __future__ import annotations

import math

import pytest
from compare_rows import HEADER, row, searched
from msgspec.structs import replace

from benchmarks.compare_routers.results import report, search, tables
from benchmarks.compare_routers.results.rows import Row

BOTH = (1, 2)


def test_the_search_halves_the_interval() -> None:
    rows: list[Row] = []
    tried = []
    while (load := search.next_load(rows, "sbs", [1], slo_ttft_s=1.0, steps=4)) is not None:
        tried.append(load)
        rows.append(searched("sbs", load, 500 if load < 0.9 else 2000))
    assert tried == [0.8, 0.95, 0.875, 0.912]
    found = search.searches(rows, 1.0)["sbs"].found
    assert found.load == pytest.approx(0.875 + (0.912 - 0.875) / 3)
    assert not found.bounded


def test_the_mean_over_seeds_decides() -> None:
    rows = [searched("sbs", 0.8, 700, seed=1), searched("sbs", 0.8, 1400, seed=2)]
    assert search.next_load(rows[:1], "sbs", BOTH, 1.0, steps=4) == 0.8
    assert search.next_load(rows, "sbs", BOTH, 1.0, steps=4) == 0.65
    assert search.next_load(rows, "sbs", BOTH, 1.2, steps=4) == 0.95
    assert search.next_load(rows, "sbs", BOTH, 1.2, steps=1) is None


def two_seeds(policy: str, factor: float = 1.0) -> list[Row]:
    """At the SLO of 1 s: seed 1 at load 0.9, seed 2 at 0.7, their mean at 0.8, all x factor."""
    return [
        searched(policy, load * factor, mean_ms, seed=seed)
        for load, means_ms in ((0.6, (700, 900)), (1.0, (1100, 1300)))
        for seed, mean_ms in zip(BOTH, means_ms, strict=True)
    ]


def test_the_ratio_has_a_spread_over_seeds() -> None:
    rows = [*two_seeds("sbs"), *two_seeds("smg", 0.8), row("sbs", 50), row("smg", 100)]
    # Seed 2 of the peer did worse than the mean.
    rows = [
        searched("smg", r.key.load, 950, seed=2)
        if r.key.policy == "smg" and r.key.seed == 2 and r.key.load == pytest.approx(0.48)
        else r
        for r in rows
    ]
    found = search.searches(rows, 1.0)
    assert found["sbs"].known
    assert found["sbs"].found.load == pytest.approx(0.8)
    assert {seed: one.load for seed, one in found["sbs"].by_seed.items()} == {
        1: pytest.approx(0.9),
        2: pytest.approx(0.7),
    }
    assert found["sbs"].qps_spread == pytest.approx((21.0, 27.0))
    ratio = search.qps_ratio(found, "sbs")
    assert ratio is not None
    assert ratio.low < ratio.mean < ratio.high
    told = report.summary(HEADER, rows)
    assert told["max_qps_ratio"] == ratio.mean
    assert (told["max_qps_ratio_low"], told["max_qps_ratio_high"]) == (ratio.low, ratio.high)
    table = tables.capacity_table(rows, 1.0)
    assert table is not None
    assert table.rows[0][1] == "24.0 (21.0-27.0)"
    assert table.rows[0][3] == f"{ratio.mean:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def test_a_search_that_never_meets_the_slo_has_a_bound() -> None:
    rows = [searched("smg", 0.8, 3000), searched("smg", 0.65, 2000)]
    found = search.searches(rows, 1.0)["smg"].found
    assert found == search.Capacity(0.65, pytest.approx(0.65 * 30), bounded=True)


def test_a_load_at_which_sbs_left_a_request_unanswered_is_not_at_the_slo() -> None:
    """The one that failed is in no mean."""
    rows = [searched("sbs", 0.8, 500), searched("smg", 0.8, 500)]
    one_failed = [
        replace(one, answers=replace(one.answers, failed=1))  # type: ignore[type-var]
        for one in rows
    ]
    found = search.searches(one_failed, 1.0)
    assert math.isfinite(found["smg"].found.qps)
    assert search.next_load(one_failed, "sbs", [1], 1.0, 4) < 0.8
    assert search.next_load(one_failed, "smg", [1], 1.0, 4) > 0.8


def failing(rows: list[Row]) -> list[Row]:
    assert all(one.answers is not None for one in rows)
    return [
        replace(one, answers=replace(one.answers, failed=50))  # type: ignore[type-var]
        for one in rows
    ]


@pytest.mark.parametrize(
    ("ours", "says"),
    [
        ([searched("sbs", 0.8, 700, s) for s in BOTH] + two_seeds("sbs")[:2], "(a bound)"),
        (two_seeds("sbs")[:3], "(not finished)"),
        (two_seeds("sbs")[:2], "(a bound)"),
        (failing(two_seeds("sbs")), "(a bound)"),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_without_an_answer_on_both_sides_there_is_no_ratio(
    ours: list[Row], says: str, *, swapped: bool
) -> None:
    """Whichever side it is of."""
    rows = [*ours, *two_seeds("smg", 0.5)]
    if swapped:
        names = {"sbs": "smg", "smg": "sbs"}
        rows = [replace(r, key=replace(r.key, policy=names[r.key.policy])) for r in rows]
    told = report.summary(HEADER, rows)
    assert told["max_qps_ratio"] is told["max_qps_ratio_low"] is told["max_qps_ratio_high"] is None
    assert told["max_qps_is_bound"] == ["smg" if swapped else "sbs"]
    table = tables.capacity_table(rows, 1.0)
    assert table is not None
    assert [one[3] for one in table.rows if one[0] == "sbs"] == ["-"]
    assert any(says in one[1] for one in table.rows)
