"""The clairvoyant bound, on cases small enough to check by hand and against every other cache."""

from __future__ import annotations

import random
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.cluster.kv_cache import BlockCache
from sglang_sbs.simulator.workloads.optimum import optimal_cached_tokens

BLOCK = 10


def arrival(names: list[int], extra_tokens: int = 1) -> Arrival:
    return Arrival(0.0, len(names) * BLOCK + extra_tokens, 1, tuple(names))


def test_with_room_for_all_every_repeated_prefix_is_found():
    arrivals = [arrival([1, 2, 3]), arrival([1, 2, 3, 4]), arrival([1, 9]), arrival([7])]
    assert optimal_cached_tokens(arrivals, BLOCK, 1000) == [0, 30, 10, 0]


def test_the_last_token_is_computed_even_if_all_is_there():
    arrivals = [arrival([1, 2], 0), arrival([1, 2], 0), arrival([1, 2, 3])]
    assert optimal_cached_tokens(arrivals, BLOCK, 1000) == [0, 10, 20]


def test_it_keeps_what_is_needed_next():
    """Room for two blocks, where LRU would have dropped 1 and 2 for 8 and 9."""
    arrivals = [arrival([1, 2]), arrival([8, 9]), arrival([1, 2]), arrival([8])]
    assert optimal_cached_tokens(arrivals, BLOCK, 2 * BLOCK) == [0, 0, 20, 0]


def test_without_a_cache_nothing_is_found():
    assert optimal_cached_tokens([arrival([1]), arrival([1])], 0, 1000) == [0, 0]


def prompts(seed: int, count: int, depth: int) -> list[Arrival]:
    """Paths in a binary tree: the name of a node is the path to it."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        path = [1]
        for _ in range(rng.randrange(depth)):
            path.append(2 * path[-1] + rng.randrange(2))
        made.append(arrival(path))
    return made


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), capacity=st.integers(7, 20))
def test_no_lru_cache_finds_more(seed, capacity):
    arrivals = prompts(seed, 60, 6)
    best = optimal_cached_tokens(arrivals, BLOCK, capacity * BLOCK)
    cache = BlockCache(capacity * BLOCK, BLOCK)
    found = 0
    for arrival in arrivals:
        hit = cache.match(arrival.blocks, arrival.prompt_tokens)
        hold = cache.start(arrival.blocks, hit, arrival.prompt_tokens)
        cache.publish(hold, arrival.prompt_tokens)
        cache.end(hold)
        found += hit * BLOCK
    assert sum(best) >= found
    assert sum(best) <= sum(optimal_cached_tokens(arrivals, BLOCK, 10**9))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_it_is_what_trying_every_eviction_finds(seed):
    arrivals = prompts(seed, 6, 3)
    capacity = 2

    def most_hits(index: int, kept: frozenset[int]) -> int:
        if index == len(arrivals):
            return 0
        blocks = arrivals[index].blocks
        hit = next((i for i, block in enumerate(blocks) if block not in kept), len(blocks))
        union = sorted(kept | set(blocks))
        choices = {
            frozenset(block for block, keep in zip(union, mask, strict=True) if keep)
            for mask in product((0, 1), repeat=len(union))
            if sum(mask) <= capacity
        }
        return hit + max(most_hits(index + 1, choice) for choice in choices)

    best = optimal_cached_tokens(arrivals, BLOCK, capacity * BLOCK)
    assert sum(best) == BLOCK * most_hits(0, frozenset())
