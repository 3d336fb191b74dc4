"""Schedules the updates of prefill instances (:meth:`.PrefillInstance.advance`): after a change, at
an instance's due time, and at every event while its passes are presumed or its launch is due."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable

from sglang_sbs.scheduling.prefill.instance import PrefillInstance


class Timetable:
    """Sorted list of times, at most one per number (an instance's position), for frequent changes
    of single times."""

    __slots__ = ("_time_of", "ordered")

    def __init__(self) -> None:
        self._time_of: dict[int, float] = {}
        self.ordered: list[tuple[float, int]] = []
        """Pairs of time and number, earliest first. Do not change it from outside."""

    def set(self, number: int, time_s: float | None) -> None:
        """Set the time of a number; None removes it."""
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
    """Decides which instances an event must update; covers all known instances, up or down."""

    def __init__(self) -> None:
        self._instances: list[PrefillInstance] = []
        self._number_of: dict[PrefillInstance, int] = {}
        self._changed: set[PrefillInstance] = set()
        """Instances to update at the next event."""
        self._due = Timetable()
        """Due times of the instances not in ``_changed``, by position in ``_instances``; an
        instance without a due time is missing."""

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
        """Update all changed or due instances. Returns when to call it again if nothing changes
        (infinity: never), and the instances that are due again at this moment. ``latency_s``:
        L_net."""
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
