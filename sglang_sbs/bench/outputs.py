"""Files that a measurement is going to write, looked at before it begins.

Owns the folder and the question. Must not know what is written.
"""

from __future__ import annotations

from pathlib import Path


def make_writable(path: Path) -> None:
    """Make its folder if there is none. A file that is there stays as it is.

    Raises:
        OSError: it cannot be written; the message names the path.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path}: {error.strerror}") from error
