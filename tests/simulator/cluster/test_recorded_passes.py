"""Simulated passes that are as slow as recorded ones were at that time."""

from __future__ import annotations

import pytest

from sglang_sbs.scheduling import SchedulerConfig
from sglang_sbs.simulator import ClusterSpec, InstanceSpec, PassCost, simulate


def test_a_pass_takes_the_factor_of_the_recorded_pass_nearest_to_its_start():
    shape = InstanceSpec(
        dp_size=1, chunk_tokens=1000, recorded=((0.0, 1.0), (10.0, 3.0), (20.0, 2))
    )
    spec = ClusterSpec(cost=PassCost(fixed_s=1.0), instances=(shape,), pass_jitter=0.5)
    arrivals = [(1.0, 10), (8.0, 10), (14.0, 10), (40.0, 10)]
    outcome = simulate(arrivals, SchedulerConfig(policy="round_robin"), spec)
    took_s = [a_pass.end_s - a_pass.start_s for a_pass in outcome.passes]
    assert took_s == pytest.approx([1.0, 3.0, 3.0, 2.0])
