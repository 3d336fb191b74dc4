"""The closed-loop decode experiment."""

from __future__ import annotations

import pytest

from benchmarks.paper.decode import DECODE_POLICIES, run_decode
from benchmarks.paper.decode_simulation import DecodeSimulation, DecodeSpec
from sglang_sbs.scheduling import SchedulerConfig

SPEC = DecodeSpec(ranks=8, concurrency=200, steps=1600, warm_up_steps=800, seed=3)


def outcome(policy: str, spec: DecodeSpec = SPEC):
    chosen = DECODE_POLICIES[policy]
    config = SchedulerConfig(**chosen.settings, max_queue_requests=10_000)
    return DecodeSimulation(spec, config).run(chosen.skew)


def test_a_row_has_a_band_and_a_speed():
    row = run_decode("sbs_potential", 1, steps=60, warm_up_steps=20)
    assert row["kv_sigma_low"] < row["kv_sigma_high"] < row["kv_peak"]
    assert row["kv_band"] > 0 and row["tokens_per_s"] > 0


def test_no_request_is_lost_between_passes():
    """Closed loop: those in decode plus those that wait for a pass are always all."""
    simulation = DecodeSimulation(SPEC, SchedulerConfig(policy="sbs", max_queue_requests=10_000))
    simulation.run()
    decoding = sum(rank.running for rank in simulation._ranks)
    assert decoding + len(simulation._lengths) == SPEC.concurrency
    assert decoding == len(simulation._live)


@pytest.mark.parametrize("policy", ["sbs_potential", "sbs_iqr", "least_requests"])
def test_choosing_by_state_is_faster_than_in_turn(policy):
    assert outcome(policy).row()["tokens_per_s"] > outcome("round_robin").row()["tokens_per_s"]


def test_the_potential_narrows_the_kv_band():
    narrow = outcome("sbs_potential").row()["kv_cv"]
    assert narrow < 0.7 * outcome("round_robin").row()["kv_cv"]
    assert narrow < 0.9 * outcome("sbs_iqr").row()["kv_cv"]


def test_the_books_the_scheduler_keeps_are_the_ranks(monkeypatch):
    """At every report, what the scheduler believes of a rank is what runs there or is to join."""
    simulation = DecodeSimulation(SPEC, SchedulerConfig(policy="sbs", max_queue_requests=10_000))
    report = simulation._report

    def checked():
        report()
        (decode,) = simulation._scheduler.decode.values()
        coming = [0] * SPEC.ranks
        for placed in simulation._placed:
            coming[placed.decode_rank] += 1
        for rank, load, more in zip(simulation._ranks, decode.loads(), coming, strict=True):
            assert load.running == rank.running + more

    monkeypatch.setattr(simulation, "_report", checked)
    simulation.run()


def test_persistent_weights_are_the_worst():
    assert outcome("skewed").row()["tokens_per_s"] < outcome("round_robin").row()["tokens_per_s"]


def test_a_policy_that_holds_places_requests_as_gangs():
    sizes: dict[int, int] = {}
    simulation = DecodeSimulation(SPEC, SchedulerConfig(policy="sbs", max_queue_requests=10_000))
    join = simulation._join

    def record(command, spread_ages):
        if not spread_ages:
            sizes[command.batch] = sizes.get(command.batch, 0) + 1
        join(command, spread_ages)

    simulation._join = record
    simulation.run()
    assert max(sizes.values()) > 1
