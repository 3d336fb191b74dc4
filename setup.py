"""Build step beside ``pyproject.toml``: puts ``patches/`` into the package of a wheel.

They stay at the top of the source tree, where people look for them, and exist only once. A checkout
that is used in place finds them there (``sglang_sbs/patching/patch_file.py``).
"""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PATCHES = "patches"
PACKAGE = "sglang_sbs/patching"


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


setup(cmdclass={"build_py": BuildWithPatches})
