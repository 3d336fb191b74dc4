"""A prefill rank whose KV pool is full has no room, whatever its chunk has."""

from __future__ import annotations

from harness.prefill_reports import fresh, report

from sglang_sbs.scheduling.events import RequestArrived
from sglang_sbs.scheduling.policies.immediate import Eta
from sglang_sbs.scheduling.prefill.interval import IntervalController
from sglang_sbs.scheduling.queue.request import arrived


def test_the_pool_limits_what_a_pass_takes() -> None:
    books = fresh()
    books.on_report(report(seq=0, kv_tokens=9_300, kv_capacity_tokens=10_000), 100.0)
    assert books.ranks.c_avail() == [700]
    assert books.ranks.c_avail(2) == [700]
    books.on_dispatched("r", 0, 500, 100.0)
    assert books.ranks.c_avail() == [200]
    assert books.ranks.has_room


def test_a_full_pool_is_no_room_until_it_is_reported_otherwise() -> None:
    books = fresh()
    books.on_report(report(seq=0, kv_tokens=10_000, kv_capacity_tokens=10_000), 100.0)
    assert books.ranks.c_avail() == [0]
    assert not books.ranks.has_room
    books.on_report(report(seq=1, kv_tokens=2_000, kv_capacity_tokens=10_000), 101.0)
    assert books.ranks.c_avail() == [1000]


def test_what_waits_there_needs_kv_too() -> None:
    books = fresh()
    waits = {"waiting_requests": 1, "waiting_tokens": 600}
    books.on_report(report(seq=0, kv_tokens=9_000, kv_capacity_tokens=10_000, **waits), 100.0)
    assert books.ranks.c_avail() == [400]


def test_an_engine_that_does_not_say_has_no_limit() -> None:
    books = fresh()
    books.on_report(report(seq=0, kv_tokens=10_000), 100.0)
    assert books.ranks.c_avail() == [1000]


def test_eta_avoids_a_full_pool() -> None:
    full, free = fresh("p0"), fresh("p1")
    full.on_report(report(seq=0, kv_tokens=10_000, kv_capacity_tokens=10_000), 100.0)
    eta = Eta(IntervalController(t_default_s=0.3, window=8, latency_s=0.01))
    request = arrived(RequestArrived(rid="r", prompt_tokens=400), 0, 100.0, 60.0)
    assert eta.choose(request, [full, free], 100.0)[0] is free
