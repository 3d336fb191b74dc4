"""The shadow clusters: what other policies would have made of the same requests."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_sbs.dashboard.shadow import (
    ShadowCluster,
    ShadowRequest,
    ShadowRoundRobin,
    Shape,
    least_tokens,
)
from sglang_sbs.dashboard.ttft import TtftComparison

P0 = "http://p0"
ASKED = ShadowRequest(tokens=10, now_s=0.0, latency_s=0.0)


class Steady:
    """Every pass takes one second."""

    def predict_s(self, tokens_per_rank: Any, pairs: Any = ()) -> float:
        assert len(tokens_per_rank) == len(pairs)
        return 1.0


def shadow(instances: int = 1, dp_size: int = 2) -> ShadowCluster:
    made = ShadowCluster()
    shapes = {f"p{i}": Shape(dp_size, 100, Steady().predict_s) for i in range(instances)}
    made.follow(shapes, 0.0)
    return made


def test_the_shadow_computes_in_passes_that_wait_for_no_late_comer() -> None:
    cluster = shadow()
    cluster.place("a", ("p0", 0), 60, 0.0)
    cluster.place("b", ("p0", 0), 60, 0.0)
    cluster.place("late", ("p0", 1), 10, 0.5)
    assert cluster.advance(0.9) == []
    assert cluster.advance(5.0) == [("a", 1.0), ("b", 2.0), ("late", 2.0)]
    assert cluster.requests == 0


def test_a_prompt_of_several_chunks_takes_as_many_passes() -> None:
    cluster = shadow()
    cluster.place("long", ("p0", 0), 250, 0.0)
    assert cluster.advance(10.0) == [("long", 3.0)]


def test_what_an_instance_was_busy_with_comes_first() -> None:
    cluster = shadow()
    cluster.preload("p0", [100, 0], free_s=0.25)
    cluster.place("a", ("p0", 0), 10, 0.0)
    assert cluster.advance(10.0) == [("a", 2.25)]


def test_rules_place_as_they_say() -> None:
    cluster = shadow(instances=2)
    turn = ShadowRoundRobin()
    places = [turn(cluster.instances, ASKED) for _ in range(4)]
    assert places == [("p0", 0), ("p1", 0), ("p0", 1), ("p1", 1)]
    cluster.place("a", ("p0", 0), 50, 0.0)
    cluster.place("b", ("p0", 1), 10, 0.0)
    cluster.place("c", ("p1", 0), 20, 0.0)
    cluster.place("d", ("p1", 1), 5, 0.0)
    assert least_tokens(cluster.instances, ASKED) == ("p1", 1)


def test_a_worker_without_a_barrier_is_one_worker_whose_ranks_wait_for_nobody() -> None:
    cluster = ShadowCluster()
    lone = {f"p0 rank {rank}": Shape(1, 100, Steady().predict_s, "p0") for rank in range(3)}
    cluster.follow(lone | {"p1": Shape(2, 100, Steady().predict_s)}, 0.0)
    turn = ShadowRoundRobin()
    places = [turn(cluster.instances, ASKED) for _ in range(4)]
    assert places == [("p0 rank 0", 0), ("p1", 0), ("p0 rank 1", 0), ("p1", 1)]
    cluster.place("a", ("p0 rank 0", 0), 100, 0.0)
    cluster.place("late", ("p0 rank 1", 0), 10, 0.5)
    assert cluster.advance(2.0) == [("a", 1.0), ("late", 1.5)]


def test_an_instance_that_goes_takes_its_requests_along() -> None:
    cluster = shadow(instances=2)
    cluster.place("a", ("p0", 0), 50, 0.0)
    cluster.place("b", ("p1", 0), 50, 0.0)
    cluster.advance(0.5)
    cluster.follow({"p1": Shape(2, 100, Steady().predict_s)}, 0.5)
    assert cluster.requests == 1
    assert cluster.advance(2.0) == [("b", 1.0)]


def test_the_comparison_is_of_the_same_requests() -> None:
    ttft = TtftComparison()
    ttft.follow({P0: Shape(2, 100, Steady().predict_s)}, 0.0)
    ttft.on_arrived("a", 50, 0.0, 0.0)
    ttft.on_arrived("refused", 50, 0.0, 0.0)
    ttft.on_ended("refused")
    ttft.on_dispatched("a", P0, 0, 0, 0.4)  # held for 0.4 s
    ttft.advance(1.5)
    ttft.on_prefilled("a", 1.5, pass_ended_s=1.4)  # the way of the answer: 0.1 s
    ttft.advance(2.0)
    summary = ttft.summary(2.0)
    assert summary["requests"] == 1
    assert summary["unfinished"] == {"eta": 0, "least_tokens": 0, "round_robin": 0}
    figures = {name: figure["p50"] for name, figure in summary["figures"].items()}
    assert figures["measured"] == 1.5
    # Median of the ways seen so far: none, and 0.1 s.
    assert figures["modelled"] == pytest.approx(1.45)
    assert figures["least_tokens"] == figures["round_robin"] == pytest.approx(1.05)


def test_immediate_dispatch_is_granted_the_cached_prefix() -> None:
    ttft = TtftComparison()
    ttft.follow({P0: Shape(1, 100, Steady().predict_s)}, 0.0)
    ttft.on_arrived("a", 250, 0.0, 0.0)
    ttft.on_dispatched("a", P0, 0, 200, 0.0)
    ttft.advance(5.0)
    ttft.on_prefilled("a", 1.0, 1.0)
    figures = ttft.summary(5.0)["figures"]
    assert figures["least_tokens"]["p50"] == 1.0
    assert figures["modelled"]["p50"] == 1.0
