"""The rows' contract, and the capacity search."""

from __future__ import annotations

import pytest
from simulator_fixtures import ROW_FIELDS

from sglang_sbs.simulator.sweep import Job, max_load, run_all, run_job

SMALL = {"prefill_instances": 1, "dp_size": 2}
JOB = Job("paper-3k", "eta", 0.2, 1, 26.0, "mixed", SMALL)


def test_a_row_has_the_contracts_fields_and_plausible_values():
    row = run_job(JOB)
    assert row.keys() >= ROW_FIELDS
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
