"""The emulated routers: where a request goes, and why."""

from __future__ import annotations

from collections import Counter
from hashlib import sha256

import pytest

from benchmarks.emulations import LlmD, SglRouter
from sglang_sbs.scheduling.events import InstanceUp
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.prefix.index import Hits
from sglang_sbs.scheduling.request import Request

RANKS = 4


@pytest.fixture
def cluster() -> list[PrefillInstance]:
    return [
        PrefillInstance(
            InstanceUp(instance=f"p{index}", role="prefill", dp_size=RANKS, chunk_tokens=1000),
            t_default_s=0.3,
            default_chunk_tokens=1000,
        )
        for index in range(2)
    ]


def request(session: str = "", **hits: list[int]) -> Request:
    """1000 tokens, of which ranks have this many."""
    best = max((max(hit) for hit in hits.values()), default=0)
    return Request(
        rid="r",
        order=0,
        prompt_tokens=1000,
        max_new_tokens=None,
        arrived_s=0.0,
        deadline_s=100.0,
        session=session,
        hits=Hits(by_instance=hits, best_tokens=best),
    )


def send(instance: PrefillInstance, rank: int, requests: int = 1) -> None:
    for number in range(requests):
        instance.on_dispatched(f"{instance.id} {rank} {number}", rank, 10, 0.0)


class TestSglRouter:
    def test_a_session_names_its_rank_whatever_is_cached_or_busy(self, cluster) -> None:
        """The value that SGLang's own test has for 8 ranks, too."""
        number = int.from_bytes(sha256(b"session-42").digest()[:8], "big")
        assert number % 8 == 1
        wanted = number % RANKS
        send(cluster[1], wanted, 9)
        deepest = [0] * RANKS
        deepest[(wanted + 1) % RANKS] = 900
        place = SglRouter(1).choose(request("session-42", p1=deepest), cluster, 0.0)
        assert place == (cluster[1], wanted)

    def test_the_longest_prefix_wins_then_the_least_busy_of_those_that_have_it(self, cluster):
        policy = SglRouter(1)
        send(cluster[1], 2, 5)
        asked = request(p0=[0, 200, 0, 0], p1=[0, 0, 500, 400])
        assert policy.choose(asked, cluster, 0.0) == (cluster[1], 2)
        two = request(p1=[0, 0, 500, 500])
        assert {policy.choose(two, cluster, 0.0)[1] for _ in range(4)} == {3}

    def test_without_a_prefix_the_fewest_in_flight_in_turns(self, cluster):
        send(cluster[0], 0, 9)
        send(cluster[1], 0)
        send(cluster[1], 2)
        policy = SglRouter(1)
        places = [policy.choose(request(), cluster, 0.0) for _ in range(8)]
        assert Counter((instance.id, rank) for instance, rank in places) == {
            ("p1", 1): 4,
            ("p1", 3): 4,
        }


class TestLlmD:
    def test_a_long_prefix_outweighs_the_queue_and_a_short_one_does_not(self, cluster):
        send(cluster[0], 1, 3)
        policy = LlmD(1)
        assert policy.choose(request(p0=[0, 600, 0, 0]), cluster, 0.0) == (cluster[0], 1)
        assert policy.choose(request(p0=[0, 400, 0, 0]), cluster, 0.0) != (cluster[0], 1)

    def test_of_equal_scores_any_is_taken(self, cluster):
        policy = LlmD(1)
        assert len({policy.choose(request(), cluster, 0.0) for _ in range(200)}) == 2 * RANKS
        for rank in range(RANKS):
            send(cluster[0], rank)
        assert {policy.choose(request(), cluster, 0.0)[0].id for _ in range(50)} == {"p1"}
