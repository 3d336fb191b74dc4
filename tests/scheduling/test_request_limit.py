"""``--prefill-max-requests``: how many requests of a rank a pass takes, in books and engine."""

from __future__ import annotations

import math
import random

import pytest
from harness.plain_requests import request
from harness.ranks_to_place_on import placed_on, target
from hypothesis import given
from hypothesis import strategies as st
from model_engine import PrefillEngine

from sglang_sbs.scheduling import InstanceUp
from sglang_sbs.scheduling.policies.adaptive.pass_forecast import PassForecast, Terms
from sglang_sbs.scheduling.policies.paper import pbaa
from sglang_sbs.scheduling.policies.pbaa import top_up
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.queue.flow_control import first_token_in_s, retry_after_s
from sglang_sbs.scheduling.queue.request import RequestQueue
from sglang_sbs.simulator.experiments.sweep import Job, run_job

CHUNK, DP, MOST = 1024, 2, 4
LATENCY_S = 0.005


def instance(most: int = MOST) -> PrefillInstance:
    up = InstanceUp(
        instance="p0", role="prefill", dp_size=DP, chunk_tokens=CHUNK, prefill_max_requests=most
    )
    return PrefillInstance(up, t_default_s=0.1, default_chunk_tokens=CHUNK)


@pytest.mark.parametrize("seed", range(5))
def test_places_are_what_the_next_pass_of_the_engine_still_takes(seed: int):
    """It holds at every message, with requests in flight, queued and cut."""
    rng = random.Random(seed)
    books, engine = instance(), PrefillEngine("p0", DP, CHUNK, most_requests=MOST)
    now_s = 10.0
    for number in range(60):
        for index in range(rng.randrange(12)):
            rid, rank = f"{number}-{index}", rng.randrange(DP)
            tokens = rng.choice([rng.randrange(1, 100), rng.randrange(1, 1500)])
            books.on_dispatched(rid, rank, tokens, now_s)
            engine.accept(rid, rank, tokens)
        if not engine.has_work:
            continue
        for message in engine.launch():
            now_s += 0.01
            books.on_report(message, now_s)
        waiting = [len(rank.waiting) for rank in engine.ranks]
        assert books.ranks.places() == [max(0, MOST - count) for count in waiting]
        assert books.ranks.has_room == any(
            count < MOST and rank.queued_tokens < CHUNK
            for count, rank in zip(waiting, engine.ranks, strict=True)
        )
        for free, count in zip(books.ranks.c_avail(), waiting, strict=True):
            assert count < MOST or free <= 0
        done, messages = engine.finish()
        for message in messages:
            now_s += 0.01
            books.on_report(message, now_s)
        for rid in done:
            for rank in range(DP):
                books.dropped(rid, rank)


@given(
    lengths=st.lists(st.integers(1, 600), max_size=60),
    taken=st.lists(st.integers(0, MOST), min_size=1, max_size=4),
    hungry=st.booleans(),
)
def test_a_batch_that_fits_runs_in_one_pass(lengths: list[int], taken: list[int], hungry: bool):
    """Some requests of a token each were there before; ``hungry``: some were left out for long."""
    batch = [request(str(i), tokens, order=i) for i, tokens in enumerate(lengths)]
    for rid in batch[::3] if hungry else []:
        rid.waited_batches = TUNING.left_out_batches
    c_avail = [CHUNK - count for count in taken]
    places = [MOST - count for count in taken]
    ranks = target(c_avail, CHUNK, places=places)
    allocation = placed_on(batch, ranks)
    engine = PrefillEngine("p0", len(taken), CHUNK, most_requests=MOST)
    for rank, count in enumerate(taken):
        for number in range(count):
            engine.accept(f"before {rank} {number}", rank, 1)
    for asked, rank in allocation.placed:
        engine.accept(asked.rid, rank, asked.prompt_tokens)
    if engine.has_work:
        engine.launch()
    assert not any(rank.waiting for rank in engine.ranks)
    assert len(allocation.placed) + len(allocation.left) == len(batch)
    split = top_up(allocation, ranks, keep_tokens=0)
    for rank, most in enumerate(places):
        assert sum(at == rank for _, at in split.placed) <= most


def test_short_requests_fill_all_ranks_and_no_more():
    batch = [request(str(i), 100, order=i) for i in range(20)]
    for placed, left in (
        placed_on(batch, target([CHUNK] * 2, CHUNK, places=[4, 2])),
        pbaa([], batch, [CHUNK] * 2, places=[4, 2]),
    ):
        assert sorted(rank for _, rank in placed) == [0] * 4 + [1] * 2
        assert len(left) == 14


def test_a_long_request_still_finds_the_tokens_that_short_ones_leave():
    books = instance()
    for index in range(3):
        books.on_dispatched(f"short {index}", 0, 10, now_s=0.0)
    assert books.ranks.places() == [1, 4]
    first = target(books.ranks.c_avail()[:1], CHUNK, places=[1])
    assert placed_on([request("long", 990)], first).placed


