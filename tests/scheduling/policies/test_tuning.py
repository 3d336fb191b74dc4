"""The default policy has few constants that were chosen by measurement, and a page has them all."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sglang_sbs
from sglang_sbs.scheduling.policies import tuning

POLICIES = Path(sglang_sbs.__file__).parent / "scheduling" / "policies"
PAGE = Path(__file__).parents[3] / "docs" / "lab" / "constants.md"
MOST_TUNED = 8
NOT_TUNED = {"NEAREST", "RETRY_S", "FETCH_S", "LOAD_S", "LEAST_HIT_SHARE", "LEFT_OUT"}
"""Bounds of work and of waiting by another name, and guesses about storage. So is what begins
with these:"""
BOUNDS = ("MOST_", "MAX_", "_")


def numbers(path: Path) -> dict[str, str]:
    """Constants of a module that are a number, and what stands below them."""
    body = ast.parse(path.read_text()).body
    found = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.BinOp):
            told = after.value if isinstance(after, ast.Expr) else None
            sentence = told.value if isinstance(told, ast.Constant) else ""
            found |= {one.id: str(sentence) for one in node.targets if isinstance(one, ast.Name)}
    return found


def table(heading: str) -> set[str]:
    """First column of the table under a heading of the page."""
    part = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return {row.split("`")[1] for row in part.splitlines() if row.startswith("| `")}


def test_there_are_few_and_each_has_a_sentence_here_and_a_figure_there():
    tuned = numbers(POLICIES / "tuning.py")
    assert len(tuned) <= MOST_TUNED
    assert all(tuned.values())
    assert tuned.keys() == table("The tuned constants")
    assert tuned.keys() == {name for name in vars(tuning) if name.isupper()}


def test_the_page_has_what_the_lead_remembers_too():
    assert numbers(POLICIES / "adaptive" / "dispatch_lead.py").keys() == table("Memories")


@pytest.mark.parametrize(
    "path",
    [*(POLICIES / "adaptive").glob("*.py"), POLICIES / "pbaa.py"],
    ids=lambda path: path.name,
)
def test_elsewhere_numbers_only_bound_work(path: Path):
    tuned = [one for one in numbers(path) if not one.startswith(BOUNDS) and one not in NOT_TUNED]
    assert not tuned, "a constant that was chosen by measurement belongs into tuning.py"
