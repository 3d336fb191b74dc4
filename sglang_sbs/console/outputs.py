"""Files that a long run is going to write, looked at before it begins."""

from __future__ import annotations

from pathlib import Path


def try_to_write(path: Path) -> None:
    """Make its folder if there is none. Leaves a file as it is, and none where there was none.
    Raises: OSError, it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    if new or path.is_dir() or path.is_file():
        path.open("ab").close()
    if new:
        path.unlink()