def test_without_reports_a_presumed_pass_holds_so_many_requests():
    books = instance()
    for index in range(10):
        books.on_dispatched(f"r{index}", 0, 65, now_s=0.0)
    assert books.next_pass_s() == books.model.predict_s([MOST * 65, 0], [MOST * 65**2 / 2, 0])
    books.advance(0.1, LATENCY_S)
    (running,) = books.passes
    assert running.tokens == [MOST * 65, 0]
    assert sorted(running.requests) == ["r0", "r1", "r2", "r3"]
    assert books.ranks.places() == [0, MOST]


def test_what_another_rank_tells_of_a_pass_leaves_the_rest_of_a_batch_queued():
    """Rank 0 says that rank 1 computes four of the six that were sent there together."""
    books, engine = instance(), PrefillEngine("p0", DP, CHUNK, most_requests=MOST)
    for index in range(6):
        books.on_dispatched(f"r{index}", 1, 50, now_s=1.0)
        engine.accept(f"r{index}", 1, 50)
    books.on_dispatched("other", 0, 50, now_s=1.0)
    engine.accept("other", 0, 50)
    of_rank_0, of_rank_1 = engine.launch()
    books.on_report(of_rank_0, 1.1)
    assert books.ranks[1].queued_tokens == 100
    assert books.ranks.places() == [MOST, MOST - 2]
    books.on_report(of_rank_1, 1.2)
    assert books.ranks.places() == [MOST, MOST - 2]


def test_a_forecast_knows_when_a_pass_holds_as_many_requests_as_it_may():
    books = instance()
    for rank in range(DP):
        for index in range(MOST - 1):
            books.on_dispatched(f"{rank} {index}", rank, 10, now_s=0.0)
    forecast = PassForecast(books).fork(0.0, closed=False)
    one_pass_s = forecast.cost_s(request("in the next pass", 10), Terms())
    for number in range(DP):
        assert not forecast.full
        forecast.add(request(f"last {number}", 10), Terms())
    assert forecast.full
    assert forecast.cost_s(request("in the one after", 10), Terms()) > 1.5 * one_pass_s


def test_a_cut_request_counts_in_each_of_its_passes():
    books = instance(most=2)
    for rank in range(DP):
        books.on_dispatched(f"long {rank}", rank, CHUNK + 10, now_s=0.0)
        books.on_dispatched(f"short {rank}", rank, 10, now_s=0.0)
    forecast = PassForecast(books).fork(0.0, closed=False)
    assert forecast._ahead == [2 * CHUNK] * DP


@pytest.mark.parametrize("most", [0, -1, CHUNK, 1 << 40])
def test_a_limit_that_no_pass_reaches_is_none(most: int):
    books = instance(most)
    assert books.ranks.places() == [math.inf] * DP
    assert books.ranks.capacity_of(1.0) == DP * CHUNK


def test_a_queue_that_cannot_be_is_believed_of_so_many_passes():
    books, engine = instance(), PrefillEngine("p0", DP, CHUNK, most_requests=MOST)
    engine.accept("r", 0, 10)
    message = engine.message(0, "heartbeat")
    for count in (1 << 40, -5):
        lie = type(message)(
            **{
                **{name: getattr(message, name) for name in message.__struct_fields__},
                "waiting_requests": count,
                "seq": message.seq + 1 + (count < 0),
            }
        )
        books.on_report(lie, 1.0)
        assert 1 <= books.ranks[0].backlog_requests <= 64 * MOST


def test_short_prompts_wait_less_than_with_the_best_policy_that_holds_none():
    """A policy that ignores the limit sends whole chunks of them, which take several passes
    each."""
    spec = {"prefill_max_requests": 4, "overlap": True, "prefill_instances": 2, "dp_size": 2}
    sbs, eta = (
        run_job(Job("uniform:100-300", policy, 0.8, 1, 24.0, "mixed", spec))
        for policy in ("sbs", "eta")
    )
    assert sbs["unfinished"] == 0
    assert sbs["ttft_mean_s"] < eta["ttft_mean_s"]


def test_full_passes_are_as_full_as_the_limit_lets_them_be():
    books = instance()
    tokens, pass_s = books.full_pass(100.0)
    assert tokens == DP * MOST * 100
    assert pass_s == books.model.predict_s([MOST * 100] * DP)
    assert books.full_pass(1000.0) == (DP * CHUNK, books.model.predict_s([CHUNK] * DP))


@pytest.mark.parametrize("most", [0, MOST])
def test_refusals_count_the_passes_that_short_requests_need(most: int):
    """Eighty requests of ten tokens fit into one pass, or take ten of eight requests each."""
    waiting = RequestQueue()
    for index in range(80):
        waiting.add(request(f"r{index}", 10, order=index))
    books = instance(most)
    for _ in range(50):
        books.model.observe([100, 100], 0.5)
    pass_s = books.full_pass(10.0)[1]
    seconds = retry_after_s(waiting, [books])
    assert seconds == pytest.approx(10 * pass_s if most else 1.0)
    first_s = first_token_in_s(10, 800, 800, 10.0, [books], 0.0, LATENCY_S)
    assert (first_s > 5 * pass_s) == bool(most)
