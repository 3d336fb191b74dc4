"""When holding stops, and when it is tried again."""

from __future__ import annotations

import pytest

from sglang_sbs.scheduling.policies.adaptive.hold_guard import HoldGuard
from sglang_sbs.simulator.cluster.cost import COSTS
from sglang_sbs.simulator.cluster.simulation import simulate
from sglang_sbs.simulator.cluster.spec import ClusterSpec
from sglang_sbs.simulator.experiments.sweep import scheduler_config
from sglang_sbs.simulator.workloads.arrivals import synthetic, uniform_like


def test_holding_stops_with_a_long_lead_and_is_tried_again_ever_more_rarely() -> None:
    guard = HoldGuard()
    assert not guard.update(0.2, 0.0)
    assert not guard.on
    off_s, now_s = [], 1.0
    for _ in range(5):
        assert not guard.update(0.3, now_s)
        assert guard.on
        began_s = now_s
        while not guard.update(0.3, now_s):
            now_s += 1.0
        assert not guard.on
        off_s.append(now_s - began_s)
    assert off_s == [20.0, 40.0, 80.0, 160.0, 160.0]


def test_a_trial_that_goes_well_is_forgotten() -> None:
    guard = HoldGuard()
    guard.update(0.3, 0.0)
    assert guard.update(0.0, 20.0)
    assert not guard.update(0.05, 60.0)
    guard.update(0.3, 61.0)
    assert guard.update(0.0, 81.0)


@pytest.mark.parametrize(("intake_s", "on"), [(0.0, False), (0.0083, True)])
def test_one_busy_intake_for_all_ends_the_holding(intake_s: float, on: bool) -> None:
    """At nine tenths of what the intake can take, a batch waits for its last request."""
    states: list[bool] = []
    spec = ClusterSpec(cost=COSTS["mixed"], dispatch_latency_s=0.005, intake_s=intake_s)
    simulate(
        synthetic(108.0, 20.0, uniform_like(3000), 7),
        scheduler_config("sbs", 7),
        spec,
        observe=lambda scheduler, now_s: states.append(scheduler.snapshot(now_s).holding),
    )
    assert (not all(states)) == on
