"""The rows' contract, and the capacity search."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from multiprocessing import active_children

import pytest
from simulator_fixtures import CACHE_FIELDS, ROW_FIELDS, write_turns

from sglang_sbs.simulator import COSTS, ClusterSpec, InstanceSpec, PassCost, TopologyChange
from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.cluster.cost import save_cost
from sglang_sbs.simulator.cluster.outcome import Outcome, RequestRecord, SimulatedPass
from sglang_sbs.simulator.experiments import sweep
from sglang_sbs.simulator.experiments.sweep import (
    EmptyWindowError,
    Job,
    max_load,
    run_job,
    run_outcome,
    scenario_of,
    summary,
)
from sglang_sbs.simulator.parallel import Row, run_all
from sglang_sbs.simulator.workloads.scenario import Scenario, make_scenario

SMALL = {"prefill_instances": 1, "dp_size": 2}
JOB = Job("paper-3k", "eta", 0.2, 1, 26.0, "mixed", SMALL)


def test_a_row_has_the_contracts_fields_and_plausible_values():
    row = run_job(JOB)
    assert row.keys() >= ROW_FIELDS | CACHE_FIELDS
    assert row["hit_rate"] == row["recomputed_tokens"] == 0
    assert row["computed_tokens"] == row["optimal_tokens"] == row["prompt_tokens"]
    assert row["qps"] == pytest.approx(0.2 * 57)
    assert 0 < row["ttft_p50_s"] <= row["ttft_p99_s"]
    assert row["ttft_mean_s"] <= row["ttft_p99_s"]
    assert 0 < row["chunk_utilization"] <= 1
    assert 0 <= row["bubble_share"] < 1
    assert row["completed"] > 0
    assert row["rejected"] == row["unfinished"] == 0


def test_rows_come_in_the_order_of_the_jobs_whatever_the_number_of_processes():
    tasks = [(run_job, (JOB.at_load(load),)) for load in (0.15, 0.05, 0.1)]
    alone, shared = run_all(tasks, workers=1), run_all(tasks, workers=2)
    assert [row["load"] for row in alone] == [0.15, 0.05, 0.1]
    assert alone == shared


def test_the_capacity_is_where_the_slo_is_met_and_barely_more_load_breaks_it():
    row = max_load(JOB, 0.4)
    assert row.keys() >= ROW_FIELDS | {"slo_ttft_s", "max_qps"}
    assert row["max_qps"] == pytest.approx(row["qps"])
    assert row["ttft_mean_s"] <= 0.4 == row["slo_ttft_s"]
    assert run_job(JOB.at_load(1.1 * row["load"]))["ttft_mean_s"] > 0.4


def test_an_slo_below_one_pass_has_no_capacity():
    row = max_load(JOB, 0.01)
    assert row["max_qps"] == 0
    assert row.keys() >= ROW_FIELDS


def test_a_load_that_is_partly_refused_is_not_served():
    """The short queue keeps the mean TTFT within the SLO at any load: by refusing."""
    quick = replace(JOB, config={"max_queue_requests": 4}, policy="sbs", duration_s=24.0)
    refusing = run_job(quick.at_load(4.0))
    assert refusing["rejected"] > 0 and refusing["ttft_mean_s"] <= 1.0
    row = max_load(quick, 1.0)
    assert 0 < row["load"] < 4.0
    assert row["rejected"] == row["unfinished"] == 0


def arriving_from(monkeypatch: pytest.MonkeyPatch, least_load: float) -> None:
    """Let lighter loads have no arrivals after the warm-up."""

    def scenario_of(job: Job) -> Scenario:
        whole = sweep.make_scenario(job.scenario, **job.spec)

        def arrivals(qps: float, duration_s: float, seed: int) -> list[Arrival]:
            least_qps = least_load * whole.nominal_qps
            return whole.arrivals(qps, duration_s if qps >= least_qps else 20.0, seed)

        return replace(whole, arrivals=arrivals)

    monkeypatch.setattr(sweep, "scenario_of", scenario_of)


def test_a_load_without_arrivals_neither_meets_an_slo_nor_breaks_it(monkeypatch):
    whole = max_load(JOB, 1.0)
    arriving_from(monkeypatch, 0.22)
    assert whole["load"] > 0.25
    assert max_load(JOB, 1.0)["load"] == pytest.approx(whole["load"], rel=0.05)
    row = max_load(JOB, 0.01)
    assert (row["max_qps"], row["load"]) == (0, pytest.approx(0.22, rel=0.05))
    assert row["completed"] > 0


def test_a_window_without_arrivals_has_no_capacity_and_says_why(monkeypatch):
    arriving_from(monkeypatch, math.inf)
    with pytest.raises(EmptyWindowError, match="seed 1: nothing arrives between the warm-up of 20"):
        max_load(JOB, 0.4)


def test_an_error_ends_the_other_jobs():
    tasks = [(wait_long, ()), (fail, ()), *[(wait_long, ())] * 5]
    with pytest.raises(EmptyWindowError, match="nothing"):
        run_all(tasks, workers=2)
    # The pool's thread reaps them, too: who comes second takes an ended one for a running one.
    until = time.monotonic() + 20
    while active_children() and time.monotonic() < until:
        time.sleep(0.01)
    assert active_children() == []


def wait_long() -> Row:
    time.sleep(600)
    return {}


def fail() -> Row:
    raise EmptyWindowError("nothing")


def test_utilisation_and_bubbles_are_of_what_each_instance_offers():
    """p1 is half as wide, and is up for half of the window of 20 s."""
    instances = (InstanceSpec(dp_size=2, chunk_tokens=100), InstanceSpec(dp_size=1))
    spec = ClusterSpec(
        cost=COSTS["mixed"], instances=instances, changes=(TopologyChange(30.0, "down", "p1"),)
    )
    scenario = replace(make_scenario("paper-3k"), spec=spec)
    requests = [RequestRecord("r0", 100, 21.0, prefilled_s=22.0), RequestRecord("r1", 1, 40.0)]
    passes = [
        SimulatedPass("p0", 19.0, 20.5, (100, 100)),
        SimulatedPass("p0", 21.0, 22.0, (80, 20)),
        SimulatedPass("p0", 22.0, 30.0, (50, 0)),
        SimulatedPass("p1", 23.0, 26.0, (3072,)),
        SimulatedPass("p0", 39.0, 41.0, (100, 100)),
    ]
    row = summary(Outcome(requests, passes), scenario)
    assert row["chunk_utilization"] == pytest.approx((100 + 50 + 3072) / (2 * 200 + 3072))
    assert row["bubble_share"] == pytest.approx(1 - (1 + 8 + 3) / (20 + 10))
    assert (row["completed"], row["unfinished"]) == (1, 2)
    assert row["ttft_mean_s"] == 1.0
    assert row["active_rank_count"] == pytest.approx((2 + 1 + 1) / 3)
    assert row["max_over_mean"] == pytest.approx((1.6 + 2 + 1) / 3)


def test_the_search_goes_beyond_its_bounds_if_all_of_them_meets_the_slo():
    quick = Job("paper-3k", "eta", 1.0, 1, 22.0, "mixed", SMALL)
    narrow = max_load(quick, 0.4, 0.05, 0.1)
    assert narrow["load"] > 0.1
    assert narrow["load"] == pytest.approx(max_load(quick, 0.4)["load"], rel=0.1)


CACHE_POLICIES = ("sbs", "sbs_basic", "cache_aware", "session", "least_tokens", "random_rank")


def test_rows_of_a_trace_with_blocks_add_up(tmp_path):
    """One rank: it finds what the optimum finds, whatever the policy; of four ranks not so."""
    name = f"trace:{write_turns(tmp_path / 't.jsonl', conversations=20, turns=6, gap_s=10.0)}"
    cost = save_free_cost(tmp_path)
    for policy in CACHE_POLICIES:
        one_rank = {"prefill_instances": 1, "dp_size": 1}
        row = run_job(Job(name, policy, 0.02, 1, 60.0, cost, one_rank))
        assert row["recomputed_tokens"] == 0 < row["hit_rate"]
        assert row["computed_tokens"] == row["optimal_tokens"] < row["prompt_tokens"]
    rows = {
        policy: run_job(
            Job(name, policy, 0.01, 1, 60.0, cost, {"prefill_instances": 2, "dp_size": 2})
        )
        for policy in CACHE_POLICIES
    }
    for row in rows.values():
        assert row["computed_tokens"] >= row["optimal_tokens"]
        assert row["hit_rate"] == pytest.approx(1 - row["computed_tokens"] / row["prompt_tokens"])
    for policy in ("sbs", "session"):
        for blind in ("cache_aware", "random_rank"):  # the DP rank is drawn
            assert rows[policy]["hit_rate"] > rows[blind]["hit_rate"]
            assert rows[policy]["recomputed_tokens"] < rows[blind]["recomputed_tokens"]


def save_free_cost(path) -> str:
    """A cost under which nothing ever waits."""
    file = path / "free.json"
    save_cost(PassCost(fixed_s=0.01, max_s=1e-6), file)
    return str(file)


def test_only_policies_that_read_caches_receive_cache_events():
    quick = Job("sessions", "sbs", 0.02, 1, 25.0, spec={"prefill_instances": 1, "dp_size": 2})
    predicted = {}
    for policy in ("sbs", "sbs_paper", "sbs_basic", "eta", "cache_aware"):
        job = replace(quick, policy=policy)
        outcome = run_outcome(scenario_of(job), job)
        predicted[policy] = sum(r.predicted_tokens for r in outcome.requests)
    assert min(predicted["sbs"], predicted["sbs_paper"]) > 0
    assert predicted["sbs_basic"] == predicted["eta"] == predicted["cache_aware"] == 0
    off = replace(quick, spec={**quick.spec, "prefix_source": "off"})
    basic = replace(quick, policy="sbs_basic")
    assert {**run_job(off), "policy": ""} == {**run_job(basic), "policy": ""}
