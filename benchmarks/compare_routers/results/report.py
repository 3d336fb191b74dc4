"""The report of a comparison: JSON, Markdown, and a page with a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import json, structs

from benchmarks.compare_routers.results import ratios
from benchmarks.compare_routers.results.rows import NOT_RUN, Header, Row, figures
from benchmarks.compare_routers.results.tables import (
    AGENTS_LEGEND,
    LEGEND,
    RATIO_LEGEND,
    agents_table,
    cell_tables,
    error_table,
    ratio_table,
)
from benchmarks.compare_routers.results.verdict import sentences
from sglang_sbs.console.extras import without_matplotlib
from sglang_sbs.simulator.experiments.page import Part, Picture, write_page
from sglang_sbs.simulator.experiments.policy_looks import colours_of
from sglang_sbs.simulator.experiments.tables import ResultTable

_IN_JSON = (
    *("requests", "begun", "revision", "qps", "host_lag_ms", "most_host_lag_ms", "stalled_s"),
    *(
        "cpu_ms_per_request",
        "tokens_per_s",
        "computed_over_optimum",
        "silent",
        "answers",
        "engines",
    ),
)
"""Fields of a row that ``--json`` has beside those of its key."""


def summary(header: Header, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the content of ``--json``. Ratios are ours over the best peer; ``null`` where not
    measured.

    ``failed_requests`` are those of SBS; the peers' are beside them.
    """
    return {
        "verdict": sentences(rows),
        "cells": ratios.ratio_cells(rows),
        "failed_requests": ratios.failed_requests(rows, ratios.is_sbs),
        "peer_failed_requests": ratios.failed_requests(rows, ratios.is_peer),
        "not_compared": ratios.errors(rows),
        "peers_by_mean_ttft": ratios.ranking(rows),
        "own_by_mean_ttft": ratios.ranking(rows, ratios.is_immediate),
        "settings": header.settings,
        "machine": header.machine,
        "begun": header.begun,
        "rows": [_figures(row) for row in figures(rows)],
    }


def _figures(row: Row) -> dict[str, Any]:
    return structs.asdict(row.key) | {name: getattr(row, name) for name in _IN_JSON}


def write_json(header: Header, rows: Sequence[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(json.format(json.encode(summary(header, rows))) + b"\n")


def facts_of(header: Header, rows: Sequence[Row]) -> list[tuple[str, str]]:
    facts = [("begun", header.begun)]
    facts += [(name, f"{value}") for name, value in header.machine.items()]
    facts += [(name.replace("_", " "), f"{value}") for name, value in header.settings.items()]
    revisions = sorted({row.revision for row in rows if row.revision})
    if revisions:
        facts = [fact for fact in facts if fact[0] != "revision"]
        facts.append(("revision", ", ".join(revisions)))
    minutes = math.fsum(row.wall_s for row in rows) / 60
    lags_ms = sorted(row.host_lag_ms for row in figures(rows)) or [0.0]
    lag_ms, worst_ms = lags_ms[len(lags_ms) // 2], lags_ms[-1]
    failed = [ratios.failed_requests(rows, belongs) for belongs in (ratios.is_sbs, ratios.is_peer)]
    silent = [row for row in figures(rows) if row.silent]
    if silent:
        names = sorted({name for row in silent for name in row.silent})
        facts.append(("no EndForward", f"of {', '.join(names)} in {len(silent)} runs"))
    disturbed = ratios.disturbed_runs(rows)
    if disturbed:
        facts.append(("thrown away", ", ".join(disturbed)))
    return [
        *facts,
        ("host lag", f"{lag_ms:.0f} ms in the median run, {worst_ms:.0f} ms in the worst"),
        ("runs", f"{sum(row.error != NOT_RUN for row in rows)}, {minutes:.0f} minutes"),
        ("failed requests", f"{failed[0]} of SBS, {failed[1]} of peers"),
    ]


def _markdown(part: str | ResultTable) -> list[str]:
    if isinstance(part, str):
        return [part, ""]
    heads = [f"## {part.title}", "", f"| {' | '.join(part.columns)} |"]
    cells = ([word.replace("|", "\\|") for word in row] for row in part.rows)
    rows = [f"| {' | '.join(row)} |" for row in cells]
    return [*heads, "|" + "---|" * len(part.columns), *rows, ""]


def write_report(header: Header, rows: Sequence[Row], directory: Path) -> None:
    """``report.md`` and ``report.html``: verdict, tables, and how it was measured. The page also
    has a picture, where matplotlib is installed."""
    directory.mkdir(parents=True, exist_ok=True)
    facts, failures = facts_of(header, rows), error_table(rows)
    texts: list[str | ResultTable] = [*sentences(rows), ratio_table(rows), RATIO_LEGEND]
    agents = agents_table(rows)
    texts += [] if agents is None else [agents, AGENTS_LEGEND]
    texts += [*cell_tables(rows), *([] if failures is None else [failures])]
    lines = ["# Routers compared", ""]
    for text in (*texts, LEGEND):
        lines += _markdown(text)
    lines += ["## How it was measured", "", *(f"- {name}: {value}" for name, value in facts), ""]
    (directory / "report.md").write_text("\n".join(lines), encoding="utf-8")
    parts: list[Part] = [*texts]
    if (png := ttft_by_load(rows)) is not None:
        parts.append(Picture("TTFT by load", png))
    parts += [LEGEND, ResultTable("How it was measured", ["", ""], [[*fact] for fact in facts])]
    write_page(directory / "report.html", "Routers compared on one SGLang cluster", parts)


def ttft_by_load(rows: Sequence[Row]) -> bytes | None:
    """Mean and p99 TTFT of each contender by load, or bars where there is one load, as PNG.
    ``None`` without matplotlib or cells."""
    cells = ratios.cells_of(rows)
    if not cells or without_matplotlib() is not None:
        return None
    from sglang_sbs.simulator.experiments import plots

    workloads = list(dict.fromkeys(workload for workload, _ in cells))
    colours = colours_of(ratios.in_order(row.key.policy for row in rows))
    figure, axes = plots.panels(len(workloads), 2, 7, 4)
    for number, axis in enumerate(axes):
        workload, name = workloads[number // 2], ("mean", "p99")[number % 2]
        points: dict[str, dict[float, float]] = {}
        for (other, load), mine in cells.items():
            for policy in ratios.in_order(row.key.policy for row in mine if other == workload):
                of = [row.answers for row in mine if row.key.policy == policy and row.answers]
                times_s = [getattr(answers.ttft_ms, name) / 1e3 for answers in of]
                points.setdefault(policy, {})[load] = math.fsum(times_s) / len(times_s)
        if len({load for by_load in points.values() for load in by_load}) == 1:
            heights = [by_load.popitem()[1] for by_load in points.values()]
            axis.barh(list(points), heights, color=[colours[policy] for policy in points])
            axis.invert_yaxis()
            axis.set_xlabel(f"{name} TTFT in s")
        else:
            for policy, by_load in points.items():
                axis.plot(
                    [*by_load], [*by_load.values()], "o-", label=policy, color=colours[policy]
                )
            axis.set_xlabel("load (share of full-chunk capacity)")
            axis.set_ylabel(f"{name} TTFT in s")
            axis.set_yscale("log")
            axis.legend(fontsize=7)
        axis.set_title(workload)
    return plots.png_of(figure)
