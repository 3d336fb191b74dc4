"""The paper's claims: the verdicts, and the report end to end on very short runs."""

from __future__ import annotations

import json
import math

import pytest

from sglang_sbs.simulator.cluster.cost import COSTS, save_cost
from sglang_sbs.simulator.experiments.claims import (
    Claim,
    claims_table,
    decode_claims,
    table_1_claims,
)
from sglang_sbs.simulator.experiments.paper import Effort, report, verdict


def claim(literal: float, low: float, high: float) -> Claim:
    return Claim(what="x", source="", baseline="b", paper=(low, high), literal=literal)


@pytest.mark.parametrize(
    ("literal", "low", "high", "reproduces"),
    [
        (57, 57, 57, True),
        (62, 57, 57, True),
        (63, 57, 57, False),
        (51, 57, 57, False),
        (0.28, 0.3, 0.4, True),
        (0.26, 0.3, 0.4, False),
        (0.45, 0.3, 0.4, False),
        (math.nan, 0.3, 0.4, False),
    ],
)
def test_within_ten_percent_of_the_papers_range_reproduces(literal, low, high, reproduces):
    assert claim(literal, low, high).reproduces is reproduces


def test_the_verdict_names_what_does_not_reproduce():
    text = verdict([claim(57, 57, 57), claim(80, 57, 57)])
    assert text == "1 of 2 figures reproduce within 10 %. Not reproduced: x against b."
    assert claims_table([claim(80, 57, 57)], "t").rows[0][-1] == "NO"


def capacity(scenario: str, policy: str, qps: float, use: float):
    return {
        "scenario": scenario,
        "cost": "mixed",
        "policy": policy,
        "max_qps": qps,
        "prefill_instances": 3,
        "chunk_utilization": use,
    }


def test_table_1_is_per_instance_and_its_gain_is_over_random_rank():
    rates = {"random_rank": 171, "sbs_paper": 210, "sbs": 216, "eta": 200, "least_tokens": 200}
    rows = [capacity(s, p, q, 0.5) for s in ("paper-3k", "paper-5k") for p, q in rates.items()]
    claims = {c.what: c for c in table_1_claims(rows, "mixed")}
    assert claims["max QPS per instance, off (3K, 0.8 s)"].literal == 57
    assert claims["QPS gain (3K, 0.8 s)"].literal == pytest.approx(0.228, abs=1e-3)
    assert claims["QPS gain (3K, 0.8 s)"].reproduces
    assert claims["max QPS per instance, on (3K, 0.8 s)"].ours == 72


def test_the_decode_gain_is_given_against_both_baselines():
    speed = {"skewed": 100.0, "round_robin": 110.0, "sbs_iqr": 115.0, "sbs_potential": 120.0}
    rows = [
        {
            "scenario": "paper-decode",
            "policy": policy,
            "kv_sigma_low": 60e3,
            "kv_sigma_high": 100e3,
            "tokens_per_s": tokens,
        }
        for policy, tokens in speed.items()
    ]
    gains = [c for c in decode_claims(rows) if c.what == "decode throughput gain"]
    assert [(c.baseline, c.reproduces) for c in gains] == [("skewed", True), ("round_robin", False)]


def test_the_report_is_printed_and_written(tmp_path, capsys):
    effort = Effort(
        short_s=21.0,
        long_s=24.0,
        steps=60,
        warm_up_steps=20,
        picture_steps=40,
        prefill_instances=1,
        search=(0.9, 1.3),
        tolerance=0.4,
    )
    rows = tmp_path / "rows.json"
    cost = tmp_path / "measured.json"
    save_cost(COSTS["mixed"], cost)
    assert report([str(cost)], [1], effort, tmp_path / "out", json=rows, workers=1) == 0
    out = capsys.readouterr().out
    for words in (
        "cost measured",
        "random_rank",
        "QPS gain",
        "decode throughput gain",
        "vs eta",
        "3-64K",
    ):
        assert words in out
    page = (tmp_path / "out" / "paper.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    for name in ("ttft", "kv-band", "timeline"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    claims = json.loads((tmp_path / "out" / "claims.json").read_text())
    assert len(claims) == 22 and {c["reproduces"] for c in claims} <= {True, False}
    scenarios = {row["scenario"] for row in json.loads(rows.read_text())}
    assert scenarios == {"paper-3k", "paper-5k", "paper-long", "paper-decode"}
