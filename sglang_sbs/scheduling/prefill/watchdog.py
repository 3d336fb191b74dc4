"""Decides when the silence of a prefill instance means that it is gone (paper section 4.1.2).

Silence counts from the predicted end of its passes. It must last several times the mean forward
time of the cluster, or the median of the instance's last passes if that is longer. The first pass
gets more time, because its speed is unknown and it may compile kernels."""

from __future__ import annotations

import math
from collections import deque

HEARTBEATS_S = 2.5
"""Least silence, in seconds, after which an instance that sends reports counts as silent: two
missed heartbeats."""
UNANSWERED_S = 30.0
"""Seconds since the last dispatch after which a silent instance's unanswered requests are given up,
and the instance gets requests again."""
LOST_S = 2.0
"""Age, in seconds, at which a dispatched request that its reporting rank has not named no longer
counts: its connection hangs, or the engine dropped it. The watchdog's timeout applies if longer."""
_FACTOR = 5.0
"""T_timeout of the paper (section 4.1.2), in mean forward times."""
_NEW = 4.0
"""Factor on T_timeout while an instance's first pass runs, which may compile kernels."""
_MOST_BUSY_S = 60.0
"""Limit, in seconds, on how far ahead the predicted end of the running passes counts."""
_LAST = 9
"""The instance's usual forward time is the median of this many last passes, so that a single long
one does not count."""


class Watchdog:
    """The watchdog of one instance. :class:`.PrefillInstance` arms it, checks :attr:`due_s`, and
    adds each measured forward time."""

    def __init__(self, t_default_s: float) -> None:
        self.due_s = math.inf
        """Time at which it fires; infinity if no report is expected."""
        self.fires = 0
        self._cluster_s = t_default_s
        self._last_s: deque[float] = deque(maxlen=_LAST)
        self._own_s: float | None = None

    @property
    def timeout_s(self) -> float:
        """T_timeout: the longest tolerated silence after the predicted end of the passes."""
        return _FACTOR * max(self._own_s or 0.0, self._cluster_s)

    def on_cluster(self, mean_forward_s: float) -> None:
        """Set the mean forward time of all instances, in seconds."""
        self._cluster_s = mean_forward_s

    def on_pass(self, forward_s: float) -> None:
        self._last_s.append(forward_s)
        self._own_s = sorted(self._last_s)[(len(self._last_s) - 1) // 2]

    def arm(self, now_s: float, *, busy_until_s: float, launched: bool) -> None:
        """Set :attr:`due_s`, the time at which it fires. ``busy_until_s``: predicted end of the
        running pass, on the scheduler's clock. ``launched``: its launch was reported, not
        presumed."""
        is_first = launched and self._own_s is None
        busy_until_s = min(max(now_s, busy_until_s), now_s + _MOST_BUSY_S)
        self.due_s = busy_until_s + self.timeout_s * (_NEW if is_first else 1.0)
