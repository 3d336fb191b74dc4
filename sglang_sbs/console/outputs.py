"""Checks the output files of a long run before it begins."""

from __future__ import annotations

from pathlib import Path


def try_to_write(path: Path) -> None:
    """Check that a file can be written, and create its folder. Existing files stay unchanged, and
    no file is left behind. Raises: OSError, it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    if new or path.is_dir() or path.is_file():
        path.open("ab").close()
    if new:
        path.unlink()
