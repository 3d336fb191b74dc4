"""Calibration recovers what a simulated cluster was made with, from its event log alone."""

from __future__ import annotations

import inspect
import random

import msgspec
import pytest

from sglang_sbs.evaluate.fitting.calibration import calibrate, fit_cost
from sglang_sbs.evaluate.fitting.recording import read_recording
from sglang_sbs.scheduling import Scheduler, SchedulerConfig
from sglang_sbs.scheduling.eventlog import EventLogWriter
from sglang_sbs.simulator import ClusterSpec, PassCost, simulate
from sglang_sbs.simulator.cluster import simulation

SPEC = ClusterSpec(
    cost=PassCost(fixed_s=0.2, mean_s=1.3e-4, max_s=2.7e-4, pair_s=5e-8),
    prefill_instances=3,
    dp_size=2,
    chunk_tokens=1024,
    decode_dp_size=2,
    overlap=True,
    dispatch_latency_s=0.012,
    gang_jitter=0.4,
    dispatch_jitter=0.1,
    launch_gap_s=0.025,
    prepare_s=0.006,
    first_token_s=0.05,
    feedback_latency_s=0.004,
    decode_s=0.16,
    max_new_tokens=8,
)


def arrivals(seed: int, qps: float = 18.0, requests: int = 400):
    rng = random.Random(seed)
    out, now_s = [], 0.0
    for _ in range(requests):
        now_s += rng.expovariate(qps)
        out.append((now_s, 1 + int(rng.betavariate(1, 2) * 1024)))
    return out


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Run a simulation and write the event log a router would have written."""

    def run(policy: str, seed: int, spec: ClusterSpec = SPEC):
        config = SchedulerConfig(policy=policy, n_limit=10**6)
        writer = EventLogWriter(tmp_path / f"{policy}-load0.6-seed{seed}.events", config)

        class Recorded(Scheduler):
            def handle(self, event, now_s):
                commands = super().handle(event, now_s)
                writer.write(now_s, event, commands)
                return commands

        monkeypatch.setattr(simulation, "Scheduler", Recorded)
        outcome = simulate(arrivals(seed), config, spec)
        monkeypatch.undo()
        close = writer.close()
        assert not inspect.isawaitable(close)
        return outcome, read_recording(tmp_path / f"{policy}-load0.6-seed{seed}.events")

    return run


def test_a_recording_attributes_every_request_to_its_passes(record):
    outcome, recording = record("least_tokens", 1)
    assert len(recording.passes) == len(outcome.passes)
    truth = {r.rid: r.prefilled_s - SPEC.first_token_s for r in outcome.requests}
    for request in recording.requests.values():
        assert request.last_pass.end_s == pytest.approx(
            truth[request.rid] + SPEC.feedback_latency_s, abs=1e-6
        )


def test_the_pass_cost_is_recovered(record):
    _, recording = record("round_robin", 1)
    cost, errors = fit_cost(recording.passes)
    for name in ("fixed_s", "mean_s", "max_s", "pair_s"):
        assert getattr(cost, name) == pytest.approx(getattr(SPEC.cost, name), rel=0.05), name
    assert errors.passes == len(recording.passes)
    assert errors.p95_share < 0.02


def test_the_latencies_are_recovered(record):
    policies = ("sbs", "round_robin", "least_tokens")
    found = calibrate([record(policy, seed)[1] for policy in policies for seed in (1,)])
    late_s = SPEC.feedback_latency_s  # a clock offset takes the fastest message as instant
    assert found.dispatch_latency_s == pytest.approx(SPEC.dispatch_latency_s + late_s, rel=0.3)
    # Known to come out too small: 0.16 to 0.34 for 0.4, by the seed (few batches show it).
    assert 0.15 < found.gang_jitter < 0.6
    assert found.dispatch_jitter < 0.25
    assert found.launch_gap_s == pytest.approx(SPEC.launch_gap_s, rel=0.1)
    assert found.prepare_s == pytest.approx(SPEC.prepare_s, rel=0.1)
    assert found.first_token_s == pytest.approx(SPEC.first_token_s, abs=0.001)
    assert found.decode_s == pytest.approx(SPEC.decode_s, abs=0.001)


def test_a_log_without_batches_gives_no_spread_within_them(record):
    found = calibrate([record("round_robin", 1)[1]])
    assert found.dispatch_jitter < 0.1 * found.gang_jitter


def test_passes_of_single_ranks_are_not_taken_for_passes_of_all(record):
    with pytest.raises(ValueError, match=r"eta-load0\.6-seed1\.events has passes of p0, whose DP"):
        record("eta", 1, msgspec.structs.replace(SPEC, barrier=False))
