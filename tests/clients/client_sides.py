"""What the tests of clients compare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class Sides:
    """URLs of the router and of the ordinary engine."""

    router: str
    direct: str
    engines: list[str]
    """Of the prefill and the decode instance."""
    event_log: Path
