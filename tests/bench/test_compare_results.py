"""Rows, JSON, page and tables of a comparison."""

from __future__ import annotations

import math
from pathlib import Path

import orjson
import pytest
from compare_rows import HEADER, row, searched

from benchmarks.compare_routers.results import report
from benchmarks.compare_routers.results.rows import Key, Row, RowFile


def test_rows_survive_the_file_and_a_cut_off_line(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "rows.jsonl")
    file.begin(HEADER)
    broken = Row(key=Key("cell", "paper", 0.8, 1, "smg"), requests=5, error="no")
    file.add(row("sbs", 50))
    file.add(broken)
    with file.path.open("ab") as out:
        out.write(b'{"key":{"kind":"ce')
    header, rows = file.read()
    assert header == HEADER
    assert rows[1] == broken
    assert rows[0].answers == row("sbs", 50).answers
    assert rows[0].engines is not None
    assert math.isnan(rows[0].engines.own_gap_ms)
    file.mend()
    file.add(row("mini_lb", 70))
    assert [r.key.policy for r in file.read()[1]] == ["sbs", "smg", "mini_lb"]


def rows_of_a_comparison() -> list[Row]:
    rows = [
        row(policy, mean * (1 + load), load=load, seed=seed)
        for policy, mean in (("sbs", 50), ("sbs_paper", 70), ("smg", 100), ("mini_lb", 120))
        for load in (0.4, 0.8)
        for seed in (1, 2)
    ]
    rows += [searched("sbs", 0.8, 900), searched("sbs", 0.95, 1100)]
    rows += [searched("smg", 0.5, 900), searched("smg", 0.65, 1100)]
    rows.append(
        Row(
            key=Key("cell", "paper", 0.8, 1, "sglang_router:random"),
            requests=5,
            error="it ended at its start: <b>",
        )
    )
    return rows


def test_the_json_has_the_ratios_under_their_names(tmp_path: Path) -> None:
    report.write_json(HEADER, rows_of_a_comparison(), tmp_path / "deep" / "out.json")
    found = orjson.loads((tmp_path / "deep" / "out.json").read_bytes())
    assert set(found) >= {"cells", "max_qps_ratio", "failed_requests"}
    assert {"workload", "load", "policy", "peer", "mean_ratio", "p99_ratio"} <= set(
        found["cells"][0]
    )
    assert found["max_qps_ratio"] == pytest.approx(0.875 / 0.575)
    assert found["max_qps_is_bound"] == []
    assert found["failed_requests"] == 0
    assert found["not_compared"] == {"sglang_router:random": "it ended at its start: <b>"}
    assert found["rows"][0]["engines"]["own_gap_ms"] is None


def test_the_report_is_markdown_with_every_table(tmp_path: Path) -> None:
    report.write_report(HEADER, rows_of_a_comparison(), tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| paper | 0.4 | sbs | 0.50 (0.50-0.50) | smg |" in text
    assert "| sglang_router:random | it ended at its start: <b> |" in text
