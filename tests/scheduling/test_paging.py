"""Requests are charged whole pages of the chunk, in the scheduler's books as in the engine."""

from __future__ import annotations

import random

import pytest
from harness.plain_requests import request
from harness.ranks_to_place_on import placed_on, target
from hypothesis import given
from hypothesis import strategies as st
from model_engine import PrefillEngine

from sglang_sbs.scheduling import InstanceUp
from sglang_sbs.scheduling.paging import paged, whole_pages
from sglang_sbs.scheduling.policies.adaptive.pass_forecast import PassForecast
from sglang_sbs.scheduling.policies.pbaa import top_up
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.prefill.requests import Flight, PrefillRequest
from sglang_sbs.simulator.experiments.sweep import Job, run_job

PAGE, CHUNK, DP = 64, 1024, 2
LATENCY_S = 0.005


def instance(page: int = PAGE, chunk_tokens: int = CHUNK) -> PrefillInstance:
    up = InstanceUp(
        instance="p0", role="prefill", dp_size=DP, chunk_tokens=chunk_tokens, page_size=page
    )
    return PrefillInstance(up, t_default_s=0.1, default_chunk_tokens=CHUNK)


@given(tokens=st.integers(1, 10_000), page=st.sampled_from([1, 16, 64]))
def test_a_charge_is_the_fewest_pages_that_hold_the_prompt(tokens: int, page: int):
    charge = paged(tokens, page)
    assert charge % page == 0
    assert 0 <= charge - tokens < page
    assert whole_pages(tokens, page) in (max(page, charge), charge - page)


@given(
    steps=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 300)), max_size=40),
    page=st.sampled_from([1, 16, 64]),
)
def test_a_ledger_knows_tokens_and_their_pages(steps: list[tuple[str, int]], page: int):
    flight = Flight()
    flight.set_page(page)
    for rid, tokens in steps:
        request = flight.requests.get(rid)
        if tokens == 0:
            flight.pop(rid)
        elif request is not None and tokens < request.flight_tokens:
            flight.reduce(request, tokens)
        else:
            flight.add(PrefillRequest.of(rid, tokens))
        here = [request.flight_tokens for request in flight]
        assert flight.total == sum(here)
        assert flight.charged == sum(paged(tokens, page) for tokens in here)
    flight.set_page(1)
    assert flight.charged == flight.total


@given(
    lengths=st.lists(st.integers(1, 1500), max_size=60),
    capacity=st.lists(st.integers(0, CHUNK // PAGE), min_size=1, max_size=4),
)
def test_a_batch_that_fits_fits_the_engine_in_one_pass(lengths: list[int], capacity: list[int]):
    """The rest of each chunk is taken by a request that was there before."""
    batch = [request(str(i), tokens, order=i) for i, tokens in enumerate(lengths)]
    c_avail = [pages * PAGE for pages in capacity]
    placed, _ = placed_on(batch, target(c_avail, CHUNK, page=PAGE))
    engine = PrefillEngine("p0", len(capacity), CHUNK, PAGE)
    for rank, free in enumerate(c_avail):
        if free < CHUNK:
            engine.accept(f"before {rank}", rank, CHUNK - free)
    for asked, rank in placed:
        engine.accept(asked.rid, rank, asked.prompt_tokens)
    if engine.has_work:
        engine.launch()
    left = {rid for rank in engine.ranks for rid, _ in rank.waiting}
    assert left <= {request.rid for request, _ in placed if request.prompt_tokens > CHUNK}


def test_a_hole_of_less_than_a_page_is_not_filled():
    batch = [request("a", 961), request("b", 60), request("c", 60)]
    chunk = target([CHUNK], CHUNK, page=PAGE)
    allocation = placed_on(batch, chunk)
    assert [request.rid for request, _ in allocation.placed] == ["a"], (
        "961 tokens take all 16 pages"
    )
    assert top_up(allocation, chunk, keep_tokens=0).placed == allocation.placed


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("page", [1, 16, 64])
def test_c_avail_is_what_the_engine_can_still_take(page: int, seed: int):
    """It holds at every message, with requests in flight, queued and cut."""
    rng = random.Random(seed)
    books, engine = instance(page), PrefillEngine("p0", DP, CHUNK, page)
    now_s = 10.0
    for number in range(40):
        for index in range(rng.randrange(8)):
            rid, rank, tokens = f"{number}-{index}", rng.randrange(DP), rng.randrange(1, 1500)
            books.on_dispatched(rid, rank, tokens, now_s)
            engine.accept(rid, rank, tokens)
        if not engine.has_work:
            continue
        for message in engine.launch():
            now_s += 0.01
            books.on_report(message, now_s)
        charged = [sum(paged(tokens, page) for _, tokens in rank.waiting) for rank in engine.ranks]
        assert books.ranks.c_avail() == [CHUNK - tokens for tokens in charged]
        assert books.ranks.charged_tokens == sum(charged)
        assert books.ranks.backlog_tokens == sum(rank.queued_tokens for rank in engine.ranks)
        done, messages = engine.finish()
        for message in messages:
            now_s += 0.01
            books.on_report(message, now_s)
        for rid in done:
            for rank in range(DP):
                books.dropped(rid, rank)


def test_without_reports_a_presumed_pass_holds_whole_pages():
    books = instance()
    for index in range(20):
        books.on_dispatched(f"r{index}", 0, 65, now_s=0.0)
    books.advance(0.1, LATENCY_S)
    (running,) = books.passes
    assert running.tokens == [8 * 65, 0], "two pages each"
    assert books.ranks.c_avail() == [CHUNK - 12 * 128, CHUNK]


def test_a_forecast_lays_requests_in_whole_pages():
    books = instance()
    for index in range(8):
        books.on_dispatched(f"r{index}", 0, 65, now_s=0.0)
        books.on_dispatched(f"s{index}", 1, 65, now_s=0.0)
    assert PassForecast(books).fork(0.0, closed=False).full
    assert not PassForecast(instance()).fork(0.0, closed=False).full


def test_a_part_of_a_page_at_the_end_of_a_chunk_is_no_room():
    assert instance(chunk_tokens=1000).ranks.c_avail() == [960, 960]


@pytest.mark.parametrize("policy", ["sbs", "sbs_paper", "eta"])
def test_prompts_in_pages_are_all_served(policy: str):
    spec = {"page_size": 64, "overlap": True}
    row = run_job(Job("paper-3k", policy, 0.6, 1, 22.0, "mixed", spec))
    assert row["unfinished"] == 0
    assert row["completed"] > 100


def test_near_saturation_pages_cost_what_they_take_of_the_chunk():
    """They take 3 % of it; a batch that spills would cost whole passes."""
    with_pages, without = (
        run_job(Job("paper-3k", "sbs", 1.1, 1, 32.0, "mixed", {"page_size": page, "overlap": True}))
        for page in (64, 1)
    )
    assert with_pages["ttft_mean_s"] < 1.2 * without["ttft_mean_s"]
