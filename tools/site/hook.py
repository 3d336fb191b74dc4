"""The steps that MkDocs lacks for this repository: a hook of ``mkdocs.yml``.

The pages stay where GitHub shows them, and so do their links. Pages outside ``docs/`` become pages
of the site. Links to files that are not pages lead to the repository at ``SGLANG_SBS_REPOSITORY``
(``https://HOST/OWNER/NAME``); without it only their words are kept. The site serves the copy of
mermaid that draws its diagrams.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
MERMAID = ROOT / ".cache" / "site" / "mermaid.min.js"
"""``scripts/docs`` puts it there. Without it diagrams are shown as their text."""
_SERVED_AS = "javascripts/mermaid.min.js"

MOVED = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CONTRIBUTING.md": "repository/contributing.md",
    "SECURITY.md": "repository/security.md",
    "CHANGELOG.md": "repository/changelog.md",
    "examples/README.md": "repository/examples.md",
    "patches/README.md": "repository/patches.md",
}
"""Pages that lie elsewhere on the site than in the repository."""
_FROM = {site: repository for repository, site in MOVED.items()}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^\s*(`{3,}|~{3,})")
_ITEM = re.compile(r"( *)([-*+]|\d{1,9}[.)])( +)(?=\S)")
_INDENT = 4
"""Spaces for each level of a list in Python-Markdown; GitHub takes the width of the marker."""
_LAB_BOOST = 0.3
"""How much a page of the laboratory counts in the search, beside a guide's 1."""


def place_in_repository(src_uri: str) -> str:
    """Where a page or picture of the site comes from."""
    return _FROM.get(src_uri, f"docs/{src_uri}")


def place_on_site(path: str) -> str | None:
    """Where a file of the repository is on the site, if it is."""
    if path in MOVED:
        return MOVED[path]
    inside = path.startswith("docs/") and (ROOT / path).is_file()
    return path.removeprefix("docs/") if inside else None


def on_config(config: MkDocsConfig) -> None:
    if not MERMAID.exists():
        config.mdx_configs["pymdownx.superfences"] = {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what lies outside ``docs/``."""
    for file in [file for file in files if file.src_uri == "README.md"]:
        files.remove(file)
    for path, src_uri in MOVED.items():
        source = str(ROOT / path)
        files.append(File.generated(config, src_uri, abs_src_path=source))
    if MERMAID.exists():
        files.append(File.generated(config, _SERVED_AS, abs_src_path=str(MERMAID)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """The page with links and lists as the site has them."""
    if page.file.src_uri.startswith("lab/"):
        page.meta.setdefault("search", {})["boost"] = _LAB_BOOST
    repository = os.environ.get("SGLANG_SBS_REPOSITORY")
    return with_lists_of_site(with_links_of_site(markdown, page.file.src_uri, repository))


def with_links_of_site(markdown: str, src_uri: str, repository: str | None) -> str:
    """``markdown``, its relative links made those of the page ``src_uri``.

    A link that leads nowhere stays as it is, so that MkDocs complains.
    """
    here = posixpath.dirname(place_in_repository(src_uri))

    def rewritten(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        words = _LINK.sub(rewritten, words)
        path, hash_, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            return f"{picture}[{words}]({target})"
        there = posixpath.normpath(posixpath.join(here, path))
        if (site := place_on_site(there)) is not None:
            own = posixpath.relpath(site, posixpath.dirname(src_uri) or ".")
            return f"{picture}[{words}]({own}{hash_}{anchor})"
        if not (ROOT / there).exists():
            return link[0]
        if not repository:
            return words
        return f"{picture}[{words}]({repository.rstrip('/')}/blob/main/{there})"

    # Text and fenced code by turns. A link may go on in the next line.
    parts, fence = [""], ""
    for line in markdown.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if mark is not None and (not fence or mark[1].startswith(fence)):
            opens = not fence
            fence = mark[1] if opens else ""
            if opens:
                parts.append(line)
            else:
                parts[-1] += line
                parts.append("")
        else:
            parts[-1] += line
    parts[::2] = [_LINK.sub(rewritten, text) for text in parts[::2]]
    return "".join(parts)


def with_lists_of_site(markdown: str) -> str:
    """``markdown``, its lists indented and separated as Python-Markdown wants them."""
    written: list[str] = []
    offsets: list[int] = []
    """Where the text of each open item begins."""
    last: tuple[int, bool] | None = None
    """Depth of the item before, and whether it is numbered; None after a blank line."""
    fence, blank = "", True
    for line in markdown.split("\n"):
        indent = len(line) - len(line.lstrip(" "))
        if not line.strip():
            written.append(line)
            blank, last = True, None
            continue
        item = None if fence else _ITEM.match(line)
        if not fence and (blank or item):
            while offsets and indent < offsets[-1]:
                offsets.pop()
        if item is not None:
            now = (len(offsets), item[2][0].isdigit())
            if now != last and not blank:
                written.append("")
            last = now
        elif not offsets:
            last = None
        depth = _INDENT * len(offsets)
        inside = offsets[-1] if offsets else 0
        written.append(" " * depth + line[min(inside, indent) :])
        if item:
            offsets.append(len(item[0]))
        elif (mark := _FENCE.match(line)) and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
        blank = False
    return "\n".join(written)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Pages with diagrams get mermaid before the theme would load it from elsewhere."""
    if '<pre class="mermaid">' not in output:
        return output
    source = posixpath.relpath(_SERVED_AS, page.url or ".")
    return output.replace("</head>", f'<script src="{source}"></script></head>', 1)
