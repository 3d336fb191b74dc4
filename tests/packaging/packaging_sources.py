"""Copies the parts of the checkout that make the distributions."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
FOLDERS = ("sglang_sbs", "patches")


@dataclass(frozen=True)
class Built:
    """``python -m build``: the sdist, and the wheel made from that sdist."""

    wheel: Path
    sdist: Path
    log: str


def copy_sources(target: Path) -> Path:
    """Copy the files that a build may see away from the checkout, in which it would leave
    traces."""
    for name in SOURCES:
        shutil.copy(ROOT / name, target / name)
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    return target
