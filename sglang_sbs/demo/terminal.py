"""Tables for terminals, whole at 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table


def result_table(title: str, names: Sequence[str], figures: Sequence[str]) -> Table:
    """Columns of names, then of figures. Headers take several lines before anything is cut."""
    table = Table(title=title, show_edge=False, pad_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True)
    for figure in figures:
        table.add_column(figure, justify="right", overflow="fold")
    return table
