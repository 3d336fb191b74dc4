"""The scale measurement: one small run over the real router, and how readings become figures."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.scale import command
from benchmarks.scale.command import (
    Case,
    Result,
    Spread,
    _histogram,
    main,
    parse_arguments,
)
from benchmarks.scale.router import Reading


def test_a_small_run_loses_nothing_and_weighs_every_part(tmp_path: Path, capsys):
    path = tmp_path / "scale.json"
    flags = ["--ranks", "24", "--streams", "12", "--seconds", "2", "--churn", "10"]
    assert main([*flags, "--token-s", "0.2", "--reports", "5", "--json", str(path)]) == 0
    (case,) = json.loads(path.read_text())["cases"]
    assert case["instances"] == 2
    assert case["in_flight"] == 12
    assert case["sent"] >= 12
    assert case["lost"] == 0
    assert case["failures"] == {}
    assert case["reports_handled_per_s"] > 0
    assert set(case["cpu"]) == {"supervisor", "scheduler", "front ends", "engines", "clients"}
    assert case["cpu"]["scheduler"] > 0
    assert all(case["memory"][part] > 1 << 20 for part in case["memory"])
    for kind in ("request", "report"):
        spread = case["decisions"][kind]
        assert spread["count"] > 0
        assert 0 < spread["p50_s"] <= spread["p99_s"]
    assert case["stalls"]["count"] > 0
    assert "| DP ranks (instances) | 24 (2) |" in capsys.readouterr().out


def reading(counts: dict[str, float], longest_s: float) -> Reading:
    series = {
        ("sbs_x_seconds_bucket", (("event", "report"), ("le", le))): value
        for le, value in counts.items()
    }
    series["sbs_x_longest_seconds", (("event", "report"),)] = longest_s
    return Reading(0.0, {}, {}, series)


def test_percentiles_are_of_what_came_between_two_readings():
    before = reading({"0.001": 900.0, "0.01": 900.0, "+Inf": 900.0}, 0.0009)
    after = reading({"0.001": 950.0, "0.01": 999.0, "+Inf": 1000.0}, 0.5)
    spread = _histogram(before, after, "sbs_x", "report")
    assert (spread.count, spread.p50_s, spread.p99_s, spread.max_s) == (100, 0.001, 0.01, 0.5)


@pytest.mark.parametrize(
    ("longest_s", "max_s"),
    [((0.4, 0.5), 0.5), ((0.5, 0.5), 0.01), ((0.006, 0.006), 0.006)],
    ids=["now", "earlier", "earlier, and in the same bucket"],
)
def test_the_longest_is_of_what_came_between_two_readings(longest_s, max_s):
    before = reading({"0.001": 900.0, "0.01": 900.0, "+Inf": 901.0}, longest_s[0])
    after = reading({"0.001": 950.0, "0.01": 1000.0, "+Inf": 1001.0}, longest_s[1])
    if max_s == 0.5:
        after = reading({"0.001": 950.0, "0.01": 999.0, "+Inf": 1001.0}, longest_s[1])
    spread = _histogram(before, after, "sbs_x", "report")
    assert spread.max_s == max_s
    assert spread.p99_s == min(0.01, max_s)


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--ranks", "x"], "--ranks: 'x': write positive integers"),
        (["--ranks", "8"], "--ranks must be 16 or more"),
        (["--ranks", "256", "--streams", "1,2"], "--streams needs as many numbers"),
        (["--workers", "1"], "--workers must be 2 or more"),
        (["--churn", "0"], "--churn: '0': write a positive number"),
        (["--churn", "nan"], "--churn: 'nan': write a positive number"),
        (["--token-s", "inf"], "--token-s: 'inf': write a positive number"),
        (["--seconds", "nan"], "--seconds: 'nan': write a positive number"),
        (["--seconds", "0.5"], "--seconds must be 1 or more"),
    ],
)
def test_bad_flags_say_what_to_write(flags, what, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(flags)
    assert what in capsys.readouterr().err


def result(case: Case) -> Result:
    spread = Spread(count=1, p50_s=0.001, p99_s=0.001, max_s=0.001)
    parts = dict.fromkeys(("supervisor", "scheduler", "front ends"), 1)
    return Result(
        case=case,
        instances=1,
        reports_sent_per_s=1.0,
        reports_handled_per_s=1.0,
        reports_dropped=0,
        in_flight=1,
        sent=1,
        lost=0,
        failures={},
        cpu=dict.fromkeys(parts, 0.1),
        memory=parts,
        memory_idle=parts,
        decisions=dict.fromkeys(("request", "report", "timer"), spread),
        lag=spread,
        first_token=spread,
        stalls=spread,
        stalls_over_1_s=0,
        fleet_late_s=0.0,
        scrape_s=0.001,
        scrape_bytes=1,
    )


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (RuntimeError("the router [died]"), 2),
        (ConnectionResetError("the engines hung up"), 2),
        (msgspec.DecodeError("Input data was truncated"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_case_that_fails_leaves_the_earlier_ones(
    failure, status, tmp_path: Path, monkeypatch, capsys
):
    def fail(log: Path) -> None:
        log.write_text("what the router said [/]")
        raise failure

    async def measure(case: Case, console: object, log: Path) -> Result:
        if case.ranks == 32:
            fail(log)
        return result(case)

    monkeypatch.setattr(command, "measure", measure)
    path = tmp_path / "new" / "scale.json"
    assert main(["--ranks", "16,32,64", "--json", str(path)]) == status
    printed = capsys.readouterr().out
    assert "| DP ranks (instances) | 16 (1) |" in printed
    assert "what the router said [/]" in printed
    written = json.loads(path.read_text())
    assert [case["case"]["ranks"] for case in written["cases"]] == [16]
    assert written["stopped"] == f"32 ranks: {str(failure) or 'interrupted'}"
