"""The report of a comparison: JSON, Markdown, one HTML file that needs nothing else.

Owns the files. Must not know how rows are made; tables and pictures are made elsewhere.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import orjson

from benchmarks.compare_routers.results import ratios
from benchmarks.compare_routers.results.plots import pictures
from benchmarks.compare_routers.results.rows import NOT_RUN, Header, Row, figures
from benchmarks.compare_routers.results.search import best_peer, qps_ratio, searches
from benchmarks.compare_routers.results.tables import (
    LEGEND,
    Table,
    agents_table,
    capacity_table,
    cell_tables,
    day_table,
    error_table,
    ratio_table,
)
from benchmarks.compare_routers.results.verdict import sentences

BEGIN_MARK = "<!-- compare-routers: tables of a run begin -->"
END_MARK = "<!-- compare-routers: tables of a run end -->"

_PAGE = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Routers compared</title>
<style>
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1300px; padding: 0 1em }
table { border-collapse: collapse; margin: .6em 0 1.6em; font-size: 12.5px }
th, td { border-bottom: 1px solid #ccc; padding: .2em .6em; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
td.why { text-align: left; white-space: normal }
tr.better { background: #e2f4e4 } tr.worse { background: #fbe1dd }
img { max-width: 100% } p.note { color: #555 } .scroll { overflow-x: auto }
</style></head><body>
<h1>Routers compared on one SGLang cluster</h1>
{% for sentence in verdict %}
<p>{{ sentence }}</p>
{% endfor %}
{% for table in tables %}
<h2>{{ table.title }}</h2>
<div class="scroll"><table><tr>{% for title in table.columns %}<th>{{ title }}</th>{% endfor %}</tr>
{% for row in table.rows %}
<tr class="{{ table.marks.get(loop.index0, '') }}">
{% for word in row %}<td{% if table.columns[loop.index0] == 'why' %} class="why"{% endif %}>
{{- word }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% if table.note %}<p class="note">{{ table.note }}</p>{% endif %}
{% endfor %}
<p class="note">{{ legend }}</p>
{% for title, data in images %}
<h2>{{ title }}</h2><img alt="{{ title }}" src="data:image/png;base64,{{ data }}">
{% endfor %}
<h2>How it was measured</h2>
<table>
{% for key, value in facts %}<tr><td>{{ key }}</td><td class="why">{{ value }}</td></tr>
{% endfor %}
</table>
</body></html>
"""
)


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
        "client": row.client,
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
        day_table(rows),
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


def markdown(
    header: Header, rows: Sequence[Row], images: Mapping[str, str], *, level: int = 2
) -> str:
    """Verdict, tables, links to ``images`` (title -> path), and how it was measured."""
    heading = "#" * level
    lines = [line for sentence in sentences(rows) for line in (sentence, "")]
    for table in tables_of(header, rows):
        lines += [f"{heading} {table.title}", ""]
        lines += ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
        lines += ["| " + " | ".join(map(_escaped, row)) + " |" for row in table.rows]
        lines += ["", *([table.note, ""] if table.note else [])]
    lines += [LEGEND, ""]
    for title, path in images.items():
        lines += [f"{heading} {title}", "", f"![{title}]({path})", ""]
    lines += [f"{heading} How it was measured", ""]
    lines += [*(f"- {name}: {value}" for name, value in facts_of(header, rows)), ""]
    return "\n".join(lines)


def _escaped(word: str) -> str:
    return word.replace("|", "\\|")


def write_report(header: Header, rows: Sequence[Row], directory: Path) -> None:
    """``report.html``, ``report.md`` and the pictures of the latter."""
    directory.mkdir(parents=True, exist_ok=True)
    drawn = _drawn(header, rows)
    paths = _write_pictures(drawn, directory)
    text = markdown(header, rows, {title: path.name for title, path in paths.items()})
    (directory / "report.md").write_text(f"# Routers compared\n\n{text}", encoding="utf-8")
    page = _PAGE.render(
        verdict=sentences(rows),
        facts=facts_of(header, rows),
        tables=tables_of(header, rows),
        legend=LEGEND,
        images=[(title, base64.b64encode(png).decode()) for title, png in drawn.items()],
    )
    (directory / "report.html").write_text(page, encoding="utf-8")


def check_marks(path: Path) -> str:
    """The text of a Markdown file with a place for tables.

    Raises:
        ValueError: it cannot be read, or has no marks.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    if text.count(BEGIN_MARK) != 1 or text.count(END_MARK) != 1:
        raise ValueError(f"{path} must contain the lines {BEGIN_MARK} and {END_MARK}, once each")
    return text


def write_into_docs(header: Header, rows: Sequence[Row], path: Path) -> None:
    """Replace what is between the marks in a Markdown file; pictures go beside it, in a folder of
    its name.

    Raises:
        ValueError: the file has no marks.
    """
    text = check_marks(path)
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    drawn = _write_pictures(
        pictures(ratios.serving(rows), header.settings.get("chunk_tokens", 0)), folder
    )
    links = {title: f"{folder.name}/{file.name}" for title, file in drawn.items()}
    before, _, rest = text.partition(BEGIN_MARK)
    after = rest.partition(END_MARK)[2]
    inside = markdown(header, rows, links, level=3)
    path.write_text(f"{before}{BEGIN_MARK}\n\n{inside}\n{END_MARK}{after}", encoding="utf-8")


def _drawn(header: Header, rows: Sequence[Row]) -> dict[str, bytes]:
    # Given engines are asked for their chunk when they are needed.
    return pictures(ratios.serving(rows), header.settings.get("chunk_tokens", 0))


def _write_pictures(drawn: Mapping[str, bytes], directory: Path) -> dict[str, Path]:
    paths = {}
    for title, png in drawn.items():
        paths[title] = directory / (re.sub(r"\W+", "-", title.lower()) + ".png")
        paths[title].write_bytes(png)
    return paths
