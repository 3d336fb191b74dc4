"""Names of the package that must mean one thing: the counts are zero and stay there."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "sglang_sbs"
BARE_REPORTS = {"told", "ended", "began", "took", "heard", "announced", "assigned", "dispatched"}
"""Method names that leave open who did what: ``on_ended``, ``record_ended`` and the like do not."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def test_a_class_name_is_defined_once() -> None:
    defined = defaultdict(list)
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                defined[node.name].append(name)
    assert {name: where for name, where in defined.items() if len(where) > 1} == {}


def test_no_variable_or_parameter_is_called_one() -> None:
    bound = [
        f"{name}:{node.lineno}"
        for name, tree in modules()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id == "one" and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.arg) and node.arg == "one")
    ]
    assert bound == []


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
