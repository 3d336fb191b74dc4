"""The report of a comparison: JSON and Markdown.

Owns the files. Must not know how rows are made; tables are made elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks.compare_routers.results import ratios
from benchmarks.compare_routers.results.rows import NOT_RUN, Header, Row, figures
from benchmarks.compare_routers.results.search import best_peer, qps_ratio, searches
from benchmarks.compare_routers.results.tables import (
    LEGEND,
    Table,
    agents_table,
    capacity_table,
    cell_tables,
    error_table,
    ratio_table,
)
from benchmarks.compare_routers.results.verdict import sentences


def summary(header: Header, rows: Sequence[Row]) -> dict[str, Any]:
    """What ``--json`` writes. Ratios are ours over the best peer; ``null`` where not measured.

    ``max_qps_ratio`` is ``null`` too where the search of either side did not finish or has only a
    bound (``max_qps_is_bound``); low and high are over its seeds. ``failed_requests`` are those of
    SBS, as peers' failures are no fault of it; the peers' are beside it.
    """
    slo_ttft_s = header.settings["slo_ttft_s"]
    found = searches(rows, slo_ttft_s)
    over = {name: qps_ratio(found, name) for name in found if ratios.is_sbs(name)}
    known = [one for one in over.values() if one is not None]
    ratio = over["sbs"] if "sbs" in over else max(known, key=lambda one: one.mean, default=None)
    return {
        "verdict": sentences(rows),
        "cells": ratios.ratio_cells(rows),
        "max_qps_ratio": None if ratio is None else ratio.mean,
        "max_qps_ratio_low": None if ratio is None else ratio.low,
        "max_qps_ratio_high": None if ratio is None else ratio.high,
        "max_qps_ratios": {name: None if one is None else one.mean for name, one in over.items()},
        "max_qps_peer": best_peer(found),
        "max_qps": {name: one.found.qps for name, one in found.items()},
        "max_qps_is_bound": [name for name, one in found.items() if not one.known],
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
    answers, engines = row.answers, row.engines
    assert answers is not None
    assert engines is not None
    key = row.key
    return {
        "kind": key.kind,
        "workload": key.workload,
        "load": key.load,
        "seed": key.seed,
        "policy": key.policy,
        "requests": row.requests,
        "begun": row.begun,
        "revision": row.revision,
        "qps": row.qps,
        "host_lag_ms": row.host_lag_ms,
        "most_host_lag_ms": row.most_host_lag_ms,
        "stalled_s": row.stalled_s,
        "cpu_ms_per_request": row.cpu_ms_per_request,
        "tokens_per_s": row.tokens_per_s,
        "computed_over_optimum": row.computed_over_optimum,
        "silent": row.silent,
        "answers": answers,
        "engines": engines,
    }


def write_json(header: Header, rows: Sequence[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        orjson.dumps(summary(header, rows), default=_builtins, option=orjson.OPT_INDENT_2) + b"\n"
    )


def _builtins(value: Any) -> Any:
    return {name: getattr(value, name) for name in value.__struct_fields__}


def tables_of(header: Header, rows: Sequence[Row]) -> list[Table]:
    """All of them, the ratios first."""
    slo_ttft_s = header.settings["slo_ttft_s"]
    found = [
        ratio_table(rows),
        capacity_table(rows, slo_ttft_s),
        agents_table(rows),
        *cell_tables(rows),
        error_table(rows),
    ]
    return [table for table in found if table is not None]


def facts_of(header: Header, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What the reader must know of the run."""
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
    failed = [ratios.failed_requests(rows, one) for one in (ratios.is_sbs, ratios.is_peer)]
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


def _escaped(word: str) -> str:
    return word.replace("|", "\\|")


def write_report(header: Header, rows: Sequence[Row], directory: Path) -> None:
    """``report.md``: verdict, tables, and how it was measured."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = ["# Routers compared", ""]
    lines += [line for sentence in sentences(rows) for line in (sentence, "")]
    for table in tables_of(header, rows):
        lines += [f"## {table.title}", ""]
        lines += ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
        lines += ["| " + " | ".join(map(_escaped, row)) + " |" for row in table.rows]
        lines += ["", *([table.note, ""] if table.note else [])]
    lines += [LEGEND, "", "## How it was measured", ""]
    lines += [*(f"- {name}: {value}" for name, value in facts_of(header, rows)), ""]
    (directory / "report.md").write_text("\n".join(lines), encoding="utf-8")
