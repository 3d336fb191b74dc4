"""Calculates the fewest prompt tokens that a cluster has to compute, with one clairvoyant cache for
all ranks.

The cache has the KV capacity of all DP ranks together, and each prompt finds the blocks of every
earlier one at once. The block with the farthest next use is evicted (Belady); of two, the one
deeper in its prompt, so that the beginning of a prompt is kept. No placement on ranks with caches
of their own computes less, unless it serves the prompts in another order."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from sglang_sbs.simulator.cluster.arrival import Arrival


def optimal_cached_tokens(
    arrivals: Sequence[Arrival],
    block_tokens: int,
    capacity_tokens: int,
    history: Sequence[int] = (),
) -> list[int]:
    """Return the tokens of each prompt that need not be computed, in order of arrival. As in the
    engine (:mod:`sglang_sbs.simulator.cluster.kv_cache`), only full blocks count, and the last
    token is always computed. ``block_tokens``: 0 disables the cache. ``capacity_tokens``: capacity
    of all ranks together. ``history``: blocks present at the beginning."""
    if not block_tokens:
        return [0] * len(arrivals)
    usable = [arrival.blocks[: (arrival.prompt_tokens - 1) // block_tokens] for arrival in arrivals]
    uses: dict[int, list[int]] = {}
    """Indices of the arrivals that could use each block, the next one last."""
    for index in range(len(usable) - 1, -1, -1):
        for block in usable[index]:
            uses.setdefault(block, []).append(index)
    capacity = capacity_tokens // block_tokens
    kept: dict[int, int] = {}
    """Index of the next use of each cached block."""
    farthest: list[tuple[int, int, int]] = []
    """Heap of (- next use, - depth, block); entries that ``kept`` contradicts are outdated."""
    for depth, block in enumerate(history):
        if later := uses.get(block):
            kept[block] = later[-1]
            heappush(farthest, (-later[-1], -depth, block))
    cached = []
    for arrival, blocks in zip(arrivals, usable, strict=True):
        hit = next((i for i, block in enumerate(blocks) if block not in kept), len(blocks))
        cached.append(hit * block_tokens)
        for block in blocks:
            uses[block].pop()
        for depth, block in enumerate(arrival.blocks):
            later = uses.get(block)
            if later:
                kept[block] = later[-1]
                heappush(farthest, (-later[-1], -depth, block))
            else:
                kept.pop(block, None)
        while len(kept) > capacity:
            next_use, _, block = heappop(farthest)
            if kept.get(block) == -next_use:
                del kept[block]
    return cached
