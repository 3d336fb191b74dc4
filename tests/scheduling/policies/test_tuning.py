"""The default policy has few constants that were chosen by measurement, and a page has them all."""

from __future__ import annotations

import ast
from dataclasses import FrozenInstanceError
from itertools import pairwise
from pathlib import Path

import pytest

import sglang_sbs
from sglang_sbs.scheduling.policies.tuning import TUNING, Measured, Memories

POLICIES = Path(sglang_sbs.__file__).parent / "scheduling" / "policies"
PAGE = Path(__file__).parents[3] / "docs" / "lab" / "constants.md"
MODULES = [
    *(POLICIES / "adaptive").glob("*.py"),
    *[POLICIES / f"{name}.py" for name in ("idle_turns", "offered_load", "pbaa")],
]
MOST_TUNED = 8
ALLOWED = {0, 1, 2, 1e3}
"""The last one converts seconds to milliseconds."""


def explained(of: type) -> dict[str, str]:
    """The constants of a class, and the sentence below each."""
    tree = ast.parse((POLICIES / "tuning.py").read_text())
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == of.__name__).body
    return {
        node.target.id: after.value.value
        for node, after in pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr)
    }


def table(heading: str) -> set[str]:
    """First column of the table under a heading of the page."""
    part = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return {row.split("`")[1] for row in part.splitlines() if row.startswith("| `")}


@pytest.mark.parametrize(
    ("of", "heading"), [(Measured, "The tuned constants"), (Memories, "Memories")]
)
def test_each_constant_has_a_sentence_here_and_a_figure_there(of: type, heading: str):
    assert of.__annotations__.keys() == table(heading) == explained(of).keys()


def test_few_constants_are_tuned():
    assert len(Measured.__annotations__) <= MOST_TUNED


def test_no_constant_changes_while_the_policy_runs():
    with pytest.raises(FrozenInstanceError):
        TUNING.slack = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_number_of_the_policy_has_a_name(path: Path):
    numbers = {
        f"{node.value} in line {node.lineno}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and node.value not in ALLOWED
    }
    assert not numbers, "every other number belongs into tuning.py"
