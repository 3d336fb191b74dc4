"""Prefill instances with different chunks: a prompt goes where one pass is enough."""

from __future__ import annotations

import pytest
from driver import Driver

from sglang_sbs.scheduling import InstanceDown, InstanceUp


def driver(small: int = 1) -> Driver:
    it = Driver(policy="sbs", trigger="adaptive", max_hold_s=1.0)
    chunks = {"small": 1000, **{f"small{i}": 1000 for i in range(1, small)}, "large": 4000}
    for name, chunk_tokens in chunks.items():
        it.tell(InstanceUp(instance=name, role="prefill", dp_size=2, chunk_tokens=chunk_tokens))
    it.tell(InstanceUp(instance="d0", role="decode", dp_size=2))
    return it


@pytest.mark.parametrize("tokens", [1001, 4000])
def test_what_fits_only_the_large_chunk_goes_there(tokens: int):
    it = driver()
    assert [dispatch.prefill for dispatch in it.arrive("r", tokens)] == ["large"]


def test_many_small_ones_that_are_idle_do_not_hide_the_large_one():
    it = driver(small=5)
    assert [dispatch.prefill for dispatch in it.arrive("r", 3000)] == ["large"]


def test_what_fits_none_goes_where_it_takes_fewest_passes():
    it = driver()
    assert [dispatch.prefill for dispatch in it.arrive("r", 9000)] == ["large"]


def test_what_fits_none_may_go_to_any():
    it = driver()
    it.tell(InstanceDown(instance="large"))
    assert [dispatch.prefill for dispatch in it.arrive("r", 9000)] == ["small"]


def test_with_the_large_one_gone_it_takes_several_passes():
    it = driver()
    it.tell(InstanceDown(instance="large"))
    assert [dispatch.prefill for dispatch in it.arrive("r", 3000)] == ["small"]


def test_it_takes_two_passes_where_they_end_sooner_than_one_on_the_large_one():
    it = driver()
    for rid in ("first", "second", "third"):
        it.arrive(rid, 4000)
    sent = it.arrive("r", 1001)
    assert [dispatch.prefill for dispatch in sent if dispatch.rid == "r"] == ["small"]


def test_it_does_not_wait_for_the_large_one_beyond_the_hold():
    it = driver()
    it.arrive("first", 4000)
    it.arrive("second", 4000)
    it.arrive("third", 3900)
    it.wait(1.5)
    assert {dispatch.rid for dispatch in it.dispatched} == {"first", "second", "third"}
