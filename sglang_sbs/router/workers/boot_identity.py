"""Which engine process a worker is: boot ids in, a verdict out. No I/O, and no clock of its own.

The evidence is what EndForward says, which anybody can send, and the boot id in ``/server_info``,
which only the engine can. An engine on several nodes has a boot id on each of them, and
``/server_info`` shows that of the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

SILENT_AFTER_S = 5.0
"""No EndForward for this long (heartbeats come every second): the signal counts as lost."""
QUIET_S = 2.0
"""Nothing heard for this long from a worker that should say something: it is asked."""
MAX_REMEMBERED = 256


class BootVerdict(Enum):
    """On a boot id that a rank's EndForward bears."""

    BELIEVED = "believed"
    """The process that is known, or the first one of this rank."""
    RESTARTED = "restarted"
    """A later process: all that the earlier one had is gone."""
    UNCONFIRMED = "unconfirmed"
    """It contradicts ``/server_info``, which is to be read again; until then it is dropped."""
    DROPPED = "dropped"
    """A process that is over, or none of this worker's."""


@dataclass(slots=True, eq=False)
class BootIdentity:
    """Boot ids of one worker."""

    by_rank: dict[int, str] = field(default_factory=dict)
    """The boot id of each DP rank that was heard of."""
    retired: set[str] = field(default_factory=set)
    """Boot ids that are over, or were another engine's."""
    claimant: str = ""
    """A boot id that claims to be this worker and that ``/server_info`` has not confirmed."""
    recheck: bool = False
    """``/server_info`` must be read again before the worker is trusted."""
    asked_s: float = -math.inf
    """Time of the last read for such a reason."""
    restarted_s: float = -math.inf
    """Time when a new boot was last accepted."""
    strange_s: float = -math.inf
    """Time of the last report from another engine in its name (``diagnosis.why_stranger``)."""

    def judge(self, rank: int, boot_id: str, told: str, quiet_s: float) -> BootVerdict:
        """``told``: the boot id in ``/server_info``, empty where it shows none. ``quiet_s``: since
        the last EndForward that was believed.

        Without ``told`` no other boot is believed while the present one speaks. A boot that was
        taken to be over is believed again when no other speaks."""
        if boot_id in self.retired and boot_id != told and quiet_s < SILENT_AFTER_S:
            return BootVerdict.DROPPED
        known = self.by_rank.get(rank)
        if known in (None, boot_id):
            return BootVerdict.BELIEVED
        if known == told:
            return BootVerdict.UNCONFIRMED
        if boot_id != told and quiet_s < QUIET_S:
            return BootVerdict.DROPPED
        return BootVerdict.RESTARTED

    def accept(self, rank: int, boot_id: str) -> None:
        """It was judged to be this worker: it is not over."""
        if self.by_rank.get(rank) != boot_id:
            self.retired.discard(boot_id)

    def ask(self, claimant: str) -> None:
        """``/server_info`` is to be read again. ``claimant``: the boot id that is why, if any."""
        self.claimant = claimant or self.claimant
        self.recheck = True

    def confirm(self, before: str, now: str) -> tuple[bool, str]:
        """``/server_info`` was read, with these boot ids before and now. Whether another process
        runs there, and else the boot id that falsely claimed to be this worker (empty: none)."""
        self.recheck = False
        claimant, self.claimant = self.claimant, ""
        if before and now and before != now:
            return True, ""
        if claimant in ("", now):
            return False, ""
        self._retire([claimant])
        return False, claimant

    def restarted(self, now_s: float) -> None:
        """Another process runs there: the boot ids of the earlier one are over."""
        self._retire(self.by_rank.values())
        self.by_rank.clear()
        self.restarted_s = now_s

    def _retire(self, boot_ids: Iterable[str]) -> None:
        if len(self.retired) >= MAX_REMEMBERED:
            self.retired.clear()
        self.retired.update(boot_ids)
