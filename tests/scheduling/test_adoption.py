"""Requests that somebody else dispatched: counted once, and out of the books when they end."""

from __future__ import annotations

import msgspec
import pytest
from driver import Driver
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sbs.scheduling import (
    InstanceUp,
    PrefillDone,
    RequestAdopted,
    RequestArrived,
    RequestEnded,
)


def adopted(rid: str, tokens: int = 300, *, prefilled: bool = False) -> RequestAdopted:
    return RequestAdopted(
        rid=rid,
        prompt_tokens=tokens,
        prefill="p0",
        prefill_rank=1,
        decode="d0",
        decode_rank=0,
        prefilled=prefilled,
    )


def outstanding(driver: Driver) -> tuple[int, int, int]:
    """Requests in flight; at prefill rank 1; at decode rank 0 with own dispatches counted."""
    state = driver.scheduler.snapshot(driver.now_s)
    (prefill,) = state.prefill
    (decode,) = state.decode
    return (
        state.in_flight_requests,
        prefill.ranks[1].outstanding_requests,
        decode.ranks[0].running,
    )


def test_an_adopted_request_counts_at_both_ranks_until_it_ends():
    driver = Driver().up()
    driver.tell(adopted("a"))
    assert outstanding(driver) == (1, 1, 1)
    assert driver.prefill_state().ranks[1].flight_tokens == 300
    driver.tell(PrefillDone(rid="a"))
    assert outstanding(driver) == (1, 0, 1)
    driver.tell(RequestEnded(rid="a", outcome="completed"))
    assert outstanding(driver) == (0, 0, 0)
    assert driver.prefill_state().ranks[1].flight_tokens == 0


def test_an_adopted_prefilled_request_counts_in_decode_only():
    driver = Driver().up()
    driver.tell(adopted("a", prefilled=True))
    assert outstanding(driver) == (1, 0, 1)


def test_the_next_report_of_its_rank_includes_it_so_it_is_not_counted_twice():
    driver = Driver().up()
    driver.report("p0", 1, kind="heartbeat")
    driver.report("d0", 0, kind="heartbeat")
    driver.tell(adopted("a"))
    driver.report("p0", 1, kind="heartbeat", waiting_requests=1, waiting_tokens=300)
    driver.report("d0", 0, kind="heartbeat", running_requests=1, kv_tokens=300)
    rank = driver.prefill_state().ranks[1]
    assert (rank.flight_tokens, rank.queued_tokens, rank.outstanding_requests) == (0, 300, 1)
    assert outstanding(driver)[2] == 1
    # What is dispatched after it is still in flight, as always.
    driver.tell(adopted("b", 50))
    assert driver.prefill_state().ranks[1].flight_tokens == 50


def test_an_adopted_request_may_come_before_its_instances():
    driver = Driver()
    driver.tell(adopted("a"))
    driver.tell(adopted("b", prefilled=True))
    driver.tell(adopted("over"))
    driver.tell(RequestEnded(rid="over", outcome="aborted"))
    driver.up()
    assert outstanding(driver) == (2, 1, 2)
    # Up again (limits changed): not entered again.
    driver.tell(InstanceUp(instance="p0", role="prefill", dp_size=2, chunk_tokens=500))
    assert outstanding(driver) == (2, 1, 2)


def test_submitted_twice_or_while_it_waits_here_it_is_one_request():
    driver = Driver(trigger="paper", t_default_s=10.0).up()
    driver.arrive("first")
    driver.arrive("a")
    assert driver.scheduler.snapshot(driver.now_s).queue_requests == 1
    driver.tell(adopted("a"))
    driver.tell(adopted("a"))
    state = driver.scheduler.snapshot(driver.now_s)
    assert (state.queue_requests, state.in_flight_requests) == (0, 2)
    assert driver.tell(RequestArrived(rid="a", prompt_tokens=5)) == []
    driver.tell(RequestEnded(rid="a", outcome="completed"))
    assert driver.scheduler.snapshot(driver.now_s).in_flight_requests == 1


def test_an_adopted_request_gives_no_latency_sample():
    driver = Driver().up()
    before_s = driver.scheduler.interval.latency_s
    driver.tell(adopted("a"))
    driver.now_s += 3.0
    driver.report("p0", 1, kind="launch", forward_id=1, extend_tokens=300, rids=["a"])
    assert driver.scheduler.interval.latency_s == before_s


@pytest.mark.parametrize("rank", [-1, 2, 99])
def test_a_rank_that_the_instance_does_not_have_is_kept_out_of_its_books(rank):
    driver = Driver().up()
    driver.tell(
        RequestAdopted(
            rid="a",
            prompt_tokens=10,
            prefill="p0",
            prefill_rank=rank,
            decode="d0",
            decode_rank=rank,
        )
    )
    assert driver.prefill_state().ranks[1].outstanding_requests == 0
    driver.tell(PrefillDone(rid="a"))
    driver.tell(RequestEnded(rid="a", outcome="completed"))
    assert driver.scheduler.in_flight_requests == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("anpeRt"), st.integers(0, 99)), max_size=60))
def test_restarted_at_any_time_and_given_the_requests_in_flight_it_ends_with_empty_books(steps):
    driver = Driver(policy="sbs").up(prefill=2)
    waiting: dict[str, int] = {}
    placed: dict[str, RequestAdopted] = {}

    def note(dispatches):
        for d in dispatches:
            placed[d.rid] = RequestAdopted(
                rid=d.rid,
                prompt_tokens=waiting.pop(d.rid),
                prefill=d.prefill,
                prefill_rank=d.prefill_rank,
                decode=d.decode,
                decode_rank=d.decode_rank,
            )

    for number, (kind, pick) in enumerate(steps):
        rid = sorted(placed)[pick % len(placed)] if placed else None
        match kind:
            case "a" | "n":
                waiting[f"r{number}"] = 100 + pick
                note(driver.arrive(f"r{number}", 100 + pick))
            case "p" if rid is not None:
                placed[rid] = msgspec.structs.replace(placed[rid], prefilled=True)
                note(driver.tell(PrefillDone(rid=rid)))
            case "e" if rid is not None:
                del placed[rid]
                note(driver.tell(RequestEnded(rid=rid, outcome="completed")))
            case "R":
                now_s = driver.now_s
                driver = Driver(policy="sbs").up(prefill=2)
                driver.now_s = now_s
                for adopted_request in placed.values():
                    driver.tell(adopted_request)
                for waiting_rid, tokens in list(waiting.items()):
                    note(driver.arrive(waiting_rid, tokens))
            case "t":
                note(driver.wait(pick / 100))
        state = driver.scheduler.snapshot(driver.now_s)
        assert (state.queue_requests, state.in_flight_requests) == (len(waiting), len(placed))
    while waiting or placed:
        for rid in list(placed):
            del placed[rid]
            note(driver.tell(RequestEnded(rid=rid, outcome="completed")))
        note(driver.wait(0.5))
    state = driver.scheduler.snapshot(driver.now_s)
    assert state.in_flight_requests == state.queue_requests == 0
    for instance in state.prefill:
        assert all(r.flight_tokens == r.outstanding_requests == 0 for r in instance.ranks)
    for instance in state.decode:
        assert all(rank.running == 0 for rank in instance.ranks)
