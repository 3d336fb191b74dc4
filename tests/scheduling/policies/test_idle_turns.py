"""Equal idle instances take turns. Slower ones, and those with less of a prompt cached, do not."""

from __future__ import annotations

from collections import Counter

import pytest

from sglang_sbs.simulator import COSTS, ClusterSpec, InstanceSpec, simulate
from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.experiments.sweep import scheduler_config

SHORT, LONG = 900, 9000
"""Prompt tokens; a chunk is 3072."""


def places(policy: str, tokens: int, count: int, **spec) -> list[tuple[str, int] | None]:
    """Where each request went, of those that come when the one before is long over."""
    arrivals = [(3.0 * number, tokens) for number in range(count)]
    cluster = ClusterSpec(cost=COSTS["mixed"], overlap=True, **spec)
    requests = simulate(arrivals, scheduler_config(policy), cluster).requests
    assert all(request.ends == 1 for request in requests)
    return [request.prefill for request in requests]


def ran_on(policy: str, tokens: int, count: int, **spec) -> Counter[str]:
    """The same, counted by instance."""
    return Counter(place[0] for place in places(policy, tokens, count, **spec) if place)


@pytest.mark.parametrize("pass_jitter", [0.0, 0.1])
@pytest.mark.parametrize("tokens", [SHORT, LONG])
@pytest.mark.parametrize("policy", ["eta", "sbs"])
def test_equal_idle_instances_take_turns(policy: str, tokens: int, pass_jitter: float):
    counts = ran_on(policy, tokens, 30, pass_jitter=pass_jitter, seed=3)
    assert min(counts[name] for name in ("p0", "p1", "p2")) >= 7


@pytest.mark.parametrize("policy", ["eta", "sbs"])
def test_a_slower_one_gets_no_more_than_it_takes_to_learn_that(policy: str):
    slow_first = (InstanceSpec(speed=0.5), InstanceSpec(), InstanceSpec())
    counts = ran_on(policy, SHORT, 60, instances=slow_first)
    assert counts["p0"] <= 11
    assert abs(counts["p1"] - counts["p2"]) <= 1


def test_a_conversation_stays_where_it_is_under_eta():
    """The policy receives no cache events; conversations as such take turns."""
    arrivals = [Arrival(3.0 * n, SHORT, 1, session=f"user {n % 9}") for n in range(36)]
    cluster = ClusterSpec(cost=COSTS["mixed"], overlap=True)
    requests = simulate(arrivals, scheduler_config("eta"), cluster).requests
    places = [request.prefill for request in requests]
    assert places[:9] == places[9:18] == places[18:27] == places[27:]
    assert len(set(places)) == 3


def test_the_same_arrivals_go_to_the_same_places_again():
    first, again = (places("sbs", SHORT, 20, pass_jitter=0.1, seed=5) for _ in range(2))
    assert first == again
