"""Pictures can be drawn from what runs return."""

from __future__ import annotations

import pytest

from sglang_sbs.policy_looks import LOOKS
from sglang_sbs.scheduling import SchedulerConfig
from sglang_sbs.simulator.cluster.decode import DecodeSimulation, DecodeSpec
from sglang_sbs.simulator.experiments import plots
from sglang_sbs.simulator.experiments.page import Picture, policies_table, write_page
from sglang_sbs.simulator.experiments.sweep import Job, run_outcome
from sglang_sbs.simulator.experiments.tables import ResultTable
from sglang_sbs.simulator.workloads.scenario import make_scenario


def test_the_timeline_draws_every_pass_of_its_window():
    scenario = make_scenario("paper-3k", prefill_instances=2, dp_size=2)
    outcome = run_outcome(scenario, Job("paper-3k", "eta", 0.2, 1, 10.0))
    figure = plots.pass_timeline({"eta": outcome, "again": outcome}, dict(scenario.spec.prefill))
    first, second = figure.axes
    middle_s = outcome.requests[-1].arrived_s / 2
    shown = [p for p in outcome.passes if p.end_s >= middle_s and p.start_s <= middle_s + 4]
    assert len(first.patches) == len(second.patches) == 3 * len(shown) + 2 > 2
    full, heaviest, mean = (bar.get_height() for bar in first.patches[1:4])
    assert full >= heaviest >= mean > 0
    assert plots.png_of(figure).startswith(b"\x89PNG")


def test_the_kv_band_has_a_panel_per_policy():
    spec = DecodeSpec(ranks=4, concurrency=20, steps=60, warm_up_steps=20)
    outcome = DecodeSimulation(spec, SchedulerConfig()).run()
    figure = plots.kv_bands({"sbs": outcome, "round_robin": outcome})
    assert len(figure.axes) == 2
    assert all(len(axis.lines) == 4 + 1 for axis in figure.axes)
    plots.png_of(figure)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_suffix_chooses_the_format(tmp_path, suffix):
    cells = [
        {
            "policy": "sbs",
            "prefill_instances": n,
            "chunk_tokens": 1,
            "max_qps": 9.0 * n,
            "max_qps_least": 8.0 * n,
            "max_qps_most": 9.5 * n,
        }
        for n in (1, 2)
    ]
    path = tmp_path / "new" / f"p.{suffix}"
    plots.save(plots.capacity_by_instances(cells, [("now", 5.0)], 0.8), path)
    assert (b"PNG" if suffix == "png" else b"<svg") in path.read_bytes()


def test_a_page_escapes_what_it_is_given(tmp_path):
    table = ResultTable("a < b", ["x", "y"], [["<script>", "1 & 2"]])
    write_page(tmp_path / "p.html", "<title>", ["1 < 2", table, Picture("<i>", b"\x89PNG")])
    text = (tmp_path / "p.html").read_text()
    assert "<script>" not in text and "&lt;script&gt;" in text and "1 &amp; 2" in text


def ttft_row(policy: str, scenario: str, mean_s: float) -> dict[str, object]:
    cell = {"scenario": scenario, "cost": "mixed", "chunk_tokens": 1, "load": 0.8}
    return {**cell, "policy": policy, "ttft_mean_s": mean_s, "ttft_p99_s": 2 * mean_s}


def test_panels_of_a_row_have_one_scale_and_policies_their_colour():
    rows = [
        *(ttft_row("eta", "paper-3k", 0.4), ttft_row("sbs", "paper-3k", 0.3)),
        *(ttft_row("sbs", "paper-long", 5.0), ttft_row("eta", "paper-long", 7.0)),
    ]
    figure = plots.ttft_by_load(rows)
    mean, other_mean, p99, other_p99 = figure.axes
    assert mean.get_ylim() == other_mean.get_ylim() != p99.get_ylim() == other_p99.get_ylim()
    assert "in s" in mean.get_ylabel()
    for axis in figure.axes:
        for line in axis.lines:
            assert line.get_color() == LOOKS[line.get_label()].colour


def test_a_page_fits_a_phone_and_the_dark_and_says_what_policies_do(tmp_path):
    write_page(tmp_path / "p.html", "x", [policies_table(["sbs", "eta", "sbs"])])
    text = (tmp_path / "p.html").read_text()
    assert '<meta name="viewport" content="width=device-width' in text
    assert "prefers-color-scheme: dark" in text
    assert text.count(LOOKS["sbs"].words) == text.count(LOOKS["eta"].words) == 1
