"""When each prefill instance is to be looked after again (:meth:`.PrefillInstance.advance`): when
it has changed, when its time has come, and at every event while its time depends on others."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable

from sglang_sbs.scheduling.prefill.instance import PrefillInstance


class Timetable:
    """Times of numbered things, at most one each, kept in order while single ones change."""

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


class Agenda:
    """Of all instances that are known, up or down."""

    def __init__(self) -> None:
        self._instances: list[PrefillInstance] = []
        self._number_of: dict[PrefillInstance, int] = {}
        self._changed: set[PrefillInstance] = set()
        """Or to be called at every event."""
        self._due = Timetable()
        """Of all others, by number."""

    def on_topology_change(self, instances: Iterable[PrefillInstance]) -> None:
        for instance in self._instances:
            instance.unsubscribe(self._changed)
        self._instances = list(instances)
        self._number_of = {instance: number for number, instance in enumerate(self._instances)}
        self._changed = set(self._instances)
        self._due = Timetable()
        for instance in self._instances:
            instance.subscribe(self._changed)

    def advance(self, now_s: float, latency_s: float) -> tuple[float, set[PrefillInstance]]:
        """Let happen what is due. Returns when to call again even if nothing changes, infinity for
        never; and who is due again at this very moment."""
        asked = self._changed.copy()
        self._changed.clear()
        for due_s, number in self._due.ordered:
            if due_s > now_s:
                break
            asked.add(self._instances[number])
        again: set[PrefillInstance] = set()
        next_s = math.inf
        for instance in asked:
            own_s = instance.advance(now_s, latency_s)
            rests = instance.rests
            is_due = rests and own_s < math.inf
            self._due.set(self._number_of[instance], own_s if is_due else None)
            if not rests:
                self._changed.add(instance)
                next_s = min(next_s, own_s)
            if own_s <= now_s:
                again.add(instance)
        if self._due.ordered:
            next_s = min(next_s, self._due.ordered[0][0])
        return next_s, again
