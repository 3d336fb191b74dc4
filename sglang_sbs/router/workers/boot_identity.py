"""Decides by boot ids whether a report comes from the engine process that runs at a worker's URL.
Sans-I/O.

Any machine that reaches the port can send EndForward with a boot id. Only the engine itself can
show one in ``/server_info``, so that one is the proof. An engine on several nodes has a boot id per
node, and ``/server_info`` shows that of the first node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

SILENT_AFTER_S = 5.0
"""EndForward counts as lost after this long without a message. Heartbeats come every second."""
QUIET_S = 2.0
"""After this long without a report, another boot of a worker may be accepted."""
MAX_REMEMBERED = 256


class BootVerdict(Enum):
    """Judgement of the boot id in a rank's report."""

    BELIEVED = "believed"
    """The known process, or the first process of this rank."""
    RESTARTED = "restarted"
    """A later process: the requests and the cache of the earlier one are gone."""
    UNCONFIRMED = "unconfirmed"
    """The id contradicts ``/server_info``, which must be read again; the report is dropped."""
    DROPPED = "dropped"
    """A process that has ended, or an engine that is not this worker's."""


@dataclass(slots=True, eq=False)
class BootIdentity:
    """Boot ids in the reports for one worker, and what is known of each."""

    by_rank: dict[int, str] = field(default_factory=dict)
    """The boot id of each DP rank that has reported."""
    retired: set[str] = field(default_factory=set)
    """Boot ids of ended processes and of other engines."""
    claimant: str = ""
    """Boot id in reports for this worker that ``/server_info`` has not confirmed; empty: none."""
    recheck: bool = False
    """``/server_info`` must be read again before the worker is trusted."""
    asked_s: float = -math.inf
    """Time when another read of a healthy worker's ``/server_info`` was last requested."""
    restarted_s: float = -math.inf
    """Time when a new boot was last accepted."""
    strange_s: float = -math.inf
    """Time of the last report in which another engine names this worker
    (``diagnosis.why_stranger``)."""

    def judge(self, rank: int, boot_id: str, shown: str, quiet_s: float) -> BootVerdict:
        """Judge the boot id in a report of ``rank``.

        ``shown``: the boot id in ``/server_info``, empty if the release does not show it.
        ``quiet_s``: seconds since the last accepted report. If ``shown`` is empty, another boot id
        is accepted only after the known process has been silent for a while. A retired boot id is
        accepted again if no other process reports."""
        if boot_id in self.retired and boot_id != shown and quiet_s < SILENT_AFTER_S:
            return BootVerdict.DROPPED
        known = self.by_rank.get(rank)
        if known in (None, boot_id):
            return BootVerdict.BELIEVED
        if known == shown:
            return BootVerdict.UNCONFIRMED
        if boot_id != shown and quiet_s < QUIET_S:
            return BootVerdict.DROPPED
        return BootVerdict.RESTARTED

    def accept(self, rank: int, boot_id: str) -> None:
        """Record that a boot id was judged to be this worker's; it no longer counts as retired."""
        if self.by_rank.get(rank) != boot_id:
            self.retired.discard(boot_id)

    def ask(self, claimant: str) -> None:
        """Request another read of ``/server_info``. ``claimant``: the boot id to check, if any."""
        self.claimant = claimant or self.claimant
        self.recheck = True

    def confirm(self, before: str, now: str) -> tuple[bool, str]:
        """Process a new read of ``/server_info``, with the boot ids before and now. Returns whether
        another process runs there; if not, also the claimant that is not this worker (empty:
        none)."""
        self.recheck = False
        claimant, self.claimant = self.claimant, ""
        if before and now and before != now:
            return True, ""
        if claimant in ("", now):
            return False, ""
        self._retire([claimant])
        return False, claimant

    def restarted(self, now_s: float) -> None:
        """Retire the boot ids of the earlier process, because another one runs there now."""
        self._retire(self.by_rank.values())
        self.by_rank.clear()
        self.restarted_s = now_s

    def _retire(self, boot_ids: Iterable[str]) -> None:
        if len(self.retired) >= MAX_REMEMBERED:
            self.retired.clear()
        self.retired.update(boot_ids)
