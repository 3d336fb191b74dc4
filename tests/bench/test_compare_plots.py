"""The pictures of `scripts/compare-routers`: who has a colour, and what a point says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.compare_routers.contenders import FIELD
from benchmarks.compare_routers.results import plots
from benchmarks.compare_routers.results.measure import Answers, Engines, KvBand, Trace
from benchmarks.compare_routers.results.ratios import in_order
from benchmarks.compare_routers.results.rows import Key, Row
from benchmarks.demo.load import Latency
from benchmarks.demo.passes import ForwardPass, PassStatistics

NAMES = [one.name for one in FIELD]


def row(
    policy: str,
    mean: float,
    load: float = 0.8,
    seed: int = 1,
    workload: str = "paper",
    trace: Trace | None = None,
) -> Row:
    one = Latency(mean, mean, 2 * mean)
    return Row(
        key=Key("cell", workload, load, seed, policy),
        client="open-loop",
        requests=100,
        answers=Answers(100, 0, [], one, one, one, 20.0),
        engines=Engines(
            PassStatistics(10, 900.0, mean / 1000, 0.9, 0.1, math.nan, 0.01),
            math.nan,
            math.nan,
            KvBand(math.nan, math.nan),
        ),
        trace=trace,
    )


def a_field() -> list[Row]:
    """All once; a few at every load and seed, of which ``mini_lb`` is the best peer."""
    rows = [row(name, 600 + 50 * number) for number, name in enumerate(NAMES)]
    for name, mean in (("sbs", 300), ("eta", 350), ("mini_lb", 500), ("smg", 700)):
        rows += [row(name, mean + 20 * seed, 0.4, seed) for seed in (1, 2, 3)]
        rows += [row(name, mean + 20 * seed, 0.8, seed) for seed in (2, 3)]
    return rows


def figures(monkeypatch: pytest.MonkeyPatch, rows: Sequence[Row]) -> list[Any]:
    """What the pictures are drawn from."""
    drawn: list[Any] = []
    real = plots._png

    def png(pyplot: Any, figure: Any) -> bytes:
        drawn.append(figure)
        return real(pyplot, figure)

    monkeypatch.setattr(plots, "_png", png)
    assert plots.pictures(rows, 1024)
    return drawn


def colours(axis: Any) -> list[str]:
    from matplotlib.colors import to_hex

    return [to_hex(one.lines[0].get_color()) for one in axis.containers]


def test_few_contenders_all_have_a_colour() -> None:
    assert plots.told_apart([row("eta", 300), row("smg", 400), row("sbs", 200)]) == [
        *("sbs", "eta", "smg")
    ]


def test_of_many_ours_and_the_best_have_one() -> None:
    names = plots.told_apart(a_field())
    assert names == ["sbs", "sbs_paper", "sbs_no_gate", "eta", "mini_lb", "smg"]
    at_one_load = plots.told_apart([one for one in a_field() if one.key.load == 0.8])
    assert len(at_one_load) == 10
    assert at_one_load == in_order(at_one_load)
    assert {"sbs", "sbs_paper", "sbs_no_gate", "eta", "mini_lb"} < set(at_one_load)


def test_a_point_is_the_mean_between_the_least_and_the_most_of_the_seeds() -> None:
    rows = [row("sbs", mean, seed=seed) for seed, mean in enumerate((200, 320, 230, math.nan))]
    rows.append(row("smg", math.nan))
    found = plots.lines_of(rows, lambda one: one.answers.ttft_ms.mean if one.answers else 0.0)
    assert found == {"sbs": [(0.8, 250.0, 200, 320)]}


def test_the_others_are_grey_and_the_legend_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ttft, *_ = figures(monkeypatch, a_field())
    (legend,) = ttft.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == [*plots.told_apart(a_field()), f"others ({len(NAMES) - 6})"]
    for axis in ttft.axes:
        assert len(axis.containers) == len(NAMES)
        found = colours(axis)
        assert len(set(found)) == 7
        assert found.count("#bfbfbf") == len(NAMES) - 6
        markers = {one.lines[0].get_marker() for one in axis.containers}
        assert len(markers) == 7
        # Where there is more than one seed.
        assert sum(one.has_yerr for one in axis.containers) == 4


def test_a_contender_looks_the_same_for_every_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(n, 300, load) for n in ("sbs", "sbs_paper", "eta", "smg") for load in (0.4, 0.8)]
    rows += [row(n, 300, load, workload="bursty") for n in ("sbs", "smg") for load in (0.4, 0.8)]
    ttft, *_ = figures(monkeypatch, rows)
    found = [colours(axis) for axis in ttft.axes]
    assert [len(one) for one in found] == [2, 2, 4, 4]
    assert all(
        bursty == [paper[0], paper[3]] for bursty, paper in zip(found, found[2:], strict=False)
    )


def test_one_load_is_bars_of_contenders_and_not_points(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(name, 300, seed=seed) for name in ("sbs", "eta") for seed in (1, 2)]
    ttft, *_ = figures(monkeypatch, rows)
    assert not ttft.legends
    for axis in ttft.axes:
        assert [text.get_text() for text in axis.get_xticklabels()] == ["sbs", "eta"]
        assert len(axis.patches) == 2 and not axis.lines
        assert axis.get_ylim()[0] == 0, "bars begin at zero"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "rows",
    [
        [row("sbs", 300)],
        [row("sbs", math.nan), row("eta", math.nan)],
        [row("sbs", 300, trace=Trace([], []))],
        [row("sbs", 300, trace=Trace([ForwardPass("p0", 1.0, 2.0, (5, 0))], [(0.0, [4])]))],
        a_field(),
    ],
    ids=["one row", "no figure", "nothing seen", "one pass", "a field"],
)
def test_whatever_there_is_is_drawn_without_a_warning(rows: list[Row]) -> None:
    for chunk_tokens in (0, 1024):
        for png in plots.pictures(rows, chunk_tokens).values():
            assert png.startswith(b"\x89PNG")


def test_nothing_is_no_picture() -> None:
    assert plots.pictures([], 0) == {}
