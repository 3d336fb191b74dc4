"""Moves requests in the queue by priority and SLO, by a limited amount of time.

The default policy sorts its queue by arrival time, with short prompts a little earlier. A priority
or an SLO moves a request by a bounded time in that order, so everything ages: a request never waits
behind one that arrived more than :meth:`Urgency.most_s` after it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

from sglang_sbs.scheduling.prefill.interval import IntervalController

if TYPE_CHECKING:
    from sglang_sbs.scheduling.request import Request

PriorityClass = Literal["low", "normal", "high"]
CLASSES: tuple[PriorityClass, ...] = get_args(PriorityClass)
MOST_PRIORITY = 5
"""Limit on a priority in either direction; larger ones are clamped."""
LEAST_SLO_S = 0.001
MOST_SLO_S = 3600.0
STEP_PASSES = 5.0
"""Least shift per priority level, in mean forward times; ``priority_step_s`` applies if it is
longer. With passes of seconds that step alone would have no effect."""
DIFFERENT_STEPS = 0.5
"""Requests differ in urgency if their shifts in the queue differ by more than this many steps.
Smaller differences come from prompt lengths, even with the same SLO and priority."""
REMEMBERED_S = 30.0
"""Seconds for which requests count as different in urgency after the last that differed."""


def class_of(priority: int) -> PriorityClass:
    """Return the class of a priority for metrics, which must not have a label value per number."""
    return "low" if priority < 0 else "high" if priority > 0 else "normal"


def clamped_priority(priority: int) -> int:
    return max(-MOST_PRIORITY, min(MOST_PRIORITY, priority))


def clamped_slo_s(slo_s: float | None) -> float | None:
    """Clamp an SLO to plausible values. None: there is none, or it is NaN."""
    if slo_s is None or math.isnan(slo_s):
        return None
    return max(LEAST_SLO_S, min(MOST_SLO_S, slo_s))


class Urgency:
    """Turns priority and SLO into the seconds by which a request moves in the queue."""

    def __init__(self, interval: IntervalController, step_s: float) -> None:
        """``step_s``: least shift per level of priority, in seconds."""
        self._interval = interval
        self._least_step_s = step_s
        self._last_shift_s = 0.0
        """Shift of the newest request (:meth:`shift_s`)."""
        self._last_tenant = ""
        self._differed_s = -math.inf
        """Arrival of the last request that differed in urgency or tenant from the one before it."""

    @property
    def step_s(self) -> float:
        return max(self._least_step_s, STEP_PASSES * self._interval.mean_forward_s)

    def matters(self, now_s: float) -> bool:
        """Return whether requests of different urgency or tenants have arrived recently."""
        return now_s < self._differed_s + REMEMBERED_S

    @property
    def most_s(self) -> float:
        """Largest difference, in seconds, between the arrivals of two requests that change places,
        apart from ageing by length."""
        return 2 * (MOST_PRIORITY + 1) * self.step_s

    def shift_s(self, request: Request, chunks: float) -> float:
        """Return the seconds by which a request moves in the queue; negative is sooner. ``chunks``:
        the uncached prompt in chunks.

        An SLO counts by its slack: the time that remains after the passes of the prompt itself.
        Without slack the request moves forward by a level of priority. A slack of one step changes
        nothing, and with a longer one the request moves back by at most a level."""
        asks = request.priority or request.ttft_slo_s is not None
        shift_s = self._asked_shift_s(request, chunks) if asks else 0.0
        if shift_s != self._last_shift_s or request.tenant != self._last_tenant:
            differs = abs(shift_s - self._last_shift_s) > DIFFERENT_STEPS * self.step_s
            if differs or request.tenant != self._last_tenant:
                self._differed_s = max(self._differed_s, request.arrived_s)
            self._last_shift_s, self._last_tenant = shift_s, request.tenant
        return shift_s

    def _asked_shift_s(self, request: Request, chunks: float) -> float:
        step_s = self.step_s
        shift_s = -request.priority * step_s
        if request.ttft_slo_s is not None:
            slack_s = request.ttft_slo_s - max(1.0, chunks) * self._interval.mean_forward_s
            shift_s += max(-step_s, min(step_s, slack_s - step_s))
        return shift_s
