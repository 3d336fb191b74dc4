"""The radix cache of a simulated rank: what is found, locked, evicted and reported."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sbs.simulator.cluster.kv_cache import BlockCache

BLOCK = 10


def cache_of(blocks: int) -> BlockCache:
    return BlockCache(blocks * BLOCK, BLOCK)


def compute(cache: BlockCache, names: list[int], prompt_tokens: int | None = None):
    """A request from its start until its KV is sent; None if there is no room for it."""
    prompt_tokens = len(names) * BLOCK if prompt_tokens is None else prompt_tokens
    hold = cache.start(names, cache.match(names, prompt_tokens), prompt_tokens)
    if hold is not None:
        cache.publish(hold, prompt_tokens)
        cache.end(hold)
    return hold


def test_a_prompt_finds_what_one_before_it_computed_up_to_where_they_differ():
    cache = cache_of(20)
    assert cache.match([1, 2, 3], 35) == 0
    compute(cache, [1, 2, 3], 35)
    assert len(cache) == 3  # the 5 tokens after them are no full block
    assert cache.match([1, 2, 3, 4], 45) == 3
    assert cache.match([1, 2, 8, 9], 45) == 2
    assert cache.match([7, 2, 3], 35) == 0


def test_the_last_token_is_always_computed():
    cache = cache_of(20)
    compute(cache, [1, 2, 3], 30)
    assert cache.match([1, 2, 3], 30) == 2
    assert cache.match([1, 2, 3], 31) == 3
    assert cache.match([1], 10) == 0
    assert cache.match([], 5) == 0


def test_the_least_recently_used_is_evicted_from_its_end():
    cache = cache_of(6)
    compute(cache, [1, 2, 3])
    compute(cache, [10, 11, 12])
    compute(cache, [1, 2, 3, 4], 35)  # uses 1, 2 and 3 again, and takes room for one more
    assert [block for block in (1, 2, 3, 10, 11, 12) if block in cache] == [1, 2, 3, 10, 11]
    compute(cache, [20, 21])
    assert [block for block in (1, 2, 3, 10, 11, 20, 21) if block in cache] == [1, 2, 3, 10, 20, 21]


def test_what_a_request_uses_is_not_evicted_and_one_without_room_waits():
    cache = cache_of(5)
    compute(cache, [1, 2])
    reader = cache.start([1, 2, 3], 2, 30)
    assert compute(cache, [10, 11, 12]) is None
    assert 1 in cache and 2 in cache
    assert compute(cache, [10, 11]) is not None
    cache.publish(reader, 30)
    cache.end(reader)
    assert compute(cache, [20, 21, 22]) is not None
    assert 10 not in cache and 11 not in cache and 2 in cache


def test_a_request_without_room_changes_nothing():
    cache = cache_of(4)
    compute(cache, [1, 2])
    running = cache.start([10, 11], 0, 25)
    before = cache.take_events()
    assert (before.stored, before.removed) == ([1, 2], [2])
    assert cache.start([1, 2, 3, 4], 1, 40) is None
    assert cache.take_events() is None
    cache.end(running)


def test_blocks_are_there_chunk_by_chunk_and_two_that_compute_the_same_keep_it_once():
    cache = cache_of(10)
    first, second = (cache.start([1, 2, 3], 0, 35) for _ in range(2))
    assert cache.room == 8
    cache.publish(first, 19)
    assert cache.match([1, 2, 3], 35) == 1
    cache.publish(second, 35)
    assert (len(cache), cache.room) == (3, 3 + 1)
    cache.publish(first, 35)
    assert (len(cache), cache.room) == (3, 1 + 1)
    assert cache.take_events().stored == [1, 2, 3]
    cache.end(first)
    assert compute(cache, list(range(20, 27))) is None  # second still has them and its last page
    cache.end(second)
    assert (len(cache), cache.room) == (3, 0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), capacity=st.integers(4, 30))
def test_events_tell_what_is_there_and_no_block_is_there_without_those_before_it(seed, capacity):
    rng = random.Random(seed)
    cache = cache_of(capacity)
    reported: set[int] = set()
    running: list = []
    for _ in range(120):
        if running and rng.random() < 0.5:
            hold, tokens = running.pop(rng.randrange(len(running)))
            cache.publish(hold, tokens)
            cache.end(hold)
        else:
            branch, depth = rng.randrange(3), rng.randint(1, 6)
            # Branches part after their second block.
            names = [i if i < 2 else 100 * (branch + 1) + i for i in range(depth)]
            tokens = depth * BLOCK + rng.randrange(BLOCK)
            hold = cache.start(names, cache.match(names, tokens), tokens)
            if hold is not None:
                running.append((hold, tokens))
                if rng.random() < 0.5:
                    cache.publish(hold, rng.randrange(tokens))
        events = cache.take_events()
        if events is not None:
            assert reported.issuperset(events.removed)
            reported -= set(events.removed)
            assert reported.isdisjoint(events.stored)
            reported |= set(events.stored)
        assert len(cache) == len(reported) and all(block in cache for block in reported)
        assert len(cache) + cache.room <= capacity
        for block in reported:
            depth = block % 100
            before = [i if i < 2 else block - depth + i for i in range(depth)]
            assert all(name in cache for name in before)
    for hold, tokens in running:
        cache.publish(hold, tokens)
        cache.end(hold)
    assert cache.room == 0
