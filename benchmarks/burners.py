"""Processes that take all the CPU they are given: a host that has other things to do."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_MOST = 64
_BURN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(100_000))"
"""Ends by itself when its parent is gone."""


def add_busy_argument(group: argparse._ActionsContainer, help_text: str = "") -> None:
    """``--busy N``: how many run beside what is measured."""
    group.add_argument(
        "--busy",
        type=int,
        default=0,
        metavar="N",
        help=f"processes that burn CPU beside it{help_text} (0)",
    )


def check_busy(count: int) -> None:
    """Raises: ValueError: with the flag."""
    if not 0 <= count <= _MOST:
        raise ValueError(f"--busy must be from 0 to {_MOST}")


@contextmanager
def burners(count: int) -> Iterator[None]:
    command = [sys.executable, "-c", _BURN, str(os.getpid())]
    burning = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for one in burning:
            one.kill()
            one.wait()
