"""One self-contained HTML page with tables and pictures.

Owns the markup. Nothing on the page refers to another file or host.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from sglang_sbs.simulator.experiments.tables import ResultTable

_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
caption { text-align: left; font-weight: 600; padding: .3rem 0 }
th, td { border: 1px solid #ccc; padding: .25rem .6rem; text-align: right }
th:first-child, td:first-child { text-align: left }
img { max-width: 100% }
"""


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG with its caption."""

    caption: str
    png: bytes


Part = ResultTable | Picture | str
"""What a page is made of; a string is a paragraph."""


def write_page(path: Path, title: str, parts: Sequence[Part]) -> None:
    """Write the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "\n".join(_html(part) for part in parts)
    path.write_text(
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>\n{_STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n"
        "</body></html>\n"
    )


def _html(part: Part) -> str:
    match part:
        case ResultTable():
            head = "".join(f"<th>{escape(column)}</th>" for column in part.columns)
            rows = "\n".join(
                "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
                for row in part.rows
            )
            caption = f"<caption>{escape(part.title)}</caption>"
            return f"<table>{caption}<tr>{head}</tr>\n{rows}\n</table>"
        case Picture():
            data = base64.b64encode(part.png).decode()
            return (
                f'<figure><img alt="{escape(part.caption)}" src="data:image/png;base64,{data}">'
                f"<figcaption>{escape(part.caption)}</figcaption></figure>"
            )
        case str():
            return f"<p>{escape(part)}</p>"
