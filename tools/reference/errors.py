"""The errors a client can see: status and code read from the router's source, meanings kept."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import get_args

from sglang_sbs.router import errors
from tools.reference.pages import head, kept, table

ROOT = Path(__file__).resolve().parents[2]
PAGE = "reference/errors.md"
OF_ENGINE = "of the engine"
_POSITIONS = {"RouterError": (0, 1), "WorkerError": (0, 1), "LegFailure": (2, 3)}
"""Where these take status and code."""
_VALUES = {"leg": ("prefill", "decode"), "role": ("prefill", "decode")}
_INTRODUCTION = """
Errors are `{"error": {"type", "code", "message", "param"}}`. The header `X-SMG-Error-Code` has the
code as well. `/v1/messages` answers in Anthropic's form,
`{"type": "error", "error": {"type", "message"}}`. After the first byte of a stream an error is an
event in it. Errors that may pass (429, most 503) have `Retry-After`.

What a failing engine means for a request: [the path of a request](../request-path.md).
"""


def page() -> str:
    """``docs/reference/errors.md``."""
    meaning = kept(PAGE, 2, keys=2)
    rows = [
        (status, f"`{code}`", meaning.get((status, f"`{code}`"), ""))
        for status, code in sorted(found())
    ]
    header = ("status", "code", "meaning")
    title = head("Errors", "The column *meaning* is by hand.")
    return "\n".join([title, _INTRODUCTION.lstrip("\n"), table(header, rows), ""])


@cache
def found() -> set[tuple[str, str]]:
    """Status and code of every error that the source of the router raises."""
    folder = ROOT / "sglang_sbs" / "router"
    every = {error for path in sorted(folder.rglob("*.py")) for error in _of_module(path)}
    every |= {(str(status), code) for status, code in errors._REFUSALS.values()}
    for leg in get_args(errors.Leg):
        every |= {(str(status), f"{leg}_{word}") for status, word in errors._LEG_CODES.items()}
        every |= {(OF_ENGINE, f"{leg}_error")}
        lost = errors.transport_failure(leg, "", "")
        every |= {(str(lost.status), lost.code)}
    return every


def _of_module(path: Path) -> Iterator[tuple[str, str]]:
    tree = ast.parse(path.read_text())
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        if called == "bad_request":
            codes = _texts(node.args[1], name) if len(node.args) > 1 else ["invalid_request"]
            yield from (("400", code) for code in codes)
        elif called in _POSITIONS and not any(isinstance(a, ast.Starred) for a in node.args):
            at_status, at_code = _POSITIONS[called]
            if len(node.args) > at_code:
                status = _texts(node.args[at_status], name) or [OF_ENGINE]
                yield from product(status, _texts(node.args[at_code], name))


def _texts(node: ast.expr, module: str) -> list[str]:
    """Return the possible values of an expression as text; nothing if a request decides."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.Name):
        constant = getattr(import_module(module), node.id, None)
        return [str(constant)] if isinstance(constant, str | int) else []
    if isinstance(node, ast.JoinedStr):
        parts = [_of_part(part, module) for part in node.values]
        return ["".join(each) for each in product(*parts)]
    return []


def _of_part(part: ast.expr, module: str) -> list[str]:
    if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
        return list(_VALUES[part.value.id])
    return _texts(part, module)
