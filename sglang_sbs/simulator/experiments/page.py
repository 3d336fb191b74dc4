"""One HTML page with tables and pictures, which refers to no other file or host."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from sglang_sbs.simulator.experiments.policy_looks import words_of
from sglang_sbs.simulator.experiments.tables import ResultTable

_STYLE = """\
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
caption { text-align: left; font-weight: 600; padding: .3rem 0 }
th, td { border: 1px solid #8886; padding: .25rem .6rem; text-align: right }
th:first-child, td:first-child, td.words { text-align: left }
.wide { overflow-x: auto }
figure { margin: 1rem 0 }
img { max-width: 100%; background: #fff }
@media (prefers-color-scheme: dark) {
  body { background: #101418; color: #e6e9ed }
  img { filter: invert(.9) hue-rotate(180deg) }
}
"""
_WORDS = 24
"""Number of characters above which a table cell is laid out as text."""


@dataclass(frozen=True, slots=True)
class Picture:
    caption: str
    png: bytes


Part = ResultTable | Picture | str
"""A part of a page; a string is a paragraph."""


def write_page(path: Path, title: str, parts: Sequence[Part]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "\n".join(_html(part) for part in parts)
    path.write_text(
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>\n{_STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n"
        "</body></html>\n"
    )


def _html(part: Part) -> str:
    match part:
        case ResultTable():
            head = "".join(f"<th>{escape(column)}</th>" for column in part.columns)
            rows = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in part.rows)
            caption = f"<caption>{escape(part.title)}</caption>"
            return f'<div class="wide"><table>{caption}<tr>{head}</tr>\n{rows}\n</table></div>'
        case Picture():
            data = base64.b64encode(part.png).decode()
            return (
                f'<figure><img alt="{escape(part.caption)}" src="data:image/png;base64,{data}">'
                f"<figcaption>{escape(part.caption)}</figcaption></figure>"
            )
        case str():
            return f"<p>{escape(part)}</p>"


def _cell(text: str) -> str:
    kind = ' class="words"' if len(text) > _WORDS else ""
    return f"<td{kind}>{escape(text)}</td>"


def policies_table(names: Iterable[str]) -> ResultTable:
    return ResultTable("policies", ["policy", ""], list(map(list, words_of(names))))
