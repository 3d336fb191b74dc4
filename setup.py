"""Build step beside ``pyproject.toml``: ``patches/`` into a wheel, and the page of an index.

The patches stay at the top of the source tree, where people look for them, and exist only once. A
checkout that is used in place finds them there (``sglang_sbs/patching/patch_file.py``).

The README links to files beside it. On an index there are none, so there its links lead to the
repository: ``SGLANG_SBS_REPOSITORY=https://HOST/OWNER/NAME python -m build`` says where that is.
Without it the page has the words of such links only, and no pictures.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PATCHES = "patches"
PACKAGE = "sglang_sbs/patching"
REPOSITORY = "SGLANG_SBS_REPOSITORY"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


class BuildWithPatches(build_py):
    """``build_py`` that also copies the patch files."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, PACKAGE, PATCHES)
        target.mkdir(parents=True, exist_ok=True)
        for source in sorted(Path(PATCHES).glob("*.patch")):
            self.copy_file(str(source), str(target / source.name))


def index_page(readme: str, repository: str) -> str:
    """``readme`` without relative links; ``repository``: where they lead, may be empty."""

    def absolute(link: re.Match[str]) -> str:
        picture, words, path = link.groups()
        if not repository:
            return "" if picture else words
        kind = "raw" if picture else "blob"
        return f"{picture}[{words}]({repository.rstrip('/')}/{kind}/main/{path})"

    return _LINK.sub(absolute, readme)


if __name__ == "__main__":
    setup(
        cmdclass={"build_py": BuildWithPatches},
        long_description=index_page(
            Path("README.md").read_text("utf-8"), os.environ.get(REPOSITORY, "")
        ),
        long_description_content_type="text/markdown",
    )
