"""The capacity plan: its arithmetic and its command."""

from __future__ import annotations

import json

import pytest
from simulator_fixtures import lengths, write_azure

from sglang_sbs.simulator.cli import main
from sglang_sbs.simulator.plan import best_chunk, needed, needs_table

CELLS = [
    {"policy": p, "prefill_instances": n, "chunk_tokens": c, "max_qps": n * per * factor}
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


def test_the_command_plans_for_a_trace(tmp_path, capsys):
    trace = write_azure(tmp_path / "t.csv", lengths(300))
    page, rows = tmp_path / "plan.html", tmp_path / "rows.json"
    code = main(
        f"plan --trace {trace} --slo-ttft 1 --prefill 1..2 --dp 2 --policies sbs,random_rank "
        f"--duration 24 --workers 1 --plot {page} --json {rows}".split()
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
