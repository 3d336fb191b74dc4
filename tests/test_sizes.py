"""How large a function may be: one screen, and no more arguments than can be held in mind.

The list of exceptions can only shrink: one that is not needed any more has to go, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("sglang_sbs", "benchmarks", "tools")
MOST_LINES = 60
MOST_PARAMETERS = 6
"""Besides keyword-only ones that have defaults, and ``self``."""

TOO_LONG = {
    "benchmarks/compare_routers/command.py build_parser",
    "benchmarks/scale/command.py measure",
    "tools/check_patches/probe.py _fakes",
}
TOO_MANY_PARAMETERS = {
    "benchmarks/compare_routers/workloads.py arrivals",
    "sglang_sbs/scheduling/queue/flow_control.py first_token_in_s",
}


class Function(NamedTuple):
    name: str
    """Its file, and its name with those of the classes and functions around it."""
    lines: int
    parameters: int


def functions_of(file: str, source: str) -> Iterator[Function]:
    def inside(node: ast.AST, around: str, of_class: bool) -> Iterator[Function]:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Function(
                    f"{file} {around}{inner.name}", _lines(inner), _parameters(inner, of_class)
                )
                yield from inside(inner, f"{around}{inner.name}.", False)
            elif isinstance(inner, ast.ClassDef):
                yield from inside(inner, f"{around}{inner.name}.", True)
            else:
                yield from inside(inner, around, of_class)

    return inside(ast.parse(source), "", False)


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, of_class: bool) -> int:
    given = function.args
    static = any(ast.unparse(decorator) == "staticmethod" for decorator in function.decorator_list)
    needed = sum(default is None for default in given.kw_defaults)
    return len(given.posonlyargs) + len(given.args) + needed - (of_class and not static)


def all_functions() -> Iterator[Function]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from functions_of(str(path.relative_to(ROOT)), path.read_text())


@pytest.mark.parametrize(
    ("found", "excused"),
    [
        ({f.name for f in all_functions() if f.lines > MOST_LINES}, TOO_LONG),
        ({f.name for f in all_functions() if f.parameters > MOST_PARAMETERS}, TOO_MANY_PARAMETERS),
    ],
    ids=["lines", "parameters"],
)
def test_functions_are_small(found: set[str], excused: set[str]) -> None:
    assert found - excused == set(), "too large"
    assert excused - found == set(), "exceptions that are not needed any more"


def test_a_large_function_would_be_noticed() -> None:
    source = (
        "def f(a, b, c, d, e, f, g, *, h=1): pass\n"
        "class C:\n"
        "    def m(self, a, b, c, d, e, f, *, g=1):\n"
        "        async def inner(a, /, *, b, c=2):\n"
        "            pass\n"
        "    @staticmethod\n"
        "    def s(a): pass\n"
    )
    assert list(functions_of("x.py", source)) == [
        ("x.py f", 1, 7),
        ("x.py C.m", 3, 6),
        ("x.py C.m.inner", 2, 2),
        ("x.py C.s", 1, 1),
    ]
