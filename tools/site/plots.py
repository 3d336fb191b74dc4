"""The plots of the documentation, drawn from the pages' own tables: ``scripts/draw-results``.

A picture carries the figures it shows, so that a test can compare them with the page.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_sbs.simulator.experiments.policy_looks import LOOKS, colours_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
IMAGES = DOCS / "images"
_RATIO = re.compile(r"(\d+\.\d+)x")
_GREY = "#777777"
_SBS, _ETA = LOOKS["sbs"].colour, LOOKS["eta"].colour

Data = dict[str, list[Any]]


class Plot(NamedTuple):
    read: Callable[[], Data]
    draw: Callable[[Any, Data], None]
    size: tuple[float, float]
    """Inches."""


def rows_below(page: str, heading: str, number: int = 0) -> list[list[str]]:
    """The cells of a page's ``number``-th table below a heading, without the table's head.
    Raises: ValueError, there is none."""
    _, found, text = (DOCS / page).read_text().partition(f"\n## {heading}\n")
    section = text.partition("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\|\n)+", section + "\n", re.MULTILINE)
    if not found or len(tables) <= number:
        raise ValueError(f"docs/{page} has no table {number} below {heading!r}")
    lines = tables[number].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def ratios(cell: str) -> list[float]:
    """Every ratio such as 0.55x in a cell."""
    return [float(found) for found in _RATIO.findall(cell)]


# Against other routers, by load -------------------------------------------------------------------


def _by_load() -> Data:
    data: Data = {name: [] for name in ("load", "mean", "p99", "eta mean", "eta p99")}
    for load, _, *cells in rows_below("results.md", "Against other routers"):
        for name, value in zip(data, (float(load), *(ratios(c)[0] for c in cells)), strict=True):
            data[name].append(value)
    return data


def _draw_by_load(axes: Any, data: Data) -> None:
    looks = {
        "mean": (_SBS, "o-", "mean, best other router = 1"),
        "p99": (_SBS, "s:", "p99, best other router = 1"),
        "eta mean": (_ETA, "o-", "mean, eta = 1"),
        "eta p99": (_ETA, "s:", "p99, eta = 1"),
    }
    for name, (colour, line, label) in looks.items():
        axes.plot(data["load"], data[name], line, color=colour, label=label)
    axes.axhline(1, color=_GREY, linewidth=1)
    axes.set_xlabel("load (share of what full chunks compute)")
    axes.set_ylabel("TTFT of sbs (below 1: faster)")
    axes.set_ylim(0.4, 1.15)
    axes.legend(loc="lower left", fontsize=9, ncols=2, frameon=False)
    axes.set_title(
        "3 prefill + 1 decode instance, 2 DP ranks each; real engines on CPU", fontsize=10
    )


# Policies by load, simulated ----------------------------------------------------------------------


def _policies() -> Data:
    rows = rows_below("results.md", "What holding adds with more ranks", 1)
    data: Data = {"load": [0.4, 0.8, 1.0]}
    for name, *cells in rows:
        policy = re.findall(r"`(\w+)`", name)[0]
        data[policy] = [[float(part) for part in cell.split("/")] for cell in cells]
    return data


def _draw_policies(axes: Any, data: Data) -> None:
    for policy, pairs in data.items():
        if policy == "load":
            continue
        colour = LOOKS[policy].colour
        axes.plot(data["load"], [mean for mean, _ in pairs], "o-", color=colour, label=policy)
        axes.plot(data["load"], [p99 for _, p99 in pairs], "s:", color=colour)
    axes.set_xlabel("load (1.0: peak of the paper's baseline)")
    axes.set_ylabel("TTFT in seconds (mean —, p99 ···)")
    axes.set_ylim(0)
    axes.legend(loc="upper left", fontsize=9, frameon=False)
    axes.set_title("Simulated: 3 prefill instances of 8 DP ranks", fontsize=10)


# More ranks ---------------------------------------------------------------------------------------


def _by_ranks() -> Data:
    data: Data = {"label": [], "mean": [], "p99": []}
    for ranks, a_pass, load, mean, p99 in rows_below(
        "results.md", "What holding adds with more ranks"
    ):
        if ratios(mean):
            first = ranks.partition(",")[0]
            data["label"].append(f"{first} ranks, load {load},\npass {a_pass}")
            data["mean"].append(ratios(mean))
            data["p99"].append(ratios(p99))
    return data


def _draw_by_ranks(axes: Any, data: Data) -> None:
    axes.axvspan(0.9, 1.1, color="#dddddd", alpha=0.6, linewidth=0, label="noise of three seeds")
    axes.axvline(1, color=_GREY, linewidth=1)
    for row, (mean, p99) in enumerate(zip(data["mean"], data["p99"], strict=True)):
        dots = {"color": _SBS, "alpha": 0.8, "zorder": 3}
        axes.scatter(mean, [row - 0.12] * len(mean), label="mean" if not row else None, **dots)
        axes.scatter(
            p99, [row + 0.12] * len(p99), marker="s", facecolors="none", edgecolors=_SBS,
            label="p99" if not row else None, zorder=3,
        )  # fmt: skip
    axes.set_yticks(range(len(data["label"])), data["label"], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0.7, 1.13)
    axes.set_xlabel("TTFT of sbs / eta, one mark per run; below 1 is faster")
    axes.legend(loc="lower left", fontsize=9, frameon=False)


# Known losses -------------------------------------------------------------------------------------


def _losses() -> Data:
    data: Data = {"label": [], "mean": [], "p99": []}
    for situation, load, mean, p99, _ in rows_below("is-it-for-me.md", "Known losses"):
        words = situation.partition(" (")[0].replace("`", "")
        data["label"].append(f"{words} ({load})")
        data["mean"].append(ratios(mean))
        data["p99"].append(ratios(p99))
    return data


def _draw_losses(axes: Any, data: Data) -> None:
    axes.axvspan(0, 1, color=_SBS, alpha=0.08, linewidth=0)
    axes.axvline(1, color=_GREY, linewidth=1)
    for row in range(len(data["label"])):
        for kind, shift, line in (("mean", -0.15, "o-"), ("p99", 0.15, "s:")):
            values = data[kind][row]
            if values:
                label = kind if not row else None
                colour = "#c0392b" if kind == "mean" else "#e59866"
                ends = [min(values), max(values)]
                axes.plot(ends, [row + shift] * 2, line, color=colour, label=label, markersize=5)
    axes.set_yticks(range(len(data["label"])), data["label"], fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlabel("TTFT of sbs / eta (load in parentheses)")
    axes.legend(loc="lower right", fontsize=9, frameon=False)


# What the router costs ----------------------------------------------------------------------------


def _relay() -> Data:
    rows = rows_below("results.md", "What the router costs")
    names = [re.sub(r"[`*]", "", name) for name, *_ in rows]
    return {"name": names, "chunk": [float(cells[0]) for _, *cells in rows]}


def _draw_relay(axes: Any, data: Data) -> None:
    names = [name.removeprefix("ours, ") for name in data["name"]]
    bars = axes.barh(data["name"], data["chunk"], color=list(colours_of(names).values()))
    axes.bar_label(bars, fmt=" %.1f", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("CPU µs per streamed chunk, 50 streams")


# What the gain is made of -------------------------------------------------------------------------


def _gain() -> Data:
    by_load = _by_load()
    pairs = list(zip(by_load["mean"], by_load["eta mean"], strict=True))
    return {
        "load": by_load["load"],
        "predicting": [round(1 - ratio / to_eta, 4) for ratio, to_eta in pairs],
        "holding": [round(ratio / to_eta - ratio, 4) for ratio, to_eta in pairs],
    }


def _draw_gain(axes: Any, data: Data) -> None:
    names = [f"{load:g}" for load in data["load"]]
    axes.bar(names, data["predicting"], 0.6, color=_ETA, label="choosing by predicted finish (eta)")
    axes.bar(
        names, data["holding"], 0.6, bottom=data["predicting"], color=_SBS, label="holding (sbs)"
    )
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlabel("load (share of what full chunks compute)")
    axes.set_ylabel("less mean TTFT")
    axes.legend(loc="upper left", fontsize=9, frameon=False)
    axes.set_title("Mean TTFT below that of the best other router, 2 DP ranks", fontsize=10)


# The paper's claims -------------------------------------------------------------------------------

_CLAIMS = (
    ("max QPS, 3K", "max QPS per instance, 3K", 1, -1),
    ("max QPS, 5K", "5K, 1.0 s", 1, -1),
    ("QPS gain, 3K", "QPS gain", 0, 0),
    ("QPS gain, 5K", "QPS gain", 1, 1),
    ("chunk utilisation, 3K", "chunk utilisation", 1, -1),
    ("decode tokens/s over skewed", "decode tokens/s", 0, 0),
)
"""A label, how its row begins, and which figure of a cell it is: of the paper's, of the others'."""
_INTERVAL = re.compile(r"(\d+\.\d+) ± (\d+\.\d+)")


def _claims() -> Data:
    data: Data = {name: [] for name in ("label", "rule", "sbs")}
    rows = rows_below("results.md", "The paper's claims")
    for label, begins, of_paper, of_ours in _CLAIMS:
        (cells,) = [cells for cells in rows if cells[0].startswith(begins)]
        paper = float(re.findall(r"\d+(?:\.\d+)?", cells[1])[of_paper])
        data["label"].append(label)
        for name, cell in (("rule", cells[2]), ("sbs", cells[3])):
            found = _INTERVAL.findall(cell.replace("*", ""))
            mean, interval = map(float, found[of_ours])
            data[name].append([round(mean / paper, 3), round(interval / paper, 3)])
    return data


def _draw_claims(axes: Any, data: Data) -> None:
    axes.axvline(1, color=_GREY, linewidth=1, label="the paper")
    looks = (("rule", LOOKS["sbs_paper"].colour, -0.13), ("sbs", _SBS, 0.13))
    for name, colour, shift in looks:
        means, intervals = zip(*data[name], strict=True)
        rows = [row + shift for row in range(len(means))]
        label = "the paper's rule, simulated" if name == "rule" else "sbs, simulated"
        axes.errorbar(means, rows, xerr=intervals, fmt="o", color=colour, capsize=3, label=label)
    axes.set_yticks(range(len(data["label"])), data["label"], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("figure / the paper's figure, with 95 % interval of three seeds")
    axes.legend(loc="upper right", fontsize=9, frameon=False)


# Chunk --------------------------------------------------------------------------------------------


def _chunk() -> Data:
    rows = rows_below("tuning.md", "Chunk")
    data: Data = {"chunk": [int(chunk) for chunk, *_ in rows]}
    for column, load in enumerate(("load 0.6", "load 1.0"), start=1):
        data[load] = [[float(part) for part in row[column].split("/")] for row in rows]
    return data


def _draw_chunk(axes: Any, data: Data) -> None:
    for load, colour in (("load 0.6", LOOKS["sbs_basic"].colour), ("load 1.0", _SBS)):
        means, p99s = zip(*data[load], strict=True)
        axes.plot(data["chunk"], means, "o-", color=colour, label=f"mean, {load}")
        axes.plot(data["chunk"], p99s, "s:", color=colour, label=f"p99, {load}")
    axes.set_xticks(data["chunk"])
    axes.set_ylim(0)
    axes.set_xlabel("chunk per DP rank, tokens (prompts of up to 3K)")
    axes.set_ylabel("TTFT of sbs in seconds")
    axes.legend(fontsize=9, frameon=False)


# Queue limits -------------------------------------------------------------------------------------


def _limits() -> Data:
    data: Data = {"limit": [], "ttft": [], "refused": []}
    for limit, ttft, refused in rows_below("tuning.md", "Queue limits"):
        data["limit"].append(limit)
        data["ttft"].append([float(part) for part in ttft.split("/")])
        data["refused"].append(int(refused.removesuffix(" %")))
    return data


def _draw_limits(axes: Any, data: Data) -> None:
    for row, (mean, p99) in enumerate(data["ttft"]):
        axes.plot([mean, p99], [row, row], ":", color=_SBS)
        axes.plot(mean, row, "o", color=_SBS, label=None if row else "mean")
        axes.plot(p99, row, "s", color=_SBS, mfc="none", label=None if row else "p99")
        axes.text(p99 + 0.15, row, f"{data['refused'][row]} % refused", va="center", fontsize=9)
    axes.set_yticks(range(len(data["limit"])), data["limit"], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(p99 for _, p99 in data["ttft"]) * 1.2)
    axes.set_xlabel("TTFT of sbs in seconds at load 1.4, simulated")
    axes.legend(loc="upper right", fontsize=9, frameon=False)


# Faults -------------------------------------------------------------------------------------------

_FAULTS = {
    "a prefill instance is killed": LOOKS["sbs"].colour,
    "the decode instance is killed": LOOKS["random_rank"].colour,
    "the decode instance stops for 5 s": LOOKS["eta"].colour,
    "the scheduler is killed": LOOKS["sbs_paper"].colour,
}
"""Columns of the table, and a colour for each."""


def _faults() -> Data:
    data: Data = {name: [] for name in ("from", *_FAULTS)}
    for from_s, *cells in rows_below("lab/faults.md", "TTFT around a fault"):
        data["from"].append(float(from_s))
        for name, cell in zip(_FAULTS, cells, strict=True):
            seconds, failed = re.match(r"\d+\.\d+", cell), re.search(r"(\d+) failed", cell)
            ttft_s = float(seconds[0]) if seconds else None
            data[name].append([ttft_s, int(failed[1]) if failed else 0])
    return data


def _draw_faults(axes: Any, data: Data) -> None:
    middles = [from_s + 1 for from_s in data["from"]]
    for name, colour in _FAULTS.items():
        ttfts = [math.nan if ttft_s is None else ttft_s for ttft_s, _ in data[name]]
        axes.plot(middles, ttfts, "o-", color=colour, markersize=4, label=name)
        lost = [at for at, (_, failed) in zip(middles, data[name], strict=True) if failed]
        axes.plot(lost, [0.1] * len(lost), "x", color=colour)
    axes.axvline(0, color=_GREY, linewidth=1)
    axes.plot([], [], "x", color=_GREY, label="some requests failed")
    axes.set_ylim(0)
    axes.set_xlabel("seconds since the fault, when the request was sent")
    axes.set_ylabel("longest TTFT in seconds")
    axes.legend(fontsize=9, frameon=False)


# Decode -------------------------------------------------------------------------------------------


def _decode() -> Data:
    data: Data = {"name": [], "band": []}
    for name, band, *_ in rows_below("results.md", "Decode"):
        if found := re.fullmatch(r"(\d+)-(\d+)K", band):
            data["name"].append(name.replace("`", ""))
            data["band"].append([int(found[1]), int(found[2])])
    return data


def _draw_decode(axes: Any, data: Data) -> None:
    looks = ("round_robin", "sbs_paper", "sbs")
    for row, (least, most) in enumerate(data["band"]):
        axes.barh(row, most - least, left=least, height=0.5, color=LOOKS[looks[row]].colour)
        axes.text(most + 1, row, f"{least}-{most}K", va="center", fontsize=9)
    axes.set_yticks(range(len(data["name"])), data["name"], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 130)
    axes.set_xlabel("KV tokens per rank, thousands: mean - / + 1 standard deviation")


PLOTS: dict[str, Plot] = {
    "ttft-by-load": Plot(_by_load, _draw_by_load, (7.2, 3.4)),
    "ttft-by-policy": Plot(_policies, _draw_policies, (7.2, 3.6)),
    "ttft-by-ranks": Plot(_by_ranks, _draw_by_ranks, (7.2, 3.2)),
    "known-losses": Plot(_losses, _draw_losses, (8.4, 5.6)),
    "relay-cost": Plot(_relay, _draw_relay, (7.2, 1.9)),
    "gain-parts": Plot(_gain, _draw_gain, (7.2, 3.0)),
    "paper-claims": Plot(_claims, _draw_claims, (7.2, 3.0)),
    "chunk": Plot(_chunk, _draw_chunk, (7.2, 3.0)),
    "queue-limits": Plot(_limits, _draw_limits, (7.2, 3.0)),
    "faults": Plot(_faults, _draw_faults, (7.2, 3.2)),
    "decode-band": Plot(_decode, _draw_decode, (7.2, 1.8)),
}


def draw(name: str, folder: Path) -> Path:
    """Draw one plot; its figures are in the picture's text ``Data``."""
    from matplotlib.figure import Figure

    plot = PLOTS[name]
    data = plot.read()
    figure = Figure(figsize=plot.size, layout="constrained")
    axes = figure.subplots()
    plot.draw(axes, data)
    axes.grid(axis="both", color="#eeeeee")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=150, metadata={"Data": json.dumps(data), "Software": None})
    return path


def figures_in(path: Path) -> Data:
    """Return the figures of a picture."""
    from PIL import Image

    with Image.open(path) as picture:
        found: Data = json.loads(picture.text["Data"])  # type: ignore[attr-defined]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/draw-results",
        description="Draw the plots of docs/ from the tables of its pages.",
        epilog="example: scripts/draw-results ttft-by-load",
    )
    parser.add_argument("plots", nargs="*", metavar="PLOT", help=f"of {', '.join(PLOTS)}; or all")
    args = parser.parse_args(argv)
    if unknown := set(args.plots) - PLOTS.keys():
        parser.error(f"no plot {', '.join(sorted(unknown))}")
    for name in args.plots or PLOTS:
        print(f"written: {draw(name, IMAGES)}")
    return 0
