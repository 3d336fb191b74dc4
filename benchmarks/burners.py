"""Processes that take all the CPU they are given: a host that has other things to do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MOST = 64
_BURN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(100_000))"
"""Ends by itself when its parent is gone."""


@contextmanager
def burners(count: int) -> Iterator[None]:
    """Run ``count`` of them until the end of the block."""
    command = [sys.executable, "-c", _BURN, str(os.getpid())]
    burning = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()
