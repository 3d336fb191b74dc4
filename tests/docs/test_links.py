"""Every relative link and anchor in the documentation leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_commands import ROOT, pages

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
FENCED = re.compile(r"^(\s*)```.*?^\s*```\s*?$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from headings."""
    found: set[str] = set()
    for heading in HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if (
            not there.exists()
            or not there.is_relative_to(ROOT)
            or (anchor and there.suffix == ".md" and anchor not in anchors(there))
        ):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_would_be_noticed(tmp_path: Path) -> None:
    page = ROOT / "docs" / "README.md"
    copy = tmp_path / "page.md"
    copy.write_text("# A `b_c` 1.2\n[one](#a-b_c-12) [two](#absent) [three](absent.md)\n")
    assert anchors(copy) == {"a-b_c-12"}
    assert "#absent" in broken_links(copy)
    assert "absent.md" in broken_links(copy)
    assert page in pages()


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {
        (index.parent / target.partition("#")[0]).resolve() for target in LINK.findall(prose(index))
    }
    missing = [page.name for page in (ROOT / "docs").rglob("*.md") if page not in linked | {index}]
    assert missing == []
