"""Decode ranks with a prefix cache: the next turn goes to the rank that has the turns before, as
far as balance and room allow."""

from __future__ import annotations

import random

import pytest
from driver import Driver

from sglang_sbs.scheduling import (
    BlocksRemoved,
    BlocksStored,
    InstanceDown,
    InstanceUp,
    PrefillDone,
    RequestEnded,
)
from sglang_sbs.scheduling.decode.rules import (
    MOST_HIT_REQUESTS,
    TOKENS_PER_REQUEST,
    DecodeLoad,
    hit_requests,
    iqr_lexicographic,
    potential,
    schedule_decode,
)
from sglang_sbs.scheduling.events import Dispatch, PrefixSource
from sglang_sbs.scheduling.request import Request

PAGE = 10
TURN = list(range(1, 81))
"""The first turn: 800 tokens."""
NEXT = [*TURN, *range(500, 510)]
RULES = ("potential", "iqr")


def decode_up(source: PrefixSource) -> InstanceUp:
    return InstanceUp(instance="d0", role="decode", dp_size=8, page_size=PAGE, prefix_source=source)


def cluster(source: PrefixSource, rule: str = "potential") -> Driver:
    it = Driver(policy="sbs", decode_rule=rule, t_default_s=0.2)
    up = {"dp_size": 2, "chunk_tokens": 1000, "page_size": PAGE}
    it.tell(InstanceUp(instance="p0", role="prefill", prefix_source="off", **up))
    it.tell(decode_up(source))
    return it


def turn(it: Driver, rid: str, blocks: list[int], tokens: int) -> Dispatch:
    """Send a request and let it end."""
    it.arrive(rid, tokens, blocks=blocks, block_tokens=PAGE, max_new_tokens=50)
    it.wait(1.0)
    (sent,) = [dispatch for dispatch in it.dispatched if dispatch.rid == rid]
    it.tell(PrefillDone(rid=rid))
    it.tell(RequestEnded(rid=rid, outcome="completed", completion_tokens=50))
    return sent


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rank", [2, 5])
def test_the_rank_that_published_a_prompt_gets_its_next_turn(rule: str, rank: int) -> None:
    it = cluster("events", rule)
    it.tell(BlocksStored(instance="d0", dp_rank=rank, blocks=TURN))
    sent = turn(it, "next", NEXT, 905)
    assert (sent.decode_rank, sent.decode_cached_tokens) == (rank, 800)
    it.tell(BlocksRemoved(instance="d0", dp_rank=rank, blocks=TURN))
    it.wait(3.0)  # what was claimed of the second turn has lapsed
    assert turn(it, "last", NEXT, 905).decode_cached_tokens == 0


@pytest.mark.parametrize("rule", RULES)
def test_without_events_the_rank_that_was_sent_a_prompt_gets_its_next_turn(rule: str) -> None:
    it = cluster("approximate", rule)
    for number in range(3):  # equal ranks take turns
        turn(it, f"other {number}", [1000 + number], 15)
    first = turn(it, "first", TURN, 805)
    second = turn(it, "second", NEXT, 905)
    assert first.decode_cached_tokens == 0
    assert (second.decode_rank, second.decode_cached_tokens) == (first.decode_rank, 800)


def test_what_was_sent_is_forgotten_when_the_engine_restarts() -> None:
    it = cluster("approximate")
    rank = turn(it, "first", TURN, 805).decode_rank
    it.report("d0", rank, kind="heartbeat", role="decode", boot_id="one")
    assert turn(it, "second", TURN, 805).decode_cached_tokens == 800
    it.report("d0", rank, kind="heartbeat", role="decode", boot_id="two", seq=0)
    assert turn(it, "third", TURN, 805).decode_cached_tokens == 0


@pytest.mark.parametrize(("source", "found"), [("approximate", 0), ("events", 800)])
def test_or_was_away_and_publishes_nothing(source: PrefixSource, found: int) -> None:
    it = cluster(source)
    it.tell(BlocksStored(instance="d0", dp_rank=3, blocks=TURN))
    turn(it, "first", TURN, 805)
    it.tell(InstanceDown(instance="d0"))
    it.tell(decode_up(source))
    assert turn(it, "second", TURN, 805).decode_cached_tokens == found


