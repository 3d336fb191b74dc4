"""N_limit of Algorithm 2: overload is refused, a burst is not, however large the cluster."""

from __future__ import annotations

import random

import pytest

from sglang_sbs.scheduling import SchedulerConfig
from sglang_sbs.simulator import COSTS, ClusterSpec, simulate
from sglang_sbs.simulator.cluster.outcome import Outcome

QUIET_S, BURST_S = 0.5, 0.05


def prompt_tokens(rng: random.Random) -> int:
    return int(rng.betavariate(1, 2) * 3000) + 1


def burst(instances: int, passes: float, seed: int = 1) -> list[tuple[float, int]]:
    """A light load, and at once as much as the cluster computes in so many passes."""
    rng = random.Random(seed)
    arrivals, now_s = [], 0.0
    while (now_s := now_s + rng.expovariate(5 * instances)) < 1 + 0.4 * passes:
        arrivals.append((now_s, prompt_tokens(rng)))
    count = int(24 * passes * instances)
    arrivals += [(QUIET_S + rng.random() * BURST_S, prompt_tokens(rng)) for _ in range(count)]
    return sorted(arrivals)


def served(
    arrivals: list[tuple[float, int]], instances: int, trigger: str, **config: float
) -> Outcome:
    spec = ClusterSpec(cost=COSTS["mixed"], prefill_instances=instances, overlap=True)
    settings = SchedulerConfig(trigger=trigger, **config)  # type: ignore[arg-type]
    return simulate(arrivals, settings, spec)


@pytest.mark.parametrize(
    ("trigger", "instances", "passes"),
    [
        ("adaptive", 3, 8),
        ("adaptive", 12, 8),
        ("paper", 3, 8),
        ("paper", 12, 10),
        ("paper", 64, 2.5),
    ],
)
def test_a_burst_that_is_over_in_some_passes_is_refused_nothing(trigger, instances, passes):
    """This holds for the router's defaults."""
    outcome = served(burst(instances, passes), instances, trigger)
    assert {request.refused for request in outcome.requests} == {None}


@pytest.mark.parametrize("instances", [1, 3, 6])
def test_lasting_overload_is_refused(instances: int):
    rng = random.Random(1)
    arrivals, now_s = [], 0.0
    while (now_s := now_s + rng.expovariate(2 * 70 * instances)) < 20.0:
        arrivals.append((now_s, prompt_tokens(rng)))
    outcome = served(arrivals, instances, "paper", n_limit=10)
    refused = [request for request in outcome.requests if request.refused is not None]
    assert {request.refused for request in refused} == {"flow_control"}
    assert 0.1 < len(refused) / len(arrivals) < 0.9
