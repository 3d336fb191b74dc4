"""Decides when the scheduler plans next, and requests the single wake-up that its driver keeps."""

from __future__ import annotations

import math
from enum import Enum

from sglang_sbs.scheduling import events as ev

_GO_ON_S = 0.001
"""Seconds until the next part of work that is too long for one event."""


class Replan(float, Enum):
    """When to plan after an event: a delay in seconds. One planning serves all events until
    then."""

    NOW = 0.0
    REPEATED = 0.001
    """Another report or answer about a pass that was already acted on. Those of the other ranks and
    requests of the pass are considered together."""
    ABANDONED = 0.02
    """Thousands of requests can be abandoned at once. All after the first are considered
    together."""
    ADOPTED = 0.05
    """A former scheduler's requests come one after the other, and are considered together."""
    NO = math.inf
    """The event cannot start a dispatch. Changes by time have their own wake-up."""


class Timers:
    """Keeps the time of the next planning, and the driver's one wake-up for it: each
    :class:`WakeAt` replaces the one before."""

    def __init__(self) -> None:
        self.plan_s = math.inf
        """Time of the next planning without another event; infinity: never."""

    def plan_at(self, time_s: float, out: list[ev.Command]) -> None:
        """Set the time of the next planning. Appends a :class:`WakeAt` to ``out`` if it changed."""
        if self.plan_s != time_s < math.inf:
            out.append(ev.WakeAt(time_s=time_s))
        self.plan_s = time_s

    def plan_by(self, time_s: float, out: list[ev.Command]) -> None:
        """Plan at this time at the latest."""
        if time_s < self.plan_s:
            self.plan_at(time_s, out)

    def go_on(self, now_s: float, out: list[ev.Command]) -> None:
        """Request a wake-up for the rest of unfinished work, at the latest when planning is due."""
        out.append(ev.WakeAt(time_s=min(now_s + _GO_ON_S, self.plan_s)))

    def fired(self, now_s: float, *, unfinished: bool) -> Replan:
        """Handle the wake-up; return when to plan. ``unfinished``: work of :meth:`go_on`
        remains."""
        if unfinished and now_s < self.plan_s:
            return Replan.NO
        # The driver keeps no wake-up now, so the same time may be requested again.
        self.plan_s = math.inf
        return Replan.NOW
