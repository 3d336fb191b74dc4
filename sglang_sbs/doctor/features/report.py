"""The table of features, for people and for programs.

The JSON has ``"schema": 1``; fields and rows are only ever added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_sbs import __version__
from sglang_sbs.doctor.facts import ClusterFacts
from sglang_sbs.doctor.features.rules import FeatureRow, State

_STYLES = {State.ON: "green", State.PARTLY: "yellow", State.OFF: "cyan", State.UNKNOWN: "dim"}


def features_exit_code(facts: ClusterFacts) -> int:
    """0: there is something to tell of; 1: no engine could be asked, or not the router given."""
    unusable = all(engine.info is None for engine in facts.engines)
    return int(unusable or (facts.router is not None and facts.router.failure is not None))


def features_json(facts: ClusterFacts, rows: Sequence[FeatureRow]) -> dict[str, Any]:
    """The table of schema 1."""
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
    """One line per feature, and whose word the table is. ``quiet``: without what is on."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("feature", "state", "why", "what to change"):
        table.add_column(title, overflow="fold", no_wrap=title == "state")
    for row in rows:
        if not (quiet and row.state is State.ON):
            state = Text(str(row.state), style=_STYLES[row.state])
            table.add_row(Text(row.title), state, Text(row.why), Text(row.change or "-"))
    console.print(table)
    engines = f"{len(facts.engines)} engine{'' if len(facts.engines) == 1 else 's'}"
    said_by = (
        f"by {engines} and the router {facts.router.url}"
        if facts.router is not None
        else f"by {engines} and the router's flags given here; --router URL asks a running router"
    )
    console.print(Text(f"Told {said_by}. docs/features.md says what each row means."))
