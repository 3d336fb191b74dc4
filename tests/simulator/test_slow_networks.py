"""Networks whose latency is a large part of a forward pass: holding gains nothing there."""

from __future__ import annotations

import pytest

from sglang_sbs.scheduling.prefill.interval import NetworkLatency
from sglang_sbs.simulator.experiments.sweep import Job, run_job


def mean_ttft_s(policy: str, load: float, seconds: float) -> float:
    spec = {"dispatch_latency_s": 0.3, "dispatch_jitter": 0.15, "gang_gate_s": 0.04}
    row = run_job(Job("paper-3k", policy, load, seed=72, duration_s=seconds, spec=spec))
    assert row["unfinished"] == 0
    return float(row["ttft_mean_s"])


@pytest.mark.parametrize(("load", "seconds"), [(0.6, 25.0), (1.2, 55.0)])
def test_a_latency_of_a_pass_costs_no_more_than_under_eta(load: float, seconds: float):
    assert mean_ttft_s("sbs", load, seconds) < 1.02 * mean_ttft_s("eta", load, seconds)


def test_engines_stay_far_away_while_requests_are_seen_on_their_way():
    latency = NetworkLatency(assumed_s=0.02)
    latency.observe([0.3], now_s=0.0)
    for at_s in range(1, 120):
        latency.observe([], now_s=at_s)
        latency.on_flight(0.25, now_s=at_s)
    assert latency.lone_s == pytest.approx(0.02, abs=0.001)
    assert latency.away_s(120.0) == 0.25


def test_a_network_that_became_faster_is_near_again_after_half_a_minute():
    latency = NetworkLatency(assumed_s=0.02)
    for at_s in range(20):
        latency.on_flight(0.3, now_s=at_s)
    latency.on_flight(0.005, now_s=45.0)
    assert latency.away_s(45.0) == 0.3
    latency.on_flight(0.005, now_s=55.0)
    assert latency.away_s(55.0) == latency.lone_s


def test_requests_that_were_on_their_way_long_ago_are_forgotten():
    latency = NetworkLatency(assumed_s=0.02)
    latency.on_flight(0.25, now_s=0.0)
    assert latency.away_s(1.0) == 0.25
    assert latency.away_s(60.0) == latency.lone_s
