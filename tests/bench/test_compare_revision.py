"""Every row of `scripts/compare-routers` says which code it is of."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.compare_routers.runs.revision import revision


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@x")
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


def test_the_revision_is_of_the_package_and_tells_changes(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert revision(package) == ""
    git(tmp_path, "init", "-q")
    # In a checkout, but no part of it: as an environment within another project.
    assert revision(package) == ""
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "x")
    clean = revision(package)
    assert len(clean) == 10
    (package / "__init__.py").write_text("1")
    before = revision(package)
    (package / "__init__.py").write_text("2")
    assert before.startswith(f"{clean} with changes ")
    assert revision(package) not in (before, clean)
