"""A finding: what was seen, how bad that is, and what to change."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

CLUSTER = "cluster"
"""Subject of what concerns several engines."""
ROUTER = "router"

GROUPS = (
    *("reach", "version", "plugin", "endforward", "limits", "flags", "pair", "latency"),
    *("bootstrap", "cache", "room", "security", "router", "probe"),
)
"""What findings are about, in the order of reports: the first word of an id."""


class Severity(StrEnum):
    """``ok``: looked at and fine. ``note``: worth knowing. ``warning``: it works, worse than it
    could. ``error``: requests fail, or SBS cannot do its work."""

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
    """``subject`` is an engine's URL, ``PREFILL -> DECODE``, :data:`CLUSTER` or :data:`ROUTER`."""

    id: str
    severity: Severity
    subject: str
    seen: str
    change: str
    """Which flag or variable to set to what; empty for ``ok``."""

    @property
    def group(self) -> str:
        return self.id.partition(".")[0]


class Wording(NamedTuple):
    severity: Severity
    change: str
    """What to do about it."""


class Findings(dict[str, Wording]):
    """What a module can find, by id. Calling it makes one."""

    def __init__(self, text: str) -> None:
        """``SEVERITY ID -> CHANGE`` each; indented lines go on with the one before. Ids are stable:
        tools may rely on them. What each means: ``docs/doctor.md``."""
        for paragraph in re.split(r"\n(?=\S)", text.strip()):
            head, _, change = " ".join(paragraph.split()).partition(" -> ")
            severity, name = head.split()
            self[name] = Wording(Severity(severity), change)

    def __call__(
        self, finding_id: str, subject: str, seen: str, change: str | None = None
    ) -> Finding:
        """``change``: where the advice can be more exact. Raises: KeyError, no such id."""
        severity, advice = self[finding_id]
        return Finding(finding_id, severity, subject, seen, advice if change is None else change)


def count(findings: list[Finding]) -> dict[Severity, int]:
    return {one: sum(found.severity is one for found in findings) for one in Severity}


def verdict(findings: list[Finding]) -> Verdict:
    """The worst of them decides."""
    counts = count(findings)
    if counts[Severity.ERROR]:
        return Verdict.BROKEN
    return Verdict.WARNINGS if counts[Severity.WARNING] else Verdict.HEALTHY
