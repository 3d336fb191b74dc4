"""Names that must mean one thing: the counts are zero and stay there."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE, TESTS = ROOT / "sglang_sbs", ROOT / "tests"
FOLDERS = PACKAGE, TESTS, ROOT / "benchmarks", ROOT / "tools", ROOT / "examples"
BARE_REPORTS = {"told", "ended", "began", "took", "heard", "submitted", "dispatched"}
"""Method names that leave open who did what: ``on_ended``, ``record_ended`` and the like do not."""
OF_WORKERS = ("router/workers/", "router/processes/mirrored_registry.py")


def modules(*folders: Path) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders or (PACKAGE,):
        yield from parsed(folder)


@cache
def parsed(folder: Path) -> list[tuple[str, ast.Module]]:
    paths = sorted(folder.rglob("*.py"))
    return [(str(path.relative_to(folder)), ast.parse(path.read_text())) for path in paths]


@cache
def bindings(folder: Path) -> list[tuple[str, int, str]]:
    """Return the file, the line and the name of everything that is defined or assigned."""
    return [
        (name, line, bound) for name, tree in parsed(folder) for line, bound in bound_names(tree)
    ]


def bound_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.arg(arg=name)
            ):
                yield node.lineno, name


def test_a_class_name_is_defined_once() -> None:
    defined = defaultdict(list)
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                defined[node.name].append(name)
    assert {name: where for name, where in defined.items() if len(where) > 1} == {}


def test_no_variable_or_parameter_is_called_one() -> None:
    bound = [
        f"{name}:{line}"
        for folder in FOLDERS
        for name, line, bound in bindings(folder)
        if bound == "one"
    ]
    assert bound == []


def test_a_request_is_submitted_and_dispatched() -> None:
    """The relay submits a request and the scheduler dispatches it: no second verb for either. Only
    workers are announced."""
    second = [
        f"{name}:{line} {bound}"
        for folder in (PACKAGE, TESTS)
        for name, line, bound in bindings(folder)
        if "assign" in bound.lower()
        or ("announc" in bound.lower() and not name.startswith(OF_WORKERS))
    ]
    assert second == []


def test_names_say_what_was_reported_or_received() -> None:
    """A name says what was reported, sent, received or answered."""
    unclear = re.compile(r"(^|_)(un)?(told|heard)(_|$)", re.IGNORECASE)
    found = [
        f"{name}:{line} {bound}"
        for folder in FOLDERS
        for name, line, bound in bindings(folder)
        if unclear.search(bound)
    ]
    assert found == []


def test_methods_that_receive_a_report_say_so() -> None:
    bare = [
        f"{name}:{method.lineno} {method.name}"
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        and method.name.lstrip("_") in BARE_REPORTS
        and not any("property" in ast.unparse(by) for by in method.decorator_list)
    ]
    assert bare == []
