"""``simulate trial``: the router's trial on simulated clusters, where the truth is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_sbs.simulator.cli import main

SHORT = ("--workers", "1", "--dp", "2", "--slot", "20", "--slots", "6")


def test_a_known_difference_is_certain_and_the_interval_holds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    flags = ("--loads", "0.6", "--runs", "1", "--difference", "0.6", "--json", str(out))
    assert main(["trial", *SHORT, *flags]) == 0
    rows = json.loads(out.read_text())
    assert [row["seed"] for row in rows] == [1]
    for row in rows:
        assert row["certain"]
        assert row["cause"] == "certain"
        assert row["low"] < 0.4 < row["high"] < 1
    assert "1 of 1" in capsys.readouterr().out


def test_a_policy_against_itself_shows_no_difference_and_runs_all_slots(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    assert main(["trial", *SHORT, "--loads", "0.5", "--runs", "1", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert (row["cause"], row["slots"], row["certain"]) == ("slots", 6, False)
    assert row["low"] < 1 < row["high"]


def test_two_policies_take_turns_on_one_cluster(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    flags = ("--baseline", "random_rank", "--loads", "0.7", "--runs", "1", "--json", str(out))
    assert main(["trial", *SHORT, *flags]) == 0
    (row,) = json.loads(out.read_text())
    assert row["ratio"] < 0.95
    assert row["truth"] is None


@pytest.mark.parametrize("flags", [["--slots", "5"], ["--difference", "1"], ["--loads", "0"]])
def test_flags_that_cannot_be_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["trial", *flags])
    assert stop.value.code == 2
