"""Where a DP rank's stream of EndForward messages stands: what is new, restarted or lost.

Owns the comparison of boot id, sequence number and accepted counter. Must not know what a report
says about tokens, or whether the rank is a prefill or a decode one.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_sbs.wire import EndForward


class Taken(NamedTuple):
    """What is known of a message before its content is read."""

    restarted: bool
    """The engine started anew: what was at the rank is gone."""
    lost_requests: int
    """Accepted requests whose ids were in messages that did not arrive (yet)."""


class ReportCursor:
    """One per DP rank. Messages may be lost, repeated, and arrive in any order."""

    __slots__ = ("_accepted", "_retired", "_seq", "boot_id", "reported_s")

    def __init__(self) -> None:
        self.boot_id = ""
        self.reported_s: float | None = None
        """When the newest message came; None: never."""
        self._seq = -1
        self._accepted = -1
        self._retired = ""

    def take(self, report: EndForward, now_s: float) -> Taken | None:
        """Move on to this message; None if it is older than what is known (also: a past boot)."""
        restarted = False
        if report.boot_id != self.boot_id:
            if report.boot_id == self._retired:
                return None
            restarted = self.boot_id != ""
            self._retired, self.boot_id = self.boot_id, report.boot_id
            self._seq = self._accepted = -1
        if report.seq <= self._seq:
            return None
        lost = 0
        if report.seq != self._seq + 1 and self._accepted >= 0:
            lost = max(0, report.accepted_requests - self._accepted - len(report.rids))
        self._seq = report.seq
        self._accepted = report.accepted_requests
        self.reported_s = now_s
        return Taken(restarted, lost)
