"""The documentation as a site: it builds strictly, and loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_commands import ROOT, pages
from markdown import markdown
from markdown_it import MarkdownIt

from tools.site.hook import (
    place_in_repository,
    place_on_site,
    with_links_of_site,
    with_lists_of_site,
)

LOADED = re.compile(
    r"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"'> ]*)|"
    r"@import[^;]*?((?:https?:)?//[^;]*)|url\([\"']?((?:https?:)?//[^)]*)"
)
CANONICAL = re.compile(r"<link rel=\"?canonical\"?[^>]*>")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``scripts/docs build`` does."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return target


def folder_of(page: Path) -> str | None:
    """Where the site has a page of the repository."""
    place = place_on_site(str(page.relative_to(ROOT)))
    return place and re.sub(r"(index|README)?\.md$", "", place)


def test_every_page_of_the_documentation_is_on_the_site(site: Path) -> None:
    folders = {str(page.relative_to(ROOT)): folder_of(page) for page in pages()}
    assert len(folders) > 40
    missing = [
        page
        for page, folder in folders.items()
        if folder is None or not (site / folder / "index.html").exists()
    ]
    assert missing == []


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    files = [file for file in site.rglob("*") if file.suffix in (".html", ".css")]
    assert len(files) > 40
    loaded = {
        str(file.relative_to(site)): found
        for file in files
        if (found := LOADED.findall(CANONICAL.sub("", file.read_text())))
    }
    assert loaded == {}
    assert LOADED.search('<script async src="https://unpkg.com/mermaid"></script>')
    assert LOADED.search("@import url(//fonts.googleapis.com/css)")


def test_links_of_the_repository_become_those_of_the_site() -> None:
    here = "lab/paper.md"
    there = "https://host/owner/name"

    def rewritten(text: str, repository: str | None = there) -> str:
        return with_links_of_site(text, here, repository)

    assert rewritten("[a](../results.md#load)") == "[a](../results.md#load)"
    assert rewritten("[a](../../README.md)") == "[a](../index.md)"
    assert rewritten("[a](../../SECURITY.md#b)") == "[a](../repository/security.md#b)"
    assert rewritten("[a](../../sglang_sbs/cli.py)") == f"[a]({there}/blob/main/sglang_sbs/cli.py)"
    assert rewritten("see [`a`](../../examples/grafana).", None) == "see `a`."
    assert rewritten("[a](../../no-such-file)") == "[a](../../no-such-file)"
    assert rewritten("```\n[a](../../README.md)\n```") == "```\n[a](../../README.md)\n```"
    picture = "![p](docs/images/timeline.png)"
    assert with_links_of_site(picture, "index.md", None) == "![p](images/timeline.png)"
    assert place_in_repository("index.md") == "README.md"


def test_lists_are_on_the_site_what_they_are_on_github() -> None:
    text = """\
Text:
- one
  more of it

  a paragraph
  - inner
- two

And:

1. first

   ```
   code
   ```
2. second
   - below it
"""
    tags = re.compile("</?(?:li|ul|ol|code)")

    def shape(html: str) -> list[str]:
        return tags.findall(re.sub(r"<pre.*?</pre>", "<code></code>", html, flags=re.DOTALL))

    there = shape(MarkdownIt("commonmark").render(text))
    extensions = ["sane_lists", "pymdownx.superfences"]
    assert shape(markdown(with_lists_of_site(text), extensions=extensions)) == there
    assert shape(markdown(text, extensions=extensions)) != there
