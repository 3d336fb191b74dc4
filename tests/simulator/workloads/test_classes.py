"""Priorities, tenants and SLOs in simulated workloads."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from sglang_sbs.simulator.cli import main
from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.cluster.outcome import RequestRecord
from sglang_sbs.simulator.experiments.sweep import Job, run_job, run_outcome, scenario_of
from sglang_sbs.simulator.workloads.arrivals import synthetic
from sglang_sbs.simulator.workloads.classes import Classes, class_summary

ARRIVALS = synthetic(50.0, 40.0, lambda _: 100, 3)
SHORT = Job("paper-3k", "sbs", 0.6, 3, 40.0, spec={"prefill_instances": 1, "dp_size": 4})


def test_classes_are_drawn_from_the_seed_and_change_nothing_else():
    classes = Classes(0.2, 0.3, {"a": 3, "b": 1})
    drawn = classes.of(ARRIVALS, 1)
    assert drawn == classes.of(ARRIVALS, 1) != classes.of(ARRIVALS, 2)
    assert [a._replace(priority=0, tenant="") for a in drawn] == ARRIVALS
    shares = [sum(a.priority == p for a in drawn) / len(drawn) for p in (1, 0, -1)]
    assert shares == pytest.approx([0.2, 0.5, 0.3], abs=0.05)
    assert sum(a.tenant == "a" for a in drawn) / len(drawn) == pytest.approx(0.75, abs=0.05)
    assert Classes().of(ARRIVALS, 1) == ARRIVALS


def test_the_summary_has_each_class_and_tenant():
    arrivals = [
        Arrival(0.0, 10, 1, priority=1, tenant="a"),
        Arrival(1.0, 10, 1, priority=0, tenant="b"),
        Arrival(2.0, 10, 1, priority=0, tenant="b"),
    ]
    records = [
        RequestRecord(f"r{i}", 10, a.at_s, i, prefilled_s=a.at_s + i + 0.5)
        for i, a in enumerate(arrivals)
    ]
    records[2].refused = "slo"
    summary = class_summary(records, arrivals, 2.0)
    assert list(summary) == ["high", "normal", "tenant a", "tenant b"]
    assert summary["high"]["goodput"] == 1.0
    assert summary["normal"] == {
        "ttft_mean_s": 2.0,
        "ttft_p99_s": 2.5,
        "goodput": 0.5,
        "completed": 2,
        "rejected": 1,
    }
    alike = [a._replace(priority=0, tenant="") for a in arrivals]
    assert class_summary(records, alike, 2.0) == {}


def test_priorities_help_those_that_have_them():
    classes = Classes(0.2)
    prioritized = run_job(replace(SHORT, classes=classes))["classes"]
    equal = run_job(replace(SHORT, classes=classes, policy="sbs_equal"))["classes"]
    assert prioritized["high"]["ttft_p99_s"] < 0.8 * equal["high"]["ttft_p99_s"]
    assert prioritized["high"]["ttft_mean_s"] < prioritized["normal"]["ttft_mean_s"]


def test_sbs_equal_decides_as_without_classes():
    def decided(job):
        return [(r.dispatched_s, r.prefill) for r in run_outcome(scenario_of(job), job).requests]

    assert decided(replace(SHORT, policy="sbs_equal", classes=Classes(0.5))) == decided(SHORT)


def test_a_small_tenant_is_served_before_the_flood_of_another():
    job = replace(SHORT, load=0.8, classes=Classes(tenants={"flood": 9, "small": 1}))
    rows = run_job(job)["classes"]
    assert rows["tenant small"]["ttft_mean_s"] < 0.5 * rows["tenant flood"]["ttft_mean_s"]


def test_early_refusal_keeps_the_slo_of_those_that_are_let_in():
    job = replace(SHORT, load=0.8, spec={**SHORT.spec, "ttft_slo_s": 1.0})
    late = run_job(job)
    early = run_job(replace(job, config={"refuse_missed_slo": True}))
    assert late["rejected"] == 0
    assert early["rejected"] > 0
    assert early["ttft_p99_s"] < 0.8 * late["ttft_p99_s"]


def test_the_command_prints_a_table_by_class(capsys):
    words = "paper-3k --prefill 1 --dp 2 --loads 0.5 --duration 22 --policies sbs,sbs_equal"
    assert main([*words.split(), "--priority-share", "0.3", "--tenants", "a=1,b=2"]) == 0
    out = capsys.readouterr().out
    assert "by class: mean / p99 TTFT" in out
    for name in ("sbs, high", "sbs_equal, normal", "sbs, tenant b"):
        assert re.search(rf"{name} .*/.* %|{name} .*%", out), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--priority-share 2", "write a share between 0 and 1"),
        ("--priority-share 0.7 --low-share 0.7", "at most 1 together"),
        ("--tenants a", "write NAME=PART"),
        ("--tenants a=1,a=2", "each once"),
        ("--sbs-tenant-weights a=0", "write NAME=WEIGHT"),
        ("--sbs-tenant-weights =3", "write NAME=WEIGHT"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(words, message, capsys):
    with pytest.raises(SystemExit):
        main(["paper-3k", *words.split()])
    assert message in capsys.readouterr().err
