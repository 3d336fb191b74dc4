"""Rows, JSON, page and tables of a comparison."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import orjson
import pytest
from compare_rows import HEADER, row

from benchmarks.compare_routers.results import report
from benchmarks.compare_routers.results.rows import Key, Row, RowFile
from sglang_sbs.simulator.experiments import plots


def test_rows_survive_the_file_and_a_cut_off_line(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "rows.jsonl")
    file.begin(HEADER)
    broken = Row(key=Key("paper", 0.8, 1, "smg"), requests=5, error="no")
    file.add(row("sbs", 50))
    file.add(broken)
    with file.path.open("ab") as out:
        out.write(b'{"key":{"workl')
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
    rows.append(
        Row(
            key=Key("paper", 0.8, 1, "sglang_router:random"),
            requests=5,
            error="it ended at its start: <b>",
        )
    )
    return rows


def test_the_json_has_the_ratios_under_their_names(tmp_path: Path) -> None:
    report.write_json(HEADER, rows_of_a_comparison(), tmp_path / "deep" / "out.json")
    found = orjson.loads((tmp_path / "deep" / "out.json").read_bytes())
    assert set(found) >= {"cells", "failed_requests"}
    assert {"workload", "load", "policy", "peer", "mean_ratio", "p99_ratio"} <= set(
        found["cells"][0]
    )
    assert found["failed_requests"] == 0
    assert found["not_compared"] == {"sglang_router:random": "it ended at its start: <b>"}
    assert found["rows"][0]["engines"]["own_gap_ms"] is None


def test_the_report_has_every_table_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    report.write_report(HEADER, rows_of_a_comparison(), tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| paper | 0.4 | sbs | 0.50 (0.50-0.50) | smg |" in text
    assert "| sglang_router:random | it ended at its start: <b> |" in text
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "http://" not in page and "https://" not in page
    assert page.count('src="data:image/png;base64,') == 1
    assert "it ended at its start: &lt;b&gt;" in page


def test_one_load_is_bars_of_contenders_and_several_are_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "png_of", lambda figure: drawn.append(figure) or b"")
    rows = rows_of_a_comparison()
    report.ttft_by_load(rows)
    report.ttft_by_load([row for row in rows if row.key.load == 0.8])
    lines, bars = (figure.axes for figure in drawn)
    assert all(len(axis.lines) == 4 and not axis.patches for axis in lines)
    assert all(len(axis.patches) == 4 and not axis.lines for axis in bars)
    assert bars[0].get_yticklabels()[0].get_text() == "sbs"
    assert report.ttft_by_load([]) is None
