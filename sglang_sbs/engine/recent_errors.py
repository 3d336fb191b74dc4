"""Decides when a hook that raises exceptions goes off."""

from __future__ import annotations

from collections import deque

WINDOW_S = 3600.0


class RecentErrors:
    """Counts the exceptions of a hook."""

    def __init__(self, most: int) -> None:
        """``most``: number of exceptions within ``WINDOW_S`` that is too many. Older ones do not
        matter: an engine runs for weeks."""
        self.count = 0
        """Number of exceptions so far."""
        self.too_many = False
        """Whether there were too many; stays True."""
        self._most = most
        self._times_s: deque[float] = deque(maxlen=most)

    def add(self, now_s: float) -> None:
        self.count += 1
        self._times_s.append(now_s)
        full = len(self._times_s) == self._most
        self.too_many |= full and now_s - self._times_s[0] < WINDOW_S
