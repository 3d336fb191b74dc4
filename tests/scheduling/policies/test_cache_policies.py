"""The gateways' policies: where a request goes, and why."""

from __future__ import annotations

from collections import Counter

from sglang_sbs.scheduling.events import InstanceUp
from sglang_sbs.scheduling.policies.gateways import (
    BALANCE_ABS_THRESHOLD,
    MAX_TREE_TOKENS,
    CacheAware,
    SessionAffinity,
)
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.request import Request

BLOCK = 100


def instances(count: int, dp_size: int = 4) -> list[PrefillInstance]:
    return [
        PrefillInstance(
            InstanceUp(instance=f"p{index}", role="prefill", dp_size=dp_size, chunk_tokens=1000),
            t_default_s=0.3,
            default_chunk_tokens=1000,
        )
        for index in range(count)
    ]


def request(rid: str, blocks: list[int], session: str = "", tail_tokens: int = 1) -> Request:
    return Request(
        rid=rid,
        order=0,
        prompt_tokens=len(blocks) * BLOCK + tail_tokens,
        max_new_tokens=None,
        arrived_s=0.0,
        deadline_s=100.0,
        blocks=blocks,
        block_tokens=BLOCK,
        session=session,
    )


def keep_busy(instance: PrefillInstance, requests: int) -> None:
    for number in range(requests):
        instance.on_dispatched(f"{instance.id} {number}", number % 4, 10, 0.0)


class TestCacheAware:
    def test_a_request_follows_its_prefix_to_the_instance_on_any_rank(self):
        cluster, policy = instances(3), CacheAware(seed=1)
        first, _ = policy.choose(request("a", [1, 2, 3]), cluster, 0.0)
        keep_busy(first, 5)  # so the fewest requests are elsewhere
        places = [policy.choose(request("b", [1, 2, 3, 4]), cluster, 0.0) for _ in range(40)]
        assert {place.id for place, _ in places} == {first.id}
        assert {rank for _, rank in places} == {0, 1, 2, 3}

    def test_a_small_part_of_the_prompt_is_no_reason(self):
        cluster, policy = instances(2), CacheAware(seed=1)
        first, _ = policy.choose(request("a", [1]), cluster, 0.0)
        keep_busy(first, 1)
        three_of_ten = request("b", [1, *range(50, 52)], tail_tokens=40)
        assert policy.choose(three_of_ten, cluster, 0.0)[0] is not first

    def test_of_equally_busy_ones_the_smallest_tree_is_taken(self):
        cluster, policy = instances(2), CacheAware(seed=1)
        chosen = [
            policy.choose(request("r", [10 * n + i for i in range(3)]), cluster, 0.0)[0].id
            for n in range(4)
        ]
        assert Counter(chosen) == {"p0": 2, "p1": 2}

    def test_when_requests_are_far_apart_the_cache_does_not_matter(self):
        cluster, policy = instances(2), CacheAware(seed=1)
        first, _ = policy.choose(request("a", [1, 2]), cluster, 0.0)
        keep_busy(first, BALANCE_ABS_THRESHOLD)
        assert policy.choose(request("b", [1, 2, 3]), cluster, 0.0)[0] is first
        first.on_dispatched("one more", 0, 10, 0.0)
        assert policy.choose(request("c", [1, 2, 3]), cluster, 0.0)[0] is not first

    def test_the_tree_forgets_what_was_not_used_for_long(self):
        cluster, policy = instances(1), CacheAware(seed=1)
        most = MAX_TREE_TOKENS // BLOCK
        policy.choose(request("old", [1, 2]), cluster, 0.0)
        policy.choose(request("new", list(range(10, 10 + most))), cluster, 0.0)
        assert len(policy._trees["p0"]) == most
        assert 1 not in policy._trees["p0"]

    def test_workers_that_come_and_go_leave_no_trees_behind(self):
        policy = CacheAware(seed=1)
        for pod in range(50):
            cluster = instances(1)
            cluster[0].worker = f"pod {pod}"
            policy.on_topology_change(cluster)
            policy.choose(request("a", [1, 2]), cluster, 0.0)
        assert list(policy._trees) == ["pod 48", "pod 49"]

    def test_without_blocks_it_is_the_fewest_requests(self):
        cluster, policy = instances(2), CacheAware(seed=1)
        keep_busy(cluster[0], 1)
        assert policy.choose(request("a", [], tail_tokens=500), cluster, 0.0)[0] is cluster[1]


class TestSessionAffinity:
    def test_a_session_stays_on_its_rank_and_sessions_spread_over_all(self):
        cluster, policy = instances(3), SessionAffinity()
        places = Counter()
        for number in range(600):
            turns = {
                (place.id, rank)
                for turn in range(3)
                for place, rank in [
                    policy.choose(request(f"{number}.{turn}", [], f"s{number}"), cluster, 0.0)
                ]
            }
            assert len(turns) == 1
            places[turns.pop()] += 1
        assert len(places) == 12
        assert max(places.values()) < 2 * 600 / 12

    def test_an_instance_that_leaves_moves_only_its_own_sessions(self):
        cluster, policy = instances(4), SessionAffinity()
        sessions = [f"s{number}" for number in range(300)]

        def places(up):
            return {s: policy.choose(request("r", [], s), up, 0.0) for s in sessions}

        before, after = places(cluster), places(cluster[:3])
        moved = [s for s in sessions if after[s] != before[s]]
        assert moved and all(before[s][0] is cluster[3] for s in moved)

    def test_requests_without_a_session_are_spread(self):
        cluster, policy = instances(2), SessionAffinity()
        places = {
            (place.id, rank)
            for number in range(100)
            for place, rank in [policy.choose(request(f"r{number}", []), cluster, 0.0)]
        }
        assert len(places) == 8
