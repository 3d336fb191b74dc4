"""The capacity plan: its arithmetic and its command."""

from __future__ import annotations

import json

import pytest
from simulator_fixtures import lengths, write_azure

from sglang_sbs.simulator.cli import main
from sglang_sbs.simulator.experiments import plan
from sglang_sbs.simulator.experiments.plan import (
    best_chunk,
    capacity_table,
    needed,
    needs_table,
    over_seeds,
)
from sglang_sbs.simulator.parallel import Row
from sglang_sbs.simulator.workloads.scenario import SCENARIOS

CELLS = [
    {
        "policy": p,
        "prefill_instances": n,
        "chunk_tokens": c,
        **dict.fromkeys(("max_qps", "max_qps_least", "max_qps_most"), n * per * factor),
        "seeds": 1,
    }
    for p, per in (("good", 10.0), ("bad", 5.0))
    for n in (2, 3, 4)
    for c, factor in ((1024, 1.0), (2048, 1.2 if p == "good" else 0.9))
]


def test_the_fewest_instances_at_the_best_chunk():
    assert best_chunk(CELLS, "good", 3)["chunk_tokens"] == 2048
    assert best_chunk(CELLS, "bad", 3)["chunk_tokens"] == 1024
    assert needed(CELLS, "good", 36.0)["prefill_instances"] == 3
    assert needed(CELLS, "bad", 36.0) is None


def test_the_table_says_when_the_range_was_too_small_or_too_large():
    table = needs_table(CELLS, [("now", 5.0), ("x 7", 35.0)])
    assert table.rows == [
        ["good", "2 or fewer (2048)", "3 (2048)"],
        ["bad", "2 or fewer (1024)", "more than 4"],
    ]


def rows_of(*max_qps: float, instances: int) -> list[Row]:
    return [
        {"policy": "sbs", "prefill_instances": instances, "chunk_tokens": 512, "max_qps": qps}
        for qps in max_qps
    ]


def test_how_far_seeds_are_apart_is_shown():
    cells = over_seeds([*rows_of(4, 8, 12, instances=1), *rows_of(16, 17, 18, instances=2)])
    capacity = capacity_table(cells, 0.5)
    assert "mean over 3 seeds, least-most" in capacity.title
    assert capacity.rows == [["sbs", "8.0, 4.0-12.0 (512)", "17.0, 16.0-18.0 (512)"]]
    needs = needs_table(cells, [("now", 3), ("x 2", 6), ("x 3", 9), ("x 5.5", 16.5)])
    assert "mean over 3 seeds, fewest-most of a seed" in needs.title
    assert needs.rows == [
        ["sbs", "1 (512)", "1 (512), 1 - 2", "2 (512), 1 - 2", "2 (512), 2 - more than 2"]
    ]


@pytest.mark.parametrize(
    ("flags", "seeds"), [([], {1, 2, 3, 4, 5}), (["--seeds", "2", "--first-seed", "7"], {7, 8})]
)
def test_a_plan_for_a_trace_looks_at_several_windows(flags, seeds, tmp_path, monkeypatch, capsys):
    def capacity(tasks, *_) -> list[Row]:
        return [
            {**row, "seed": job.seed, "max_qps": 10.0 + job.seed}
            for _, (job, _) in tasks
            for row in rows_of(0.0, instances=1)
        ]

    monkeypatch.setattr(plan, "run_with_progress", capacity)
    trace = write_azure(tmp_path / "t.csv", lengths(30))
    rows = tmp_path / "rows.json"
    words = f"plan --trace {trace} --slo-ttft 1 --prefill 1 --policies sbs --json {rows}"
    assert main([*words.split(), *flags]) == 0
    written = json.loads(rows.read_text())
    assert {row["seed"] for row in written} == seeds
    assert {row["max_qps_least"] for row in written} == {10.0 + min(seeds)}
    assert {row["max_qps_most"] for row in written} == {10.0 + max(seeds)}
    assert f"mean over {len(seeds)} seeds" in " ".join(capsys.readouterr().out.split())


def test_a_plan_for_the_papers_workload_is_for_its_three_instances(monkeypatch, capsys):
    monkeypatch.setattr(plan, "run_with_progress", lambda *_: rows_of(0.0, instances=1))
    assert (
        main(
            [
                "plan",
                "--scenario",
                "paper-3k",
                "--slo-ttft",
                "1",
                "--prefill",
                "1",
                "--policies",
                "sbs",
            ]
        )
        == 0
    )
    assert "now: 171 QPS" in " ".join(capsys.readouterr().out.split())


def test_the_command_plans_for_a_trace(tmp_path, capsys):
    trace = write_azure(tmp_path / "t.csv", lengths(300))
    page, rows = tmp_path / "plan.html", tmp_path / "rows.json"
    code = main(
        f"plan --trace {trace} --slo-ttft 1 --prefill 1..2 --dp 2 --policies sbs,random_rank "
        f"--duration 24 --workers 1 --seeds 2 --plot {page} --json {rows}".split()
    )
    assert code == 0
    written = json.loads(rows.read_text())
    assert {(r["policy"], r["prefill_instances"]) for r in written} == {
        (p, n) for p in ("sbs", "random_rank") for n in (1, 2)
    }
    assert all(r["max_qps"] >= 0 and r["slo_ttft_s"] == 1 for r in written)
    assert "data:image/png;base64," in page.read_text()
    assert "prefill instances needed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--slo-ttft", "1"], "one of the arguments --trace --scenario is required"),
        (["--scenario", "paper-3k"], "--slo-ttft"),
        (["--scenario", "x", "--slo-ttft", "1"], "no scenario 'x'"),
        (["--trace", "/absent.csv", "--slo-ttft", "1"], "no such file"),
        (["--scenario", "paper-3k", "--slo-ttft", "1", "--prefill", "6..2"], "as in 2..6 or 2,4"),
        (["--scenario", "paper-3k", "--slo-ttft", "0"], "positive number"),
        (["--scenario", "paper-3k", "--slo-ttft", "1", "--plot", "x.pdf"], "must end in"),
        (["--scenario", "paper-3k", "--slo-ttft", "1", "--cost", "table,mixed"], "one cost model"),
    ],
)
def test_bad_flags_are_named(flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *flags])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_help_names_every_scenario_that_can_be_planned_for(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    shown = "".join(capsys.readouterr().out.split())  # a name may be cut at a hyphen
    assert all(name in shown for name in SCENARIOS)
