"""The paper's claims: the verdicts, and the report end to end on very short runs."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.paper import command
from benchmarks.paper.claims import (
    Claim,
    Estimate,
    claims_table,
    summary,
)
from benchmarks.paper.command import Effort, main
from benchmarks.paper.paper_claims import (
    decode_claims,
    queueing_claims,
    table_1_claims,
)
from benchmarks.paper.queueing import QUEUEING, queueing_job, queueing_row
from sglang_sbs.simulator.cluster.cost import COSTS, save_cost


def claim(literal: float, low: float, high: float, **more) -> Claim:
    values = {"half": math.nan, "ours": None, "good": "", "why": ""} | more
    ours = None if values["ours"] is None else Estimate(values["ours"])
    return Claim(
        what="x",
        source="",
        baseline="b",
        paper=(low, high),
        literal=Estimate(literal, values["half"]),
        ours=ours,
        good=values["good"],
        why=values["why"],
    )


@pytest.mark.parametrize(
    ("literal", "low", "high", "more", "verdict"),
    [
        (57, 57, 57, {}, "reproduced"),
        (62, 57, 57, {}, "reproduced"),
        (63, 57, 57, {}, "not reproduced"),
        (51, 57, 57, {"half": 0.2}, "not reproduced"),
        (51, 57, 57, {"half": 0.4}, "open"),
        (63, 57, 57, {"half": 0.4}, "open"),
        (0.28, 0.3, 0.4, {}, "reproduced"),
        (0.26, 0.3, 0.4, {"good": "more"}, "not reproduced"),
        (0.45, 0.3, 0.4, {}, "not reproduced"),
        (0.45, 0.3, 0.4, {"good": "more"}, "better"),
        (0.45, 0.3, 0.4, {"good": "less"}, "not reproduced"),
        (0.25, 0.3, 0.4, {"good": "less"}, "better"),
        (0.1, 0.3, 0.4, {"good": "more", "ours": 0.31}, "sbs only"),
        (0.1, 0.3, 0.4, {"good": "more", "ours": 0.9}, "sbs only"),
        (0.1, 0.3, 0.4, {"good": "more", "ours": 0.2}, "not reproduced"),
        (0.01, 0.0, math.inf, {"good": "more"}, "reproduced"),
        (0.01, 0.0, math.inf, {"good": "more", "half": 0.02}, "open"),
        (0.0, 0.0, math.inf, {"good": "more"}, "not reproduced"),
        (math.nan, 0.3, 0.4, {"good": "more"}, "not reproduced"),
    ],
)
def test_a_figure_is_reproduced_better_or_not(literal, low, high, more, verdict):
    assert claim(literal, low, high, **more).verdict == verdict


def test_the_summary_says_why_what_does_not_reproduce_does_not():
    why = "Because."
    missed = claim(80, 57, 57, why=why)
    assert summary([claim(57, 57, 57, why="never said"), missed, missed]) == [
        "3 figures: 1 reproduced, 2 not reproduced.",
        "not reproduced: x against b; x against b. Because.",
    ]
    assert missed.row()["why"] == why and claim(57, 57, 57, why=why).row()["why"] == ""
    assert claims_table([missed], "t").rows[0][-1] == "not reproduced"


def test_an_estimate_is_a_mean_with_students_interval():
    assert Estimate.of([1.0, 2.0, 3.0]).mean == 2.0
    assert Estimate.of([1.0, 2.0, 3.0]).half == pytest.approx(4.303 / math.sqrt(3))
    assert (Estimate.of([1.0, 3.0]).low, Estimate.of([1.0, 3.0]).high) == pytest.approx(
        (2 - 12.706, 2 + 12.706)
    )
    assert math.isnan(Estimate.of([5.0]).half) and Estimate.of([5.0]).low == 5.0


def capacity(scenario: str, policy: str, seed: int, qps: float, use: float):
    return {
        "scenario": scenario,
        "cost": "mixed",
        "policy": policy,
        "seed": seed,
        "max_qps": qps,
        "prefill_instances": 3,
        "chunk_utilization": use,
    }


def test_table_1_is_per_instance_and_its_gain_is_seed_by_seed():
    rates = {"random_rank": 171, "sbs_paper": 210, "sbs": 216}
    rows = [
        capacity(scenario, policy, seed, qps * seed, 0.5 + 0.1 * (policy == "sbs"))
        for scenario in ("paper-3k", "paper-5k")
        for policy, qps in rates.items()
        for seed in (1, 2)
    ]
    claims = {c.what: c for c in table_1_claims(rows, "mixed")}
    off = claims["max QPS per instance, off (3K, 0.8 s)"].literal
    assert off.mean == 57 * 1.5 and off.half > 57
    gain = claims["QPS gain (3K, 0.8 s)"]
    assert (gain.literal.mean, gain.literal.half) == pytest.approx((0.228, 0), abs=1e-3)
    assert gain.verdict == "reproduced"
    assert claims["max QPS per instance, on (3K, 0.8 s)"].ours.mean == 72 * 1.5
    assert claims["utilisation gain (5K, 1.0 s)"].ours.mean == pytest.approx(0.1)
    assert claims["throughput gain, mean of both"].literal.mean == pytest.approx(0.228, abs=1e-3)


def test_the_decode_gain_is_given_against_both_baselines():
    speed = {"skewed": 100.0, "round_robin": 110.0, "sbs_iqr": 115.0, "sbs_potential": 120.0}
    rows = [
        {
            "scenario": "paper-decode",
            "policy": policy,
            "seed": 1,
            "kv_sigma_low": 60e3,
            "kv_sigma_high": 100e3,
            "kv_band": 40e3,
            "kv_peak": 150e3,
            "tokens_per_s": tokens,
        }
        for policy, tokens in speed.items()
    ]
    gains = [c for c in decode_claims(rows) if c.what == "decode throughput gain"]
    assert [(c.baseline, c.verdict) for c in gains] == [
        ("skewed", "reproduced"),
        ("round_robin", "not reproduced"),
    ]


def test_a_staggered_wait_shrinks_with_the_instances_and_an_immediate_one_does_not():
    rows = [
        queueing_row(queueing_job(policy, count, 1, 24.0))
        for count in (1, 3)
        for policy in ("random_rank", "sbs_paper", "sbs")
    ]
    assert {row["scenario"] for row in rows} == {QUEUEING}
    verdicts = {c.what: c for c in queueing_claims(rows)}
    assert verdicts["wait, immediate, 3 instances"].literal.mean == pytest.approx(0.5, rel=0.2)
    for what in ("wait, staggered, 1 instances", "wait, staggered, 3 instances"):
        assert verdicts[what].verdict == "reproduced"
    assert verdicts["wait shorter by, 3 instances"].paper == (3, 3)


def test_the_report_is_printed_and_written(tmp_path, monkeypatch, capsys):
    effort = Effort(
        short_s=21.0,
        long_s=24.0,
        steps=60,
        warm_up_steps=20,
        prefill_instances=1,
        queueing_instances=(1,),
        search=(0.9, 1.3),
        tolerance=0.4,
    )
    rows = tmp_path / "rows.json"
    cost = tmp_path / "measured.json"
    save_cost(COSTS["mixed"], cost)
    monkeypatch.setattr(command, "QUICK", effort)
    monkeypatch.setattr(command.paper_claims, "TTFT_SHARES", (0.4, 1.0))
    policies = ("random_rank", "eta", "sbs_paper", "sbs")
    monkeypatch.setattr(command.paper_claims, "PAPER_POLICIES", policies)
    monkeypatch.setattr(command.paper_claims, "BASELINES", policies[:2])
    words = f"--quick --seeds 1 --cost {cost} --json {rows} --workers 1"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    for words in (
        "cost measured",
        "random_rank",
        "QPS gain",
        "wait, staggered",
        "figures: ",
        "decode throughput gain",
        "vs eta",
        "3-64K",
    ):
        assert words in out
    written = json.loads(rows.read_text())
    claims = written["claims"]
    assert len(claims) == 39
    assert all(c["verdict"] and c["literal"]["mean"] is not None for c in claims)
    scenarios = {row["scenario"] for row in written["rows"]}
    assert scenarios == {"paper-3k", "paper-5k", "paper-long", "paper-decode", QUEUEING}


def test_what_cannot_be_written_is_refused_before_the_run(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("kept")
    for path in (file / "below.json", tmp_path):
        with pytest.raises(SystemExit) as ended:
            main(["--json", str(path)])
        assert ended.value.code == 2
        captured = capsys.readouterr()
        assert f"--json {path}: cannot be written" in " ".join(captured.err.split())
        assert not captured.out
    assert file.read_text() == "kept"


def test_an_interrupt_is_a_line(monkeypatch, capsys):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.paper.command.run_with_progress", interrupt)
    assert main([]) == 130
    assert capsys.readouterr() == ("", "scripts/paper-claims: interrupted\n")
