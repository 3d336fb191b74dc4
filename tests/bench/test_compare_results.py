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
    broken = Row(
        key=Key("cell", "paper", 0.8, 1, "smg"), client="open-loop", requests=5, error="no"
    )
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
    assert rows[0].trace == row("sbs", 50).trace
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
            client="open-loop",
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


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    report.write_report(HEADER, rows_of_a_comparison(), tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "http://" not in page
    assert "https://" not in page
    assert page.count('src="data:image/png;base64,') == 4
    assert 'class="better"' in page
    assert "&lt;b&gt;" in page
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| paper | 0.4 | sbs | 0.50 (0.50-0.50) | smg |" in text
    assert all((tmp_path / name).is_file() for name in ("ttft-by-load.png", "prefill-passes.png"))


def test_tables_go_between_the_marks_of_a_document(tmp_path: Path) -> None:
    path = tmp_path / "results.md"
    path.write_text(f"before\n{report.BEGIN_MARK}\nold\n{report.END_MARK}\nafter\n")
    report.write_into_docs(HEADER, rows_of_a_comparison(), path)
    report.write_into_docs(HEADER, rows_of_a_comparison(), path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "(results/ttft-by-load.png)" in text
    assert (tmp_path / "results" / "ttft-by-load.png").is_file()
    path.write_text("no marks")
    with pytest.raises(ValueError, match="must contain the lines"):
        report.write_into_docs(HEADER, [], path)
