"""Policies only read belief: they change no attribute that a class of the same module does not
have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_sbs

POLICIES = Path(sglang_sbs.__file__).parent / "scheduling" / "policies"
CHANGING = {
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "popleft", "remove"),
    *("reverse", "setdefault", "sort", "update"),
}
"""Methods that change a list, set or dict."""


def own_attributes(tree: ast.Module) -> set[str]:
    """Return the attributes of a module's classes: annotated fields, slots, and those that
    ``__init__`` assigns."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    found.add(field.target.id)
                if isinstance(field, ast.FunctionDef):
                    found |= {
                        node.attr
                        for node in ast.walk(field)
                        if isinstance(node, ast.Attribute)
                        and isinstance(node.ctx, ast.Store)
                        and ast.unparse(node.value) == "self"
                    }
    return found


def foreign_changes(source: str) -> Iterator[str]:
    """Statements that change an attribute of another object, or something in it."""
    tree = ast.parse(source)
    own = own_attributes(tree)
    for node in ast.walk(tree):
        changed: ast.expr | None = None
        if isinstance(node, ast.Attribute | ast.Subscript):
            changed = None if isinstance(node.ctx, ast.Load) else node
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in ("setattr", "delattr"):
                yield ast.unparse(node)
            elif isinstance(called, ast.Attribute) and called.attr in CHANGING:
                is_held = isinstance(called.value, ast.Attribute | ast.Subscript)
                changed = called.value if is_held else None
        while isinstance(changed, ast.Subscript):
            changed = changed.value
        if isinstance(changed, ast.Attribute) and not (
            changed.attr in own and isinstance(changed.value, ast.Name)
        ):
            yield ast.unparse(node)


@pytest.mark.parametrize(
    "path", sorted(POLICIES.rglob("*.py")), ids=lambda path: str(path.relative_to(POLICIES))
)
def test_a_policy_changes_no_object_but_its_own(path: Path) -> None:
    assert list(foreign_changes(path.read_text())) == []


@pytest.mark.parametrize(
    "statement",
    [
        "instance.ready = False",
        "self._interval.literal = True",
        "view.backlog[0] += 1",
        "del instance.passes[:]",
        "instance.ranks[0].requests['r'] = 1",
        "for instance.ready in (): pass",
        "instance.passes.append(1)",
        "self._instance.ranks[0].requests.pop('r')",
        "setattr(instance, 'ready', True)",
    ],
)
def test_a_change_would_be_noticed(statement: str) -> None:
    assert list(foreign_changes(statement))


@pytest.mark.parametrize(
    "statement", ["self.x = 1", "self._left[0] += 1", "one._left.pop()", "x = [1]; x[0] = 2"]
)
def test_objects_of_a_module_change_each_other(statement: str) -> None:
    source = "class One:\n  def __init__(self):\n    self.x, self._left = 0, []\n"
    assert not list(foreign_changes(source + statement))
