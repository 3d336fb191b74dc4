"""Where a DP rank's stream of EndForward messages stands: what is new, restarted or lost.

Anybody can send in a rank's name, so a message that does not follow the one before it, or of a boot
that is over, is not believed while the present stream is heard. After a silence another takes its
place: the true one after a forged message, or that of an engine nobody heard for long."""

from __future__ import annotations

from typing import NamedTuple

from sglang_sbs.wire import EndForward

RESUME_S = 2.0
"""Silence after which another stream is believed. A rank that does not compute speaks once a
second."""
SILENT_S = 5.0
"""What a rank has said that does not compute is no fact any more after so long."""
MOST_LOST = 1024
"""A sequence number that is further ahead does not follow."""


class Taken(NamedTuple):
    """What is known of a message before its content is read."""

    restarted: bool
    """The engine started anew: what was at the rank is gone."""
    lost_requests: int
    """Accepted requests whose ids were in messages that did not arrive (yet)."""


class ReportCursor:
    """One per DP rank. Messages may be lost, repeated, forged, and arrive in any order."""

    __slots__ = ("_accepted", "_aside", "_retired", "_seq", "boot_id", "reported_s")

    def __init__(self) -> None:
        self.boot_id = ""
        self.reported_s: float | None = None
        """When the newest message came; None: never."""
        self._seq = -1
        self._accepted = -1
        self._retired = ""
        self._aside: int | None = None
        """The last sequence number that did not follow, since the stream fell silent."""

    def age_s(self, now_s: float) -> float | None:
        """Since the newest message; None: there was none."""
        return None if self.reported_s is None else now_s - self.reported_s

    def take(self, report: EndForward, now_s: float) -> Taken | None:
        """Move on to this message; None if it is not believed (older than what is known, of a past
        boot, far ahead)."""
        restarted = False
        silent = self.reported_s is None or now_s - self.reported_s >= RESUME_S
        if report.boot_id != self.boot_id:
            if report.boot_id == self._retired and not silent:
                return None
            restarted = self.boot_id != ""
            self._retired, self.boot_id = self.boot_id, report.boot_id
            self._seq = self._accepted = -1
        elif not _follows(report.seq, self._seq):
            if not silent:
                return None
            aside, self._aside = self._aside, report.seq
            if aside is None or not _follows(report.seq, aside):
                return None  # two in a row make a stream
            self._seq, self._accepted = report.seq - 1, -1
        self._aside = None
        lost = 0
        if report.seq != self._seq + 1 and self._accepted >= 0:
            lost = max(0, report.accepted_requests - self._accepted - len(report.rids))
        self._seq = report.seq
        self._accepted = report.accepted_requests
        self.reported_s = now_s
        return Taken(restarted, lost)


def _follows(seq: int, before: int) -> bool:
    return before < seq <= before + MOST_LOST
