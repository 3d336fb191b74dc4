"""The scale measurement: one small run over the real router, and how readings become figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_sbs.bench.scale import Case, _histogram, main, markdown, parse_arguments
from sglang_sbs.bench.scale_router import Reading, shape_of


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


def test_all_ranks_are_in_some_instance():
    for ranks in (16, 24, 256, 1000):
        shape = shape_of(ranks, "tcp://127.0.0.1:1", 20.0, 1.0)
        assert shape.ranks == ranks
        assert max(shape.decode) <= 32


def reading(counts: dict[str, float], longest_s: float) -> Reading:
    series = {
        ("sbs_x_seconds_bucket", (("event", "report"), ("le", le))): value
        for le, value in counts.items()
    }
    series["sbs_x_longest_seconds", (("event", "report"),)] = longest_s
    return Reading(0.0, {}, {}, [], series)


def test_percentiles_are_of_what_came_between_two_readings():
    before = reading({"0.001": 900.0, "0.01": 900.0, "+Inf": 900.0}, 0.0009)
    after = reading({"0.001": 950.0, "0.01": 999.0, "+Inf": 1000.0}, 0.5)
    spread = _histogram(before, after, "sbs_x", "report")
    assert (spread.count, spread.p50_s, spread.p99_s, spread.max_s) == (100, 0.001, 0.01, 0.5)


def test_nothing_counted_is_no_percentile():
    same = reading({"0.001": 5.0, "+Inf": 5.0}, 0.0009)
    spread = _histogram(same, same, "sbs_x", "report")
    assert (spread.count, spread.p50_s) == (0, None)


def test_quick_is_one_case_and_the_default_three():
    assert [case.ranks for case in parse_arguments(["--quick"]).cases] == [256]
    cases: list[Case] = parse_arguments([]).cases
    assert [(case.ranks, case.streams) for case in cases] == [
        (256, 2500),
        (512, 5000),
        (1000, 10000),
    ]
    assert markdown([]).startswith("| DP ranks")


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--ranks", "x"], "--ranks: 'x' is no list of numbers"),
        (["--ranks", "8"], "--ranks must be 16 or more"),
        (["--ranks", "256", "--streams", "1,2"], "--streams needs as many numbers"),
        (["--workers", "1"], "--workers must be 2 or more"),
        (["--churn", "0"], "--churn must be more than 0"),
    ],
)
def test_bad_flags_say_what_to_write(flags, what, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(flags)
    assert what in capsys.readouterr().err
