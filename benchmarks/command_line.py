"""Helpers that the commands of the benchmarks share."""

from __future__ import annotations

import argparse
import math
import resource
import sys
from collections.abc import Callable
from pathlib import Path

from sglang_sbs.console.outputs import try_to_write


def command_parser(prog: str, about: str, epilog: str) -> argparse.ArgumentParser:
    """A parser whose help keeps the epilog's lines as they are written."""
    return argparse.ArgumentParser(
        prog=prog,
        description=about,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def interruptible(prog: str, run: Callable[[], int]) -> int:
    """Return the result of ``run``; if it is interrupted, print a line on standard error and return
    130."""
    try:
        return run()
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130


def raise_file_limit() -> float:
    """Let this process and those it starts open as many files as they may; how many that is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return math.inf if hard == resource.RLIM_INFINITY else hard


def make_writable(path: Path) -> None:
    """Check that a file can be written; the message of the error names the path."""
    try:
        try_to_write(path)
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path}: {error.strerror}") from error
