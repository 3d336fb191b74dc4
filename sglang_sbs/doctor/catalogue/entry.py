"""What a catalogue entry is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """``ok``: looked at and fine. ``note``: worth knowing. ``warning``: it works, worse than it
    could. ``error``: requests fail, or SBS cannot do its work."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Entry:
    severity: Severity
    meaning: str
    change: str = ""
