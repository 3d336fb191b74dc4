"""Engines with radix caches, step by step and as a cluster."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sbs.scheduling import SchedulerConfig
from sglang_sbs.scheduling.events import BlocksRemoved, BlocksStored
from sglang_sbs.simulator import COSTS, ClusterSpec, PassCost, TopologyChange, simulate
from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.cluster.engine import SimulatedPrefill
from sglang_sbs.simulator.cluster.kv_cache import BlockCache
from sglang_sbs.simulator.experiments.sweep import scheduler_config
from sglang_sbs.simulator.workloads.conversations import conversations

PAIRS = PassCost(fixed_s=0.1, pair_s=1e-6)
"""A pass takes 100 ms and 1 us per attention pair."""


def engine(capacity_tokens: int = 1000, **more) -> SimulatedPrefill:
    settings = {"dp_size": 1, "chunk_tokens": 100, "overlap": True, "cost": PAIRS, **more}
    caches = [BlockCache(capacity_tokens, 10) for _ in range(settings["dp_size"])]
    spec = ClusterSpec(**settings)
    return SimulatedPrefill(*spec.prefill[0], spec, rng=random.Random(0), caches=caches)


def iterate(prefill: SimulatedPrefill, now_s: float):
    launched, messages = prefill.step(now_s)
    return launched, prefill.waits_for(launched), messages


def serve(prefill: SimulatedPrefill, now_s: float):
    """Passes until nothing waits; their KV is sent at once. The passes, and the last messages."""
    passes, messages = [], []
    while True:
        launched, waits_for, _ = iterate(prefill, now_s)
        if launched is not None:
            passes.append(launched)
        if waits_for is not None:
            now_s = waits_for.end_s
            ended, messages = prefill.finish()
            for completed in ended.completed:
                prefill.sent(completed)
        elif launched is None:
            return passes, messages


def test_only_what_is_not_cached_is_computed_and_it_attends_to_all_of_it():
    prefill = engine()
    prefill.deliver("a", 0, 45, (1, 2, 3, 4))
    (first,), _ = serve(prefill, 0.0)
    prefill.deliver("b", 0, 60, (1, 2, 3, 7, 8, 9))
    (second,), (message,) = serve(prefill, 1.0)
    assert (first.tokens, second.tokens) == ([45], [30])
    assert second.end_s - second.start_s == pytest.approx(0.1 + 1e-6 * 30 * (30 + 15))
    assert (message.extend_tokens, message.cached_tokens) == (30, 30)
    assert (message.accepted_tokens, message.computed_tokens) == (105, 75)


def test_a_whole_prompt_waits_until_it_is_matched():
    prefill = engine()
    prefill.deliver("a", 0, 50, (1, 2, 3, 4, 5))
    serve(prefill, 0.0)
    prefill.deliver("busy", 0, 100)
    prefill.deliver("b", 0, 61, (1, 2, 3, 4, 5, 6))
    launched, _, (message,) = iterate(prefill, 1.0)
    assert (launched.tokens, message.waiting_tokens) == ([100], 61)
    launched, _, (message,) = iterate(prefill, 1.0)
    assert (launched.tokens, message.waiting_tokens, message.cached_tokens) == ([11], 0, 50)


def test_two_of_one_pass_with_a_new_prefix_in_common_compute_it_each():
    prefill = engine()
    prefill.deliver("a", 0, 35, (1, 2, 3))
    prefill.deliver("b", 0, 35, (1, 2, 3))
    prefill.deliver("c", 0, 35, (1, 2, 3))
    first, *_ = iterate(prefill, 0.0)
    assert first.tokens == [100]  # 35 + 35 + 30 of c, which is cut
    passes, _ = serve(prefill, 0.0)
    assert [a_pass.tokens for a_pass in passes] == [[5]]
    (stored,) = prefill.take_block_events()
    assert stored == BlocksStored(instance="p0", dp_rank=0, blocks=[1, 2, 3], tier="device")


def test_the_chunks_of_a_long_prompt_are_there_for_others_while_the_rest_is_computed():
    prefill = engine(dp_size=1)
    prefill.deliver("long", 0, 150, tuple(range(15)))
    first, *_ = iterate(prefill, 0.0)
    prefill.deliver("b", 0, 55, tuple(range(5)))
    second, *_ = iterate(prefill, 0.0)
    assert (first.tokens, second.tokens) == ([100], [50 + 5])
    assert second.cached_tokens == [50]


def test_blocks_stay_until_the_kv_is_sent_and_who_finds_no_room_waits_for_that():
    prefill = engine(capacity_tokens=100)
    prefill.deliver("a", 0, 60, tuple(range(6)))
    iterate(prefill, 0.0)
    iterate(prefill, 0.0)
    ended, _ = prefill.finish()
    prefill.deliver("b", 0, 60, tuple(range(10, 16)))
    launched, waits_for, (message,) = iterate(prefill, 1.0)
    assert launched is None and waits_for is None and prefill.asleep
    assert (message.kind, message.waiting_tokens) == ("heartbeat", 60)
    prefill.sent(ended.completed[0])
    launched, *_ = iterate(prefill, 2.0)
    assert launched.tokens == [60]
    removed, stored = prefill.take_block_events()
    assert isinstance(removed, BlocksRemoved) and isinstance(stored, BlocksStored)
    assert removed.blocks == [5, 4] and stored.blocks == [0, 1, 2, 3, 4, 5]


SMALL = {
    "cost": COSTS["mixed"],
    "prefill_instances": 2,
    "dp_size": 2,
    "chunk_tokens": 4096,
    "block_tokens": 64,
}


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(
        ["sbs", "sbs_basic", "sbs_paper", "cache_aware", "session", "least_tokens", "eta"]
    ),
    source=st.sampled_from(["events", "approximate", "off"]),
    capacity=st.sampled_from([66_000, 200_000]),
    first_token_s=st.sampled_from([0.0, 0.05]),
    overlap=st.booleans(),
    dies=st.booleans(),
    seed=st.integers(0, 100),
)
def test_every_prompt_token_is_found_or_computed_whatever_happens(
    policy, source, capacity, first_token_s, overlap, dies, seed
):
    spec = ClusterSpec(
        **SMALL,
        kv_capacity_tokens=capacity,
        prefix_source=source,
        first_token_s=first_token_s,
        overlap=overlap,
        changes=(
            (TopologyChange(3.0, "down", "p1"), TopologyChange(5.0, "up", "p1")) if dies else ()
        ),
        seed=seed,
    )
    arrivals = conversations(12.0, 8.0, seed)
    outcomes = [simulate(arrivals, scheduler_config(policy, seed), spec) for _ in range(2)]
    assert repr(outcomes[0].requests) == repr(outcomes[1].requests)
    outcome = outcomes[0]
    computed = 0
    new: set[int] = set()
    for record in sorted(outcome.requests, key=lambda r: r.prefilled_s):
        assert record.ends == 1, record
        uncached = record.prompt_tokens - record.cached_tokens
        assert record.cached_tokens % 64 == 0 and record.recomputed_tokens % 64 == 0
        assert uncached > 0 and 0 <= record.recomputed_tokens <= uncached
        computed += uncached
        new.update(arrivals[record.index].blocks)
    first_time = computed - sum(r.recomputed_tokens for r in outcome.requests)
    partial = sum(a.prompt_tokens % 64 for a in arrivals)
    if not dies:
        assert sum(a_pass.tokens for a_pass in outcome.passes) == computed
        assert first_time == 64 * len(new) + partial
    else:
        assert sum(a_pass.tokens for a_pass in outcome.passes) >= computed


def test_a_hit_is_predicted_exactly_where_events_tell_and_nothing_is_in_the_way():
    spec = ClusterSpec(**SMALL, dispatch_latency_s=0.0, feedback_latency_s=0.0)
    blocks = tuple(range(40))
    arrivals = [
        Arrival(2.0 * turn, 640 * (turn + 1) + 5, 1, blocks[: 10 * (turn + 1)]) for turn in range(4)
    ]
    outcome = simulate(arrivals, SchedulerConfig(), spec)
    assert [r.cached_tokens for r in outcome.requests] == [0, 640, 1280, 1920]
    assert [r.predicted_tokens for r in outcome.requests] == [0, 640, 1280, 1920]
    assert len({r.prefill for r in outcome.requests}) == 1


def test_an_instance_that_died_has_nothing_when_it_is_back():
    spec = ClusterSpec(
        **SMALL | {"prefill_instances": 1},
        changes=(TopologyChange(5.0, "down", "p0"), TopologyChange(6.0, "up", "p0")),
    )
    arrivals = [Arrival(at_s, 645, 1, tuple(range(10))) for at_s in (0.0, 2.0, 8.0, 10.0)]
    outcome = simulate(arrivals, SchedulerConfig(), spec)
    assert [r.cached_tokens for r in outcome.requests] == [0, 640, 0, 640]
    assert [r.predicted_tokens for r in outcome.requests] == [0, 640, 0, 640]
    assert [r.recomputed_tokens for r in outcome.requests] == [0, 0, 640, 0]


def test_a_prompt_that_no_rank_has_kv_for_is_refused_with_the_field():
    spec = ClusterSpec(**SMALL, kv_capacity_tokens=1000)
    with pytest.raises(ValueError, match="kv_capacity_tokens must be at least 1001"):
        simulate([Arrival(0.0, 1001, 1)], SchedulerConfig(), spec)
