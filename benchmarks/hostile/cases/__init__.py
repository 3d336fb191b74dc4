"""The cases. Every module of this package is read; each adds its own with ``@case``."""

from __future__ import annotations

import importlib
import pkgutil

from benchmarks.hostile.case import CASES, Case


def all_cases() -> dict[str, Case]:
    """Return the cases of every module here, by name."""
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda found: found.name):
        importlib.import_module(f"{__name__}.{module.name}")
    return CASES
