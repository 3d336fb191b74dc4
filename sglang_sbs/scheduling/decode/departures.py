"""Requests that left a decode DP rank: what the router saw end, matched to what the rank counts.
Each is taken off the last report exactly once, until a report comes without it, and not at all if
that report was the faster one."""

from __future__ import annotations

from collections import deque

_FORGET_S = 2.0
"""Longest time one side waits for the other. What is never matched is not the router's (another
one's request, a health check) or will not be freed soon: then the report alone is right."""
_MOST = 1024
"""More than these at once is not counted: whatever it means, it is not requests that ended."""


class Departures:
    """One per DP rank. Requests leave one by one, so only their number has to agree."""

    __slots__ = ("_early", "_ended", "_left", "_owed", "kv_tokens")

    def __init__(self) -> None:
        self._left: int | None = None
        """Requests that have left the rank since its boot, by its last report."""
        self._ended: deque[tuple[float, int]] = deque()
        """Ended and still contained in the last report: since when, and their KV tokens."""
        self._early: deque[float] = deque(maxlen=_MOST)
        """Gone from the last report and not known to have ended: since when."""
        self._owed: deque[float] = deque(maxlen=_MOST)
        """What the rank counted as gone and came back, or came without being accepted: since when.
        It will leave once more."""
        self.kv_tokens = 0
        """Of all that ended and are still contained in the last report."""

    def __len__(self) -> int:
        """How many ended and are still contained in the last report."""
        return len(self._ended)

    def ended(self, kv_tokens: int, reported_s: float) -> None:
        """A request that the rank had accepted is over. ``kv_tokens``: what it occupied.
        ``reported_s``: when the last report came."""
        if self._early:
            self._early.popleft()
        else:
            self._ended.append((reported_s, kv_tokens))
            self.kv_tokens += kv_tokens

    def reported(self, accepted: int, present: int, now_s: float) -> None:
        """A report came. ``accepted``: requests the rank has accepted since its boot; ``present``:
        those of them that are still there. ``now_s``: the driver's time."""
        left, before = accepted - present, self._left
        self._left = left
        if before is None:
            return
        for _ in range(min(before - left, _MOST)):
            if self._early:
                self._early.pop()
            else:
                self._owed.append(now_s)
        for _ in range(min(left - before, _MOST)):
            if self._owed:
                self._owed.popleft()
            elif self._ended:
                self._forget_oldest()
            else:
                self._early.append(now_s)
        oldest_s = now_s - _FORGET_S
        while self._ended and self._ended[0][0] < oldest_s:
            self._forget_oldest()
        for times in (self._early, self._owed):
            while times and times[0] < oldest_s:
                times.popleft()

    def _forget_oldest(self) -> None:
        self.kv_tokens -= self._ended.popleft()[1]
