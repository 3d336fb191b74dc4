"""The matrix of regimes: its verdicts and its command."""

from __future__ import annotations

import json

import pytest

from benchmarks import matrix
from benchmarks.matrix import (
    REGIMES,
    Verdict,
    job_of,
    main,
    matrix_table,
    summary_of,
    verdict,
)
from sglang_sbs.simulator.experiments.sweep import scenario_of
from sglang_sbs.simulator.parallel import Row


def row(policy: str, mean_s: float, p99_s: float, unfinished: int = 0) -> Row:
    return {
        "cell": "one",
        "policy": policy,
        "ttft_mean_s": mean_s,
        "ttft_p99_s": p99_s,
        "unfinished": unfinished,
    }


def judged(*rows: Row) -> Verdict:
    return verdict(rows, "one", "sbs", [r["policy"] for r in rows if r["policy"] != "sbs"])


def test_mean_and_p99_each_meet_their_own_best_rival():
    cell = judged(row("sbs", 1.0, 2.0), row("eta", 1.1, 3.0), row("sbs_paper", 1.5, 1.95))
    assert cell.best_mean == ("eta", 1.1)
    assert cell.best_p99 == ("sbs_paper", 1.95)
    assert not cell.lost


def test_a_cell_is_lost_by_mean_by_p99_and_by_requests_left_over():
    assert judged(row("sbs", 1.03, 1.0), row("eta", 1.0, 1.0)).lost
    assert judged(row("sbs", 1.0, 1.06), row("eta", 1.0, 1.0)).lost
    assert judged(row("sbs", 0.5, 0.5, unfinished=1), row("eta", 1.0, 1.0)).lost
    assert not judged(row("sbs", 1.02, 1.05), row("eta", 1.0, 1.0)).lost


def test_a_rival_that_leaves_requests_is_none():
    cell = judged(row("sbs", 1.0, 1.0), row("eta", 0.1, 0.1, unfinished=3), row("random", 2.0, 2.0))
    assert cell.best_mean == ("random", 2.0)
    assert "0 of 1 cells lost" in summary_of([cell])


def test_a_cell_in_which_no_rival_finishes_is_won_and_in_no_mean():
    alone = judged(row("sbs", 1.0, 1.0), row("eta", 0.1, 0.1, unfinished=3))
    assert not alone.lost
    assert "none finished" in matrix_table([alone], "sbs", "mixed").rows[0]
    assert summary_of([alone]) == "0 of 1 cells lost; no rival finished in any"
    other = judged(row("sbs", 0.5, 0.8), row("eta", 1.0, 1.0))
    assert summary_of([alone, other]) == (
        "0 of 2 cells lost; geometric mean of the ratios: mean TTFT 0.500, p99 0.800"
    )


@pytest.mark.parametrize("regime", REGIMES)
def test_every_cell_is_a_scenario(regime: str):
    for cell in REGIMES[regime]:
        scenario = scenario_of(job_of(cell, "sbs", 1, "mixed"))
        assert scenario.nominal_qps > 0, cell.name


def test_the_command_judges_a_trace(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(matrix, "_TRACE_CELLS", ((0.2, 0.4), 21.0))
    trace = tmp_path / "mine.csv"
    lines = (f"2023-11-16 18:17:{n / 10:010.7f},{37 * n % 4000 + 1},100" for n in range(200))
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    rows = tmp_path / "rows.json"
    words = f"--regimes none --trace {trace} --rivals eta --json {rows} --workers 1"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert "mine, load 0.4" in out
    assert "of 2 cells lost" in out
    assert {r["policy"] for r in json.loads(rows.read_text())} == {"sbs", "eta"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--regimes none", "needs a --trace"),
        ("--regimes nowhere", "--regimes: 'nowhere' is not one of"),
        ("--rivals best", "--rivals: 'best' is not one of"),
        ("--trace missing.csv", "--trace: missing.csv: no such file"),
    ],
)
def test_bad_arguments_are_named(words: str, says: str, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(matrix, "run_with_progress", interrupt)
    assert main([]) == 130
    assert capsys.readouterr() == ("", "scripts/matrix: interrupted\n")
