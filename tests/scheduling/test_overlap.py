"""Engines with overlap scheduling: the rest of a split prompt runs at once, and alone."""

from __future__ import annotations

import pytest
from test_scheduler import Driver

from sglang_sbs.scheduling import InstanceUp


def second_batch(overlap: bool, waiting: list[int]) -> set[str]:
    """What leaves with ``w0``, the oldest of those that wait for the pass behind the first one."""
    it = Driver(policy="sbs", trigger="adaptive", max_hold_s=10.0)
    it.tell(InstanceUp(instance="d0", role="decode", dp_size=1))
    it.tell(InstanceUp(instance="p0", role="prefill", dp_size=1, chunk_tokens=1000))
    # The same again: an engine that was relaunched with other flags.
    it.tell(
        InstanceUp(instance="p0", role="prefill", dp_size=1, chunk_tokens=1000, overlap=overlap)
    )
    it.arrive("first", 700)
    for number, tokens in enumerate(waiting):
        it.arrive(f"w{number}", tokens)
    while not any(one.rid == "w0" for one in it.dispatched):
        it.wait(0.05)
    batch = next(one.batch for one in it.dispatched if one.rid == "w0")
    return {one.rid for one in it.dispatched if one.batch == batch}


def test_a_hole_is_filled_by_splitting_where_the_rest_shares_the_next_pass():
    assert second_batch(False, [700, 600]) == {"w0", "w1"}


def test_it_is_not_where_the_rest_is_a_pass_of_its_own():
    assert second_batch(True, [700, 600]) == {"w0"}


def test_with_more_waiting_than_another_pass_takes_it_is_all_the_same():
    assert len(second_batch(True, [700, 600, 900, 900, 900])) == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_what_fits_whole_fills_the_hole_either_way(overlap: bool):
    assert second_batch(overlap, [700, 600, 250]) >= {"w2"}
