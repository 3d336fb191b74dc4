"""``scripts/reference``: writes every page that is made from the code, or compares them.

A page is made whole, or between two comments of a page that is written by hand. What cannot be read
from the code, such as the meaning of an error, is kept from the page itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

from tools.reference import commands, environment, errors, findings, flag_mapping, http_api, metrics
from tools.reference.pages import DOCS, between

PAGES: dict[str, Callable[[], str]] = {
    "reference/router-flags.md": commands.router_page,
    "reference/commands.md": commands.verbs_page,
    "reference/environment.md": environment.page,
    "reference/http-api.md": http_api.page,
    "reference/openapi.json": http_api.document,
    "reference/errors.md": errors.page,
    "reference/findings.md": findings.catalogue_page,
    "reference/flag-mapping.md": flag_mapping.page,
    "features.md": partial(between, "features.md", "features", findings.features_table),
    "metrics.md": metrics.whole_page,
}


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 if ``--check`` finds a page out of date."""
    parser = argparse.ArgumentParser(
        prog="scripts/reference",
        description="Write the pages of docs/ that are made from the code.",
        epilog="example: scripts/reference && git diff docs",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if one would change")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="by default all", default=[])
    args = parser.parse_args(argv)
    if unknown := set(args.pages) - PAGES.keys():
        parser.error(f"no such page: {', '.join(sorted(unknown))}; one of {', '.join(PAGES)}")
    old = outdated(args.pages or list(PAGES))
    for name, text in old.items():
        if args.check:
            print(f"docs/{name} is out of date: run scripts/reference", file=sys.stderr)
        else:
            (DOCS / name).write_text(text)
            print(f"written: docs/{name}")
    return 1 if old and args.check else 0


def outdated(names: Sequence[str]) -> dict[str, str]:
    """Return the present text of outdated pages, by name."""
    made = {name: PAGES[name]() for name in names}
    return {
        name: text
        for name, text in made.items()
        if not (DOCS / name).exists() or (DOCS / name).read_text() != text
    }
