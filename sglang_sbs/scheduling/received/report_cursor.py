"""Tracks a DP rank's stream of EndForward messages: which are new, restarted or lost.

Any host can send in a rank's name. A message that does not follow the previous one, or is of a
former boot, is rejected while the present stream is active. After a silence another stream takes
over: the true one after a forged message, or one whose messages did not arrive for long."""

from __future__ import annotations

from typing import NamedTuple

from sglang_sbs.wire import EndForward

RESUME_S = 2.0
"""Seconds without an accepted message of a rank after which messages that do not follow it
(numbers, or a former boot id) may take over. An idle rank reports once a second."""
SILENT_S = 5.0
"""Seconds without a new report after which a rank's last one is discarded. On prefill, the time of
a running pass is not counted."""
MOST_LOST = 1024
"""Largest step in sequence numbers that still counts as the same stream."""


class Taken(NamedTuple):
    """Result of :meth:`ReportCursor.take` for an accepted message."""

    restarted: bool
    """The message has a new boot id: the engine restarted, and lost everything at the rank."""
    lost_requests: int
    """Number of requests that the rank accepted in messages that did not arrive (yet)."""


class ReportCursor:
    """Position in a DP rank's message stream. Messages may be lost, repeated, forged, reordered."""

    __slots__ = ("_accepted", "_aside", "_retired", "_seq", "boot_id", "reported_s")

    def __init__(self) -> None:
        self.boot_id = ""
        self.reported_s: float | None = None
        """Time of the newest accepted message; None: there was none."""
        self._seq = -1
        self._accepted = -1
        self._retired = ""
        self._aside: int | None = None
        """Number of the last message that did not follow the stream, since its silence; None: no
        message. A message that follows this one starts the new stream."""

    def age_s(self, now_s: float) -> float | None:
        """Return the seconds since the newest accepted message; None: there was none."""
        return None if self.reported_s is None else now_s - self.reported_s

    def take(self, report: EndForward, now_s: float) -> Taken | None:
        """Advance to a message, if it is accepted. None: it is outdated, too far ahead, or of a
        former boot."""
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
                return None  # two consecutive numbers make a stream
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
