"""Matches the ends of requests that the router sees with the request counts in a decode DP rank's
reports. A request that ended is subtracted from the last report until a report comes without it,
and not at all if such a report came before the end."""

from __future__ import annotations

from collections import deque

_FORGET_S = 2.0
"""Longest time, in seconds, to match an end with a drop in the count, or a drop with an end.
Afterwards the report alone counts: the request came from elsewhere (another router, a health
check), or the engine frees its KV late."""
_MOST = 1024
"""Limit on changes matched per report; larger ones cannot come from requests that ended."""


class Departures:
    """Requests that left one DP rank. Ends and reports are matched by number, because reports
    contain no ids of ended requests."""

    __slots__ = ("_early", "_ended", "_left", "_owed", "kv_tokens")

    def __init__(self) -> None:
        self._left: int | None = None
        """Requests that have left the rank since its boot, according to its last report."""
        self._ended: deque[tuple[float, int]] = deque()
        """Time of the last report before the end, and KV tokens, of each request that ended and is
        still in the last report."""
        self._early: deque[float] = deque(maxlen=_MOST)
        """For each request that is missing in the reports without a known end: time of the first
        report without it."""
        self._owed: deque[float] = deque(maxlen=_MOST)
        """For each request that came back after the rank had counted it as gone, or came without
        being accepted: time of that report. It will leave once more, which matches no end."""
        self.kv_tokens = 0
        """KV tokens of all requests that ended and are still in the last report."""

    def __len__(self) -> int:
        """Return the number of requests that ended and are still in the last report."""
        return len(self._ended)

    def on_ended(self, kv_tokens: int, reported_s: float) -> None:
        """Record the end of a request that the rank had accepted. ``kv_tokens``: KV that it held;
        ``reported_s``: time of the last report."""
        if self._early:
            self._early.popleft()
        else:
            self._ended.append((reported_s, kv_tokens))
            self.kv_tokens += kv_tokens

    def reported(self, accepted: int, present: int, now_s: float) -> None:
        """Record a report. ``accepted``: requests the rank has accepted since its boot;
        ``present``: how many of them are still there. ``now_s``: the driver's time."""
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
