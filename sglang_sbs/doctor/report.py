"""Output of the report or the table of features, as text and JSON. The JSON has ``"schema": 1``;
fields and rows are only ever added."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_sbs import __version__
from sglang_sbs.console.plain_words import counted
from sglang_sbs.doctor.facts import ClusterFacts, EngineFacts
from sglang_sbs.doctor.features import FeatureRow, State
from sglang_sbs.doctor.findings import CLUSTER, ROUTER, Finding, Severity, count, verdict

_SHOWN = (
    *("version", "dp_size", "chunk_tokens", "kv_capacity_tokens"),
    *("max_running_requests", "page_size"),
)
"""Fields shown from an engine's own information."""
_MARK_CHARS = 9
_MIN_TEXT_CHARS = 40
_MARKS = {
    Severity.OK: ("ok", "green"),
    Severity.NOTE: ("note", "cyan"),
    Severity.WARNING: ("WARNING", "yellow"),
    Severity.ERROR: ("ERROR", "bold red"),
}
_STYLES = {State.ON: "green", State.PARTLY: "yellow", State.OFF: "cyan", State.UNKNOWN: "dim"}


def exit_code(findings: list[Finding], *, strict: bool) -> int:
    """Return 0 if nothing is worse than notes (or warnings, unless ``strict``), otherwise 1."""
    return int(verdict(findings) in ({"broken", "warnings"} if strict else {"broken"}))


def as_json(facts: ClusterFacts, findings: list[Finding]) -> dict[str, Any]:
    """The report in schema 1."""
    return {
        "schema": 1,
        "sglang_sbs_version": __version__,
        "verdict": verdict(findings),
        "exit_code": exit_code(findings, strict=facts.options.strict),
        "counts": {str(severity): number for severity, number in count(findings).items()},
        "router": facts.router.url if facts.router is not None else None,
        "engines": [_engine(engine) for engine in facts.engines],
        "findings": [asdict(finding) for finding in findings],
    }


def _engine(engine: EngineFacts) -> dict[str, Any]:
    info = engine.info
    return {
        "url": engine.url,
        "role": engine.role,
        "reachable": engine.failure is None,
        "usable": info is not None,
        **{name: getattr(info, name, None) for name in _SHOWN},
        "plugin": info.sbs is not None if info else None,
    }


def print_report(
    console: Console, facts: ClusterFacts, findings: list[Finding], *, quiet: bool
) -> None:
    """Print the verdict in one line, then engines, pairs, router and cluster."""
    console.print(verdict_line(facts, findings), soft_wrap=True)
    console.print()
    by_subject: dict[str, list[Finding]] = {}
    for finding in findings:
        by_subject.setdefault(finding.subject, []).append(finding)
    for engine in facts.engines:
        version = f"SGLang {engine.info.version}" if engine.info is not None else "not usable"
        title = f"{engine.role} {engine.url}  {version}"
        _print_block(console, title, by_subject.pop(engine.url, []), quiet)
    last = [(ROUTER, by_subject.pop(ROUTER, [])), (CLUSTER, by_subject.pop(CLUSTER, []))]
    for subject, some in [*by_subject.items(), *last]:
        _print_block(console, subject, some, quiet)


def _print_block(console: Console, title: str, findings: list[Finding], quiet: bool) -> None:
    shown = [finding for finding in findings if not (quiet and finding.severity is Severity.OK)]
    if not shown:
        return
    console.print(Text(title, style="bold"), soft_wrap=True)
    ids = max(len(finding.id) for finding in shown)
    indent = " " * (_MARK_CHARS + ids + 4)
    room = max(_MIN_TEXT_CHARS, console.width - len(indent))
    # Lines have no trailing blanks, and unbreakable words (URLs, JSON) stay whole.
    wrap = partial(textwrap.wrap, width=room, break_long_words=False, break_on_hyphens=False)
    for finding in shown:
        mark, style = _MARKS[finding.severity]
        first, *more = wrap(finding.seen) or [""]
        start = f"{finding.id:<{ids}}  {first}"
        lines = [Text.assemble("  ", (f"{mark:<{_MARK_CHARS}}", style), start)]
        lines += [Text(indent + line) for line in more]
        change = wrap(f"-> {finding.change}") if finding.change else ()
        lines += [Text.assemble(indent, (line, "italic")) for line in change]
        for line in lines:
            console.print(line, soft_wrap=True)
    console.print()


_VERDICTS = {
    "healthy": ("healthy", "bold green"),
    "warnings": ("works, and could be better", "bold yellow"),
    "broken": ("broken", "bold red"),
}


def verdict_line(facts: ClusterFacts, findings: list[Finding]) -> Text:
    """Return the number of findings, and the first of the most severe ones. ``findings`` is in the
    order of :func:`~sglang_sbs.doctor.examine.judge`."""
    counts = count(findings)
    worst_first = (Severity.ERROR, Severity.WARNING, Severity.NOTE)
    parts = [counted(counts[severity], severity) for severity in worst_first if counts[severity]]
    line = f"{', '.join(parts) or 'no findings'} in {counted(len(facts.engines), 'engine')}"
    worst = next((severity for severity in worst_first[:2] if counts[severity]), None)
    for finding in findings:
        if finding.severity is worst:
            line += (
                f". Start with {finding.id} ({finding.subject}): {finding.seen} -> {finding.change}"
            )
            break
    return Text.assemble(_VERDICTS[verdict(findings)], f": {line}")


def features_exit_code(facts: ClusterFacts) -> int:
    """Return 0 if the table has content; 1 if no engine or the given router did not respond."""
    unusable = all(engine.info is None for engine in facts.engines)
    return int(unusable or (facts.router is not None and facts.router.failure is not None))


def features_json(facts: ClusterFacts, rows: Sequence[FeatureRow]) -> dict[str, Any]:
    """The table in schema 1."""
    return {
        "schema": 1,
        "sglang_sbs_version": __version__,
        "exit_code": features_exit_code(facts),
        "router": facts.router.url if facts.router is not None else None,
        "engines": [engine.url for engine in facts.engines],
        "features": list(rows),
    }


def print_features(
    console: Console, facts: ClusterFacts, rows: Sequence[FeatureRow], *, quiet: bool
) -> None:
    """Print one line per feature, and the source of the information. ``quiet``: only features that
    could be improved."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("feature", "state", "why", "what to change"):
        table.add_column(title, overflow="fold", no_wrap=title == "state")
    for row in rows:
        if row.change or row.state is State.UNKNOWN or not quiet:
            state = Text(str(row.state), style=_STYLES[row.state])
            table.add_row(Text(row.title), state, Text(row.why), Text(row.change or "-"))
    console.print(table)
    router = "the router's flags given here; --router URL asks a running router"
    if facts.router is not None:
        router = f"the router {facts.router.url}"
    sources = f"{counted(len(facts.engines), 'engine')} and {router}"
    console.print(Text(f"Source: {sources}. docs/features.md explains each row."))
