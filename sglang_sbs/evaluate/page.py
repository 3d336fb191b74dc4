"""Writes the page of an evaluation: result, tables, and pictures if matplotlib is installed."""

from __future__ import annotations

from pathlib import Path

from sglang_sbs.console.extras import without_matplotlib
from sglang_sbs.evaluate.verdict import Evaluation
from sglang_sbs.simulator.experiments.page import Part, Picture, policies_table, write_page
from sglang_sbs.simulator.experiments.policy_looks import colours_of


def write(path: Path, verdict: Evaluation, command: str) -> None:
    parts: list[Part] = [*verdict.sentences(), *verdict.tables()]
    if verdict.calibration is not None:
        lacking = without_matplotlib()
        parts += _pictures(verdict) if lacking is None else [f"There is no picture: {lacking}"]
    names = [*verdict.work.policies, *verdict.policies]
    write_page(path, "Evaluation of recorded traffic", [*parts, policies_table(names), command])


def _pictures(verdict: Evaluation) -> list[Part]:
    from sglang_sbs.simulator.experiments import plots

    pictures: list[Part] = []
    of_policies = verdict.policies
    if of_policies:
        colours = colours_of(of_policies)
        figure, axes = plots.panels(1, 2, 6.0, 1.2 + 0.45 * len(of_policies), sharey=True)
        for axis, what in zip(axes, ("mean", "p99"), strict=True):
            for at, (name, both) in enumerate(of_policies.items()):
                ratio = getattr(both, what)
                ends = [[ratio.ratio - ratio.low], [ratio.high - ratio.ratio]]
                axis.errorbar(ratio.ratio, at, xerr=ends, fmt="o", color=colours[name], capsize=4)
            axis.axvline(1.0, color="#888888", linewidth=1)
            axis.set_yticks(range(len(of_policies)), list(of_policies))
            axis.set_ylim(len(of_policies) - 0.5, -0.5)
            axis.set_xlabel(f"{what} TTFT relative to what ran")
            axis.grid(axis="x", alpha=0.3)
        caption = "Each policy over the recorded run (1.0), with 95 % intervals; less is better"
        pictures.append(Picture(caption, plots.png_of(figure)))
    figure, (axis,) = plots.panels(1, 1, 12.0, 3.2)
    at_s, measured_s, modelled_s = verdict.by_block()
    axis.plot(at_s, measured_s, label="measured", color="#1f77b4", linewidth=2)
    axis.plot(at_s, modelled_s, label="modelled", color="#ff7f0e", linestyle="--")
    axis.set_xlabel("seconds from the first request")
    axis.set_ylabel("mean TTFT in s")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    pictures.append(
        Picture("The recorded run, measured and modelled, by block of time", plots.png_of(figure))
    )
    return pictures
