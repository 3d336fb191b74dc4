"""Below a rank's cache: host memory of its own, and storage that all ranks share."""

from __future__ import annotations

import pytest

from sglang_sbs.scheduling import SchedulerConfig
from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.cluster.cost import PassCost
from sglang_sbs.simulator.cluster.kv_cache import BlockCache, SharedStorage
from sglang_sbs.simulator.cluster.outcome import RequestRecord
from sglang_sbs.simulator.cluster.simulation import simulate
from sglang_sbs.simulator.cluster.spec import NO_TIERS, ClusterSpec, TierSpec

BLOCK = 10
COST = PassCost(fixed_s=0.1, max_s=0.001)
FIRST, SECOND = tuple(range(100, 110)), tuple(range(200, 210))


def cache(device: int, host: int, storage: SharedStorage | None = None) -> BlockCache:
    return BlockCache(device * BLOCK, BLOCK, host_tokens=host * BLOCK, storage=storage)


def compute(cache: BlockCache, blocks: tuple[int, ...]) -> None:
    tokens = len(blocks) * BLOCK
    hold = cache.start(blocks, cache.match(blocks, tokens), tokens)
    assert hold is not None
    cache.publish(hold, tokens)
    cache.end(hold)


def test_host_memory_keeps_what_the_device_evicts() -> None:
    caches = cache(device=10, host=20)
    compute(caches, FIRST)
    compute(caches, SECOND)
    assert caches.match(FIRST, 101) == 0
    assert caches.loadable(FIRST, 0, 101) == 10
    events = caches.take_events()
    assert events is not None
    assert sorted(events.removed) == sorted(FIRST)
    assert sorted(events.host_stored) == sorted(FIRST + SECOND)


def test_host_memory_evicts_leaves_that_were_not_used_lately() -> None:
    caches = cache(device=10, host=15)
    compute(caches, FIRST)
    compute(caches, SECOND)
    assert caches.loadable(FIRST, 0, 101) == 5, "the beginning stays"
    assert caches.loadable(SECOND, 0, 101) == 10


def test_storage_has_for_every_rank_what_any_rank_computed() -> None:
    storage = SharedStorage()
    first, other = cache(10, 20, storage), cache(10, 20, storage)
    compute(first, FIRST)
    assert other.to_fetch(FIRST, 101) == list(FIRST)
    other.fetched(FIRST, FIRST)
    assert other.to_fetch(FIRST, 101) == []
    assert other.loadable(FIRST, 0, 101) == 10


def run(tiers: TierSpec, **more: float) -> list[RequestRecord]:
    """The same prompt on one rank and then, with another one in between, on the other rank."""
    spec = ClusterSpec(
        cost=COST,
        prefill_instances=1,
        dp_size=2,
        chunk_tokens=1000,
        block_tokens=BLOCK,
        kv_capacity_tokens=1000,
        tiers=tiers,
        **more,
    )
    shared = tuple(range(50))
    arrivals = [
        Arrival(0.0, 500, 1, shared),
        Arrival(2.0, 20, 1, (900, 901)),
        Arrival(4.0, 20, 1, (910, 911)),
        Arrival(6.0, 501, 1, shared),
    ]
    return simulate(arrivals, SchedulerConfig(policy="round_robin"), spec).requests


def test_a_hit_in_storage_is_the_same_on_another_rank_after_it_was_fetched() -> None:
    first, _, _, again = run(TierSpec(host_kv_tokens=2000, storage_load_s=1e-3, host_load_s=0.0))
    assert first.prefill != again.prefill
    assert (again.cached_tokens, again.fetched_tokens, again.recomputed_tokens) == (500, 500, 0)
    assert again.ttft_s == pytest.approx(0.005 + 0.5 + 0.101), "latency, fetching, a pass"


def test_what_is_in_host_memory_makes_the_pass_longer() -> None:
    again = run(TierSpec(host_kv_tokens=2000, storage_load_s=0.0, host_load_s=1e-3))[-1]
    assert again.loaded_tokens == 500
    assert again.ttft_s == pytest.approx(0.005 + 0.101 + 0.5)


@pytest.mark.parametrize("tiers", [TierSpec(storage=False), NO_TIERS])
def test_without_storage_another_rank_computes_again(tiers: TierSpec) -> None:
    assert run(tiers)[-1].recomputed_tokens == 500