def request(hits: dict[int, int], prompt: int = 4000, output: int = 400) -> Request:
    return Request(
        rid="r",
        order=0,
        prompt_tokens=prompt,
        max_new_tokens=None,
        arrived_s=0.0,
        deadline_s=1.0,
        decode_hits=hits,
        total_tokens=prompt + output,
    )


@pytest.mark.parametrize("rule", [potential, iqr_lexicographic(1.5)])
class TestBalance:
    def test_a_hit_decides_between_ranks_that_are_as_busy(self, rule) -> None:
        loads = [DecodeLoad(4, 40_000 + 500 * rank) for rank in range(8)]
        assert schedule_decode([request({})], [*loads], rule) == {"r": 0}
        assert schedule_decode([request({6: 3900})], loads, rule) == {"r": 6}

    def test_a_rank_that_is_behind_by_much_is_not_chosen_for_it(self, rule) -> None:
        loads = [DecodeLoad(4, 40_000) for _ in range(8)]
        loads[6] = DecodeLoad(8, 41_000)
        assert schedule_decode([request({6: 3900})], loads, rule)["r"] != 6
        loads[6] = DecodeLoad(4, 140_000)
        assert schedule_decode([request({6: 3900})], loads, rule)["r"] != 6

    def test_nor_one_that_is_full(self, rule) -> None:
        loads = [DecodeLoad(4, 40_000 + 500 * rank) for rank in range(8)]
        assert schedule_decode([request({6: 3900})], [*loads], rule) == {"r": 6}
        loads[6] = DecodeLoad(4, 43_000, kv_capacity_tokens=47_000)
        assert schedule_decode([request({6: 3900})], loads, rule)["r"] != 6

    def test_what_a_batch_sends_there_counts_whole(self, rule) -> None:
        """The engine reports what requests use, and a hit is used from then on."""
        loads = [DecodeLoad(4, 40_000) for _ in range(8)]
        schedule_decode([request({6: 3900})], loads, rule)
        assert (loads[6].kv_tokens, loads[6].committed_tokens) == (44_000, 4_400)


def test_an_outlier_stays_masked_however_much_of_the_prompt_it_has() -> None:
    loads = [DecodeLoad(4, 40_000) for _ in range(8)]
    loads[6] = DecodeLoad(4, 90_000)
    asked = request({6: 120_000}, prompt=130_000)
    assert schedule_decode([asked], loads, iqr_lexicographic(1.5))["r"] != 6


def test_a_spared_transfer_is_worth_less_than_a_request() -> None:
    assert hit_requests(request({}, output=400), 0) == 0.0
    assert 0 < hit_requests(request({}, output=400), 3000) < MOST_HIT_REQUESTS
    # One token out: all that counts is when it comes. It would fill one rank with such requests.
    assert hit_requests(request({}, output=1), 100_000) == MOST_HIT_REQUESTS < 1
    loads = [DecodeLoad(2, 10) for _ in range(8)]
    loads[3] = DecodeLoad(4, 20)
    tokens = int(TOKENS_PER_REQUEST / 100)
    asked = request({3: tokens - 1}, prompt=tokens, output=1)
    assert schedule_decode([asked], loads, potential)["r"] != 3


@pytest.mark.parametrize("rule", RULES)
def test_decode_without_a_cache_is_placed_as_ever(rule: str) -> None:
    """Whatever is said of blocks of decode ranks that keep none."""
    plain, with_blocks = cluster("off", rule), cluster("off", rule)
    draw = random.Random(3)
    for number in range(40):
        blocks = TURN[: draw.randrange(80)]
        with_blocks.tell(BlocksStored(instance="d0", dp_rank=draw.randrange(8), blocks=TURN))
        tokens = 10 * len(blocks) + draw.randrange(1, 300)
        for it in (plain, with_blocks):
            it.arrive(f"r{number}", tokens, blocks=blocks, block_tokens=PAGE)
            it.wait(0.05)
            if number % 3 == 0:
                it.tell(PrefillDone(rid=f"r{number}"))
                it.tell(RequestEnded(rid=f"r{number}", outcome="completed", completion_tokens=9))
    assert plain.dispatched
    assert plain.dispatched == with_blocks.dispatched
    assert {dispatch.decode_cached_tokens for dispatch in plain.dispatched} == {0}
