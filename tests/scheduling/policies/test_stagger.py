"""Passes of many instances are planned to start apart from one another."""

from __future__ import annotations

import pytest

from sglang_sbs.scheduling.policies.adaptive.lineup import PlannedStarts


def planned(*starts_s: float) -> PlannedStarts:
    starts = PlannedStarts()
    for start_s in starts_s:
        starts.add(start_s, forget_s=0.0)
    return starts


@pytest.mark.parametrize(
    ("start_s", "first_s"),
    [
        (4.0, 4.0),  # long before all
        (4.9, 6.0),  # shortly before the first is as near as shortly after it
        (5.2, 6.0),
        (7.0, 7.0),  # just between two
        (7.4, 11.0),  # no room beside the second, nor between it and the third
        (9.3, 11.0),  # near the newest
        (12.0, 12.0),
    ],
)
def test_a_start_keeps_away_from_all_that_are_planned(start_s: float, first_s: float):
    starts = planned(10.0, 5.0, 8.0)  # of many instances, whose batches left in any order
    if start_s == 7.4:
        starts.add(9.0, forget_s=0.0)
    assert starts.first_apart(start_s, 1.0) == pytest.approx(first_s)


def test_where_batches_do_not_come_whole_nothing_is_kept_apart():
    assert planned(5.0).first_apart(5.0, 0.0) == 5.0


def test_what_started_a_pass_ago_is_forgotten():
    starts = planned(1.0, 2.0)
    starts.add(3.0, forget_s=2.5)
    assert starts.at_s == [3.0]
