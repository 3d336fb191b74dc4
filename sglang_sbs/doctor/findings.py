"""Findings: an observation, its severity, and the change that fixes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

CLUSTER = "cluster"
"""Subject of findings about several engines."""
ROUTER = "router"

GROUPS = (
    *("reach", "version", "plugin", "endforward", "limits", "flags", "pair", "latency"),
    *("bootstrap", "cache", "room", "security", "router", "probe"),
)
"""Topics of findings in the order of reports. The first word of a finding's id is its topic."""


class Severity(StrEnum):
    """``ok``: checked and fine. ``note``: worth knowing. ``warning``: works, but not as well as
    possible. ``error``: requests fail, or SBS cannot work."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


class Verdict(StrEnum):
    HEALTHY = "healthy"
    WARNINGS = "warnings"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check. ``subject``: an engine's URL, ``PREFILL -> DECODE``, :data:`CLUSTER`
    or :data:`ROUTER`."""

    id: str
    severity: Severity
    subject: str
    seen: str
    change: str
    """The flag or variable, and its new value; empty for ``ok``."""

    @property
    def group(self) -> str:
        return self.id.partition(".")[0]


class Wording(NamedTuple):
    severity: Severity
    change: str


class Findings(dict[str, Wording]):
    """The possible findings of a module, by id. Call the object to create a finding."""

    def __init__(self, text: str) -> None:
        """Parse a text of ``SEVERITY ID -> CHANGE`` entries; indented lines continue the previous
        one. Ids are stable, so tools may rely on them. ``docs/doctor.md`` explains each."""
        for paragraph in re.split(r"\n(?=\S)", text.strip()):
            head, _, change = " ".join(paragraph.split()).partition(" -> ")
            severity, name = head.split()
            self[name] = Wording(Severity(severity), change)

    def __call__(
        self, finding_id: str, subject: str, seen: str, change: str | None = None
    ) -> Finding:
        """Create a finding. ``seen``: the observation; ``change``: more specific advice, if known.
        Raises: KeyError, unknown id."""
        severity, advice = self[finding_id]
        return Finding(finding_id, severity, subject, seen, advice if change is None else change)


def count(findings: list[Finding]) -> dict[Severity, int]:
    return {
        severity: sum(found.severity is severity for found in findings) for severity in Severity
    }


def verdict(findings: list[Finding]) -> Verdict:
    """Return the verdict given by the worst finding."""
    counts = count(findings)
    if counts[Severity.ERROR]:
        return Verdict.BROKEN
    return Verdict.WARNINGS if counts[Severity.WARNING] else Verdict.HEALTHY
