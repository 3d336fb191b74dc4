"""Decides when the scheduler plans next, and requests the single wake-up that its driver keeps."""

from __future__ import annotations

import math
from enum import Enum

from sglang_sbs.scheduling import events as ev

_GO_ON_S = 0.001
"""Delay of the next part of work that is too long for one turn."""


class Replan(float, Enum):
    """When to plan after an event: a delay in seconds. One planning serves all events until
    then."""

    NOW = 0.0
    REPEATED = 0.001
    """All ranks report a pass, and each of its requests is answered. The first report is acted on
    at once, and the others are considered together."""
    ABANDONED = 0.02
    """Thousands of requests can be abandoned at once. All after the first are considered
    together."""
    ADOPTED = 0.05
    """The requests of a former scheduler are adopted one after the other."""
    NO = math.inf
    """The event cannot start a dispatch. Changes by time have their own wake-up."""


class Timers:
    """Owns the wake-up. Each :class:`WakeAt` replaces the one before."""

    def __init__(self) -> None:
        self.plan_s = math.inf
        """Time of the next planning without another event; infinity: never."""

    def plan_at(self, time_s: float, out: list[ev.Command]) -> None:
        """Set the time of the next planning."""
        if self.plan_s != time_s < math.inf:
            out.append(ev.WakeAt(time_s=time_s))
        self.plan_s = time_s

    def plan_by(self, time_s: float, out: list[ev.Command]) -> None:
        """Plan at this time at the latest."""
        if time_s < self.plan_s:
            self.plan_at(time_s, out)

    def go_on(self, now_s: float, out: list[ev.Command]) -> None:
        """Wake up for the rest of unfinished work. The time of planning stays, so it is requested
        again afterwards."""
        out.append(ev.WakeAt(time_s=min(now_s + _GO_ON_S, self.plan_s)))

    def fired(self, now_s: float, *, unfinished: bool) -> Replan:
        """Handle the wake-up. ``unfinished``: it may be that of :meth:`go_on`."""
        if unfinished and now_s < self.plan_s:
            return Replan.NO
        # The driver keeps no wake-up now, so the same time may be requested again.
        self.plan_s = math.inf
        return Replan.NOW
