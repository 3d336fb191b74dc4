"""The end of a process's log, for error messages."""

from __future__ import annotations

import os
from pathlib import Path

LAST_LOG_LINES = 20
_LAST_LOG_BYTES = 16384


def last_log_lines(log_path: Path, count: int = LAST_LOG_LINES) -> str:
    """The last `count` lines of a log, indented; says so when there are none."""
    try:
        with log_path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _LAST_LOG_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        lines = []
    return "\n".join(f"  {line}" for line in lines) or "  (empty)"
