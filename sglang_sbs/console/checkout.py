"""Modules that only a checkout has: ``benchmarks/`` and ``tools/``, next to the package."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

CHECKOUT = Path(__file__).resolve().parents[2]


class NotACheckoutError(Exception):
    """The module exists only in a checkout, and the package is an installed wheel."""


def checkout_module(name: str) -> ModuleType:
    """Import a module of ``benchmarks`` or ``tools``. Raises: NotACheckoutError, the package is an
    installed wheel."""
    if not CHECKOUT.joinpath(*name.split(".")).with_suffix(".py").is_file():
        raise NotACheckoutError(name)
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    return import_module(name)
