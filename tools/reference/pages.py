"""Helpers that the makers of reference pages share: tables, and the parts of a page that are
kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
HEAD = """\
# {title}

<!-- Made by scripts/reference from the code; a test compares. {by_hand} -->
"""
_CELL = re.compile(r"(?<!\\)\|")


def head(title: str, by_hand: str = "Do not edit by hand.") -> str:
    """A page's first lines. ``by_hand``: what of it may be edited."""
    return HEAD.format(title=title, by_hand=by_hand)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown; bars in cells are escaped."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for row in rows:
        cells = [_CELL.sub(r"\\|", " ".join(cell.split())) for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def kept(page: str, column: int, keys: int = 1) -> dict[tuple[str, ...], str]:
    """Return the cells of ``column`` in a page's tables, by their first ``keys`` cells. What is not
    in the code is written there by hand."""
    path = DOCS / page
    found: dict[tuple[str, ...], str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        cells = [cell.strip() for cell in _CELL.split(line)[1:-1]]
        if len(cells) > column:
            found[tuple(cells[:keys])] = cells[column]
    return found


def between(page: str, name: str, make: Callable[[], str]) -> str:
    """A page written by hand, with what ``make`` makes between ``<!-- name -->`` and
    ``<!-- end of name -->``."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = (DOCS / page).read_text().partition(begin)
    _, _, after = rest.partition(end)
    if not after:
        raise ValueError(f"docs/{page} has no {begin.strip()} … {end}")
    return f"{before}{begin}{make()}\n{end}{after}"


def plain(text: str) -> str:
    """A help's text in a cell: ``*`` and ``<`` mean themselves."""
    parts = text.split("`")
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"([*<_])", r"\\\1", parts[index]).replace("\\_", "_")
    return "`".join(parts)
