"""When the silence of a prefill instance means that it is gone (paper section 4.1.2).

Silence counts from the predicted end of what runs, and must last several times the mean forward
time of the cluster, or of the instance itself where it is slower. While its first pass runs nobody
knows how fast it is, or whether it compiles: it is given more time."""

from __future__ import annotations

import math
from collections import deque

_FACTOR = 5.0
"""T_timeout in mean forward times."""
_NEW = 4.0
"""An instance that has reported the launch of its first pass is given so many times as long."""
_MOST_BUSY_S = 60.0
"""A pass is taken for this long at most, whatever is predicted."""
_LAST = 9
"""Of so many last passes the median is usual: a single long one is not."""


class Watchdog:
    """Of one instance. Its owner arms it, asks :attr:`due_s`, and says what it has learned."""

    def __init__(self, t_default_s: float) -> None:
        self.due_s = math.inf
        """When it fires; infinity: nothing is owed."""
        self.fires = 0
        self._cluster_s = t_default_s
        self._last_s: deque[float] = deque(maxlen=_LAST)
        self._own_s: float | None = None

    @property
    def timeout_s(self) -> float:
        """T_timeout: how much silence is too much."""
        return _FACTOR * max(self._own_s or 0.0, self._cluster_s)

    def on_cluster(self, mean_forward_s: float) -> None:
        """The usual forward time of all instances."""
        self._cluster_s = mean_forward_s

    def on_pass(self, forward_s: float) -> None:
        self._last_s.append(forward_s)
        self._own_s = sorted(self._last_s)[(len(self._last_s) - 1) // 2]

    def arm(self, now_s: float, *, busy_until_s: float, launched: bool) -> None:
        """A signal is owed: an answer to a request, or the end of what runs until then.
        ``launched``: the instance itself has said that it runs."""
        is_first = launched and self._own_s is None
        busy_until_s = min(max(now_s, busy_until_s), now_s + _MOST_BUSY_S)
        self.due_s = busy_until_s + self.timeout_s * (_NEW if is_first else 1.0)
