"""A finding: what was seen, how bad that is, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sglang_sbs.doctor.catalogue.table import CATALOGUE, Severity

__all__ = ["CLUSTER", "ROUTER", "Finding", "Severity", "Verdict", "count", "finding", "verdict"]

CLUSTER = "cluster"
"""Subject of what concerns several engines."""
ROUTER = "router"


class Verdict(StrEnum):
    HEALTHY = "healthy"
    WARNINGS = "warnings"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """``subject`` is an engine's URL, ``PREFILL -> DECODE``, :data:`CLUSTER` or :data:`ROUTER`."""

    id: str
    subject: str
    seen: str
    change: str
    """Which flag or variable to set to what; empty for ``ok``."""

    @property
    def severity(self) -> Severity:
        return CATALOGUE[self.id].severity

    @property
    def group(self) -> str:
        """The part of the cluster it is about: the first word of the id."""
        return self.id.partition(".")[0]


def finding(finding_id: str, subject: str, seen: str, change: str | None = None) -> Finding:
    """A finding of the catalogue; ``change`` where the catalogue's advice can be more exact.

    Raises:
        KeyError: no such id.
    """
    return Finding(
        finding_id, subject, seen, CATALOGUE[finding_id].change if change is None else change
    )


def count(findings: list[Finding]) -> dict[Severity, int]:
    return {
        severity: sum(found.severity is severity for found in findings) for severity in Severity
    }


def verdict(findings: list[Finding]) -> Verdict:
    """The worst of them decides."""
    counts = count(findings)
    if counts[Severity.ERROR]:
        return Verdict.BROKEN
    return Verdict.WARNINGS if counts[Severity.WARNING] else Verdict.HEALTHY
