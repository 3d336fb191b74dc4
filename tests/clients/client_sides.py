"""Helpers of the tests that compare clients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAIT_S = 60.0


@dataclass
class Sides:
    """URLs of the router and of the ordinary engine."""

    router: str
    direct: str
    engines: list[str]
    """URLs of the prefill and the decode instance."""
    event_log: Path


def without_ids(value: Any, names: tuple[str, ...] = ("id",)) -> Any:
    """``names``: of what is made up anew for each answer."""
    if isinstance(value, dict):
        kept = {name: part for name, part in value.items() if name not in names}
        return {name: without_ids(part, names) for name, part in kept.items()}
    return [without_ids(part, names) for part in value] if isinstance(value, list) else value
