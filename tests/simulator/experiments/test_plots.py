"""Pictures can be drawn from what runs return."""

from __future__ import annotations

import pytest

from sglang_sbs.simulator.experiments import plots
from sglang_sbs.simulator.experiments.page import Picture, policies_table, write_page
from sglang_sbs.simulator.experiments.policy_looks import LOOKS
from sglang_sbs.simulator.experiments.tables import ResultTable


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


def test_the_legend_and_the_rates_are_beside_the_data():
    plan = [
        {"policy": p, "prefill_instances": n, "chunk_tokens": 1}
        | dict.fromkeys(("max_qps", "max_qps_least", "max_qps_most"), 9.0 * n)
        for p in ("sbs", "eta")
        for n in (1, 2)
    ]
    capacity = [
        ttft_row(p, "paper-3k", 1) | {"max_qps": 9, "slo_ttft_s": 1} for p in ("sbs", "eta")
    ]
    ttft = [ttft_row(p, "paper-3k", 0.4) for p in ("sbs", "eta")]
    for figure in (
        plots.ttft_by_load(ttft),
        plots.capacity_by_chunk(capacity),
        plots.capacity_by_instances(plan, [("now", 5.0)], 0.8),
    ):
        figure.canvas.draw()
        (legend,) = figure.legends
        texts = [text for axis in figure.axes for text in axis.texts]
        assert all(axis.get_legend() is None for axis in figure.axes)
        for axis in figure.axes:
            for beside in (legend, *texts):
                assert not beside.get_window_extent().overlaps(axis.get_window_extent())
