"""Reading fields of an answer that may be anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def number(data: Mapping[str, Any], name: str) -> int:
    """A whole number; 0 if there is none."""
    value = data.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def text(data: Mapping[str, Any], name: str) -> str:
    """A string; empty if there is none."""
    value = data.get(name)
    return value if isinstance(value, str) else ""
