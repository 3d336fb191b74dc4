"""Figures of ``docs/results.md`` and ``docs/is-it-for-me.md`` are the newest of the laboratory, and
those of the README and of the plots are the pages'.

A laboratory page is read from its beginning, and the last match is the newest run. Whoever adds a
run below an older one has to change the page that quotes it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_commands import ROOT

from sglang_sbs.scheduling.decode import rules
from tools.site import plots

DOCS = ROOT / "docs"
QUOTED = {
    "cells of the matrix": (
        "lab/simulations.md",
        r"of (226) cells (\d+) are not lost|(\d+) of (226) cells are not lost",
        "results.md",
        r"\| all regimes[^|]*\| (\d+) \| (\d+) \|",
    ),
    "losses among other rivals": (
        "lab/arrangements.md",
        r"(?i)(\w+) (?:cells )?of (?:the )?(40) (?:runs|are lost)",
        "results.md",
        r"\[(\w+) of (\d+) cells are lost\]",
    ),
    "short requests, sbs": (
        "lab/relay.md",
        r"\| ours, sbs \| (\d+) \(\d+\.\.\d+\) \| [\d,]+ \(",
        "results.md",
        r"(\d+) µs with `sbs`",
    ),
    "short requests, Rust": (
        "lab/relay.md",
        r"\| Rust \| (\d+) \(\d+\.\.\d+\) \| [\d,]+ \(",
        "results.md",
        r"against (\d+) µs",
    ),
    "short requests since the other server": (
        "lab/relay.md",
        r"CPU µs per short request \(quiet[^|]*\|[^|]*\|[^|]*\| 1\.(\d+) times",
        "results.md",
        r"takes (\d+) % more CPU",
    ),
    "sbs against eta in the router's CPU": (
        "lab/relay.md",
        r"\| blocks of 64 tokens, [^|]*\|[^|]*\|[^|]*\| \*\*([\d.]+)\*\*",
        "is-it-for-me.md",
        r"`sbs` instead of `eta` \| ([\d.]+)x",
    ),
    "two ranks": (
        "lab/compare-routers.md",
        r"751`\) \|.*?\*\*([\d.]+), ([\d.]+)\*\*"
        r"|\| 2, 0\.61 s \|[^|]*\| \*{0,2}([\d.]+), ([\d.]+)\*{0,2} \|",
        "is-it-for-me.md",
        r"\| two DP ranks[^|]*\| 0\.634 \| ([\d.]+)x \| ([\d.]+)x",
    ),
    "the README's headline": (
        "results.md",
        r"\| 0\.634 \| `smg:round_robin` \| ([\d.]+)x",
        "../README.md",
        r"mean TTFT is\s\*\*([\d.]+)x\*\*",
    ),
    "the README's eight ranks": (
        "results.md",
        r"\| 8, as in the paper \| 5 s \| 0\.634 \| ([\d.]+)x, [^|;]*, ([\d.]+)x;",
        "../README.md",
        r"\| 8, as in the paper[^|]* \| [^|]* \| ([\d.]+)x to ([\d.]+)x \|",
    ),
    "the README's CPU per short request": (
        "results.md",
        r"(\d+) µs with `sbs`.*?against (\d+) µs",
        "../README.md",
        r"\((\d+) against\s(\d+) µs;",
    ),
    "the README's CPU per chunk": (
        "results.md",
        r"\| ours, `sbs` \| ([\d.]+) [^\n]*\n\| `sglang_router` 0\.3\.2 \(Rust\) \| ([\d.]+) ",
        "../README.md",
        r"\(([\d.]+) against ([\d.]+) µs\)",
    ),
    "a latency of two thirds of a pass at load 1.2": (
        "lab/simulations.md",
        r"\| 200 ms \|.*\n\| \| now \|.*\| ([\d.]+) / ([\d.]+) \|\n",
        "is-it-for-me.md",
        r"\| network latency of two thirds.*?([\d.]+)x \|[^|]*?([\d.]+)x \| the same",
    ),
}


@pytest.mark.parametrize("name", QUOTED)
def test_a_quoted_figure_is_the_newest_of_the_laboratory(name: str) -> None:
    lab, measured, page, quoted = QUOTED[name]
    runs = re.findall(measured, (DOCS / lab).read_text())
    assert runs, f"{lab} has no figure of this kind any more: {measured}"
    printed = re.findall(quoted, (DOCS / page).read_text())
    assert len(printed) == 1, f"{page}: {quoted}"
    assert figures(printed[0]) == figures(runs[-1]), f"{page} quotes an older run of {lab}"


@pytest.mark.parametrize("name", plots.PLOTS)
def test_a_plot_shows_the_figures_of_its_page(name: str) -> None:
    shown = plots.figures_in(plots.IMAGES / f"{name}.png")
    assert shown == plots.PLOTS[name].read(), f"run scripts/draw-results {name}"


def test_a_plot_can_be_drawn_again(tmp_path: Path) -> None:
    path = plots.draw("ttft-by-load", tmp_path)
    assert plots.figures_in(path)["load"] == [0.2, 0.4, 0.634, 0.8, 1.1]


def figures(match: str | tuple[str, ...]) -> set[str]:
    """Return the text of a pattern's groups, in any order."""
    return {group.lower() for group in ([match] if isinstance(match, str) else match) if group}


def test_the_simulator_s_fidelity_covers_every_run() -> None:
    section = (DOCS / "lab/simulations.md").read_text().partition("## How true it is")[2]
    table, _, load_9 = section.partition("At load 0.9")
    at_06 = [float(x) for x in re.findall(r"\| ([\d.]+) \(", table)]
    at_09 = [float(x) for x in re.findall(r"\d\.\d+", load_9.partition(":")[2])[:3]]
    page = (DOCS / "results.md").read_text()
    stated = re.search(r"(\S+)x to (\S+)x at load 0\.6, (\S+)x to (\S+)x at load 0\.9", page)
    assert stated is not None
    ends = [min(at_06), max(at_06), min(at_09), max(at_09)]
    assert [float(x) for x in stated.groups()] == ends


def test_the_potential_has_the_weights_of_the_code() -> None:
    page = (DOCS / "scheduling.md").read_text()
    ((of_b, of_k),) = re.findall(r"exp\((\d+) \(B - mean\)\) \+ (\d+) exp\(K - mean\)", page)
    assert (float(of_b), float(of_k)) == (1 / rules._B_TEMPERATURE, rules._KV_EMPHASIS)


def test_ratios_have_one_notation() -> None:
    """``0.55x``: not ``0.55 x``, ``0.55 times`` or ``55 %``."""
    odd = re.compile(r"\d\.\d+ (?:x\b|times\b)")
    guides = ("results.md", "is-it-for-me.md", "your-traffic.md", "roll-out.md", "how-it-works.md")
    found = [(name, ratio) for name in guides for ratio in odd.findall((DOCS / name).read_text())]
    assert found == []
