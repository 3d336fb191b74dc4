"""Times of numbered things, kept in order while single ones change."""

from __future__ import annotations

from bisect import bisect_left, insort


class Timetable:
    """At most one time for each number."""

    __slots__ = ("_time_of", "ordered")

    def __init__(self) -> None:
        self._time_of: dict[int, float] = {}
        self.ordered: list[tuple[float, int]] = []
        """Time and number, the earliest first. Not to be changed from outside."""

    def set(self, number: int, time_s: float | None) -> None:
        """Its time is this one now; None: it has none."""
        before_s = self._time_of.get(number)
        if time_s == before_s:
            return
        if before_s is not None:
            del self.ordered[bisect_left(self.ordered, (before_s, number))]
            del self._time_of[number]
        if time_s is not None:
            self._time_of[number] = time_s
            insort(self.ordered, (time_s, number))
