"""The comparison of routers: one short run over real routers, and how its figures are summed up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.relay_cost import (
    Samples,
    main,
    parse_arguments,
    ratio_of_versions,
    ratios_of,
    versions_of,
)

RATIOS = {
    f"{name}_vs_rust"
    for name in ("cpu_per_chunk", "ttfb_p50", "ttfb_p99", "ttfb_kept_p50", "ttfb_kept_p99")
}


def test_a_short_run_measures_everything(tmp_path: Path):
    pytest.importorskip("sglang_router.sglang_router_rs")
    path = tmp_path / "relay.json"
    flags = ["--streams", "5", "--seconds", "0.6", "--rounds", "1", "--chunk-rate", "500"]
    assert main([*flags, "--contenders", "ours,rust", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert set(result) == {"versions", "cpus", "settings", "ratios", "ratios_sbs", "samples"}
    assert set(result["ratios"]) - {"by_streams"} <= RATIOS
    assert result["ratios"]["cpu_per_chunk_vs_rust"] > 0
    assert result["ratios_sbs"] == {"by_streams": {}}
    cells = {(s["contender"], s["streams"], s["quantity"]): s for s in result["samples"]}
    first_byte = [f"ttfb_{c}_{p}_us" for c in ("new", "kept") for p in ("p50", "p99")]
    assert set(cells) == {
        *(("direct", 5, quantity) for quantity in first_byte),
        *(
            (router, streams, quantity)
            for router in ("ours", "rust")
            for streams, quantity in [
                (5, "cpu_us_per_chunk"),
                *((5, f"added_{quantity}") for quantity in first_byte),
                (0, "memory_kib_per_stream"),
                (0, "requests_per_s"),
                (0, "cpu_us_per_request"),
            ]
        ),
    }
    for router in ("ours", "rust"):
        assert cells[router, 5, "cpu_us_per_chunk"]["min"] > 0
        assert cells[router, 0, "requests_per_s"]["min"] > 0


def test_ratios_are_those_of_medians_and_the_worst_is_on_top():
    samples = Samples()
    for streams, ours, rust in [(1, [1, 9, 2], [4, 4, 4]), (50, [6, 6, 6], [4, 3, 100])]:
        for mine, theirs in zip(ours, rust, strict=True):
            samples.add("ours", streams, "cpu_us_per_chunk", mine)
            samples.add("rust", streams, "cpu_us_per_chunk", theirs)
    assert ratios_of(samples, "ours", [1, 50]) == {
        "cpu_per_chunk_vs_rust": 1.5,
        "by_streams": {
            "1": {"cpu_per_chunk_vs_rust": 0.5},
            "50": {"cpu_per_chunk_vs_rust": 1.5},
        },
    }


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--streams", "1,x"], "write positive integers"),
        (["--streams", "0"], "write positive integers"),
        (["--contenders", "ours,go"], "no contender 'go'; there are ours, ours-sbs, rust, mini_lb"),
        (["--seconds", "0"], "--seconds: '0': write a positive number"),
    ],
)
def test_bad_flags_say_what_to_write(flags, what, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(flags)
    assert what in capsys.readouterr().err


def test_two_versions_are_compared_round_by_round():
    samples = Samples()
    for name, values in (("before-sbs", (100, 200, 400)), ("ours-sbs", (110, 210, 480))):
        for value in values:
            samples.add(name, 0, "cpu_us_per_request", value)
    assert ratio_of_versions(samples, "ours-sbs") == pytest.approx((1.075, 1.1, 1.15))


def test_the_older_version_runs_from_its_own_checkout(tmp_path: Path):
    of = {version.name: version for version in versions_of(tmp_path)}
    assert list(of) == ["before", "ours", "before-sbs", "ours-sbs"]
    for policy, suffix in (("round_robin", ""), ("sbs", "-sbs")):
        before, ours = (of[f"{name}{suffix}"] for name in ("before", "ours"))
        assert before.wrapper == ("env", f"--chdir={tmp_path}", f"PYTHONPATH={tmp_path}")
        assert ours.flags == (*before.flags, "--access-log", "all")
        assert before.flags[:2] == ("--policy", policy)
