"""Decides who may wait: how much priority and SLO move a request in the queue.

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
"""Priorities beyond -5 and 5 count as these."""
LEAST_SLO_S = 0.001
MOST_SLO_S = 3600.0
STEP_PASSES = 5.0
"""A level of priority is worth at least so many mean forward times: with passes of seconds the
configured step would be lost among them."""
DIFFERENT_STEPS = 0.5
"""Requests whose places shift by more than so many steps differ in urgency: with one SLO for all of
them they do not."""
REMEMBERED_S = 30.0
"""Requests are taken to differ in urgency for so long after the last that did."""


def class_of(priority: int) -> PriorityClass:
    """The class a request is counted in: metrics must not have a label value per number."""
    return "low" if priority < 0 else "high" if priority > 0 else "normal"


def clamped_priority(priority: int) -> int:
    return max(-MOST_PRIORITY, min(MOST_PRIORITY, priority))


def clamped_slo_s(slo_s: float | None) -> float | None:
    """The nearest SLO that a request can mean. NaN means none."""
    if slo_s is None or math.isnan(slo_s):
        return None
    return max(LEAST_SLO_S, min(MOST_SLO_S, slo_s))


class Urgency:
    """Turns priority and SLO into seconds of waiting."""

    def __init__(self, interval: IntervalController, step_s: float) -> None:
        """``step_s``: what a level of priority is worth, at least."""
        self._interval = interval
        self._least_step_s = step_s
        self._last_shift_s = 0.0
        """Of the newest request, as is the next."""
        self._last_tenant = ""
        self._differed_s = -math.inf
        """When the last request came that differed from the one before it."""

    @property
    def step_s(self) -> float:
        return max(self._least_step_s, STEP_PASSES * self._interval.mean_forward_s)

    def matters(self, now_s: float) -> bool:
        """Whether requests of different urgency, or of different tenants, come at present."""
        return now_s < self._differed_s + REMEMBERED_S

    @property
    def most_s(self) -> float:
        """The most by which two requests change places, besides the ageing by length."""
        return 2 * (MOST_PRIORITY + 1) * self.step_s

    def shift_s(self, request: Request, chunks: float) -> float:
        """Seconds to add to the arrival time for the place in the queue; negative is sooner.
        ``chunks``: the uncached prompt in chunks.

        An SLO counts by its slack, which is what it leaves after the passes that the prompt takes
        anyway. No slack is worth a level of priority; a slack of one step changes nothing, and a
        longer one lets others go first, at most as if the request were a level lower."""
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
