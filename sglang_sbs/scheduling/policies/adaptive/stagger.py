"""Keeps the starts of passes apart: the stagger of the paper (section 4.1), softly."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

_EPSILON_S = 1e-9


class PlannedStarts:
    """When the passes start whose batches left of late."""

    __slots__ = ("at_s",)

    def __init__(self) -> None:
        self.at_s: list[float] = []
        """In order, seconds."""

    def add(self, start_s: float, forget_s: float) -> None:
        """Another; those before ``forget_s`` keep nobody away any more."""
        del self.at_s[: bisect_left(self.at_s, forget_s)]
        insort(self.at_s, start_s)

    def first_apart(self, start_s: float, apart_s: float) -> float:
        """The first time from then on that is ``apart_s`` or more from all of them."""
        least_s = apart_s - _EPSILON_S
        for planned_s in self.at_s[bisect_right(self.at_s, start_s - least_s) :]:
            if planned_s - start_s >= least_s:
                break
            start_s = planned_s + apart_s
        return start_s
