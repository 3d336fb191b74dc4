"""Which code a run was made with."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import sglang_sbs

PACKAGE = Path(sglang_sbs.__file__).resolve().parent
_CODE = (".", "../benchmarks")
_TIMEOUT_S = 10.0
_DIGITS = 10


def revision(package: Path = PACKAGE) -> str:
    """Commit of the checkout that the package is in, with a digest of what was changed since; empty
    for a package that is installed otherwise.
    """
    # An environment may lie within another project's checkout: the package must be part of it.
    if not _git(package, "ls-files", "--", "__init__.py"):
        return ""
    commit = _git(package, "rev-parse", "HEAD").strip()[:_DIGITS]
    if not _git(package, "status", "--porcelain", "--", *_CODE):
        return commit
    digest = hashlib.sha256(_git(package, "diff", "HEAD", "--", *_CODE).encode()).hexdigest()
    return f"{commit} with changes {digest[:_DIGITS]}"


def _git(folder: Path, *words: str) -> str:
    """Return Git's output; nothing where there is no Git or no checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")
