"""How long before the predicted end of a pass the next batch leaves, learned from what it cost.

Owns the lead. Must not know instances, requests or predictions: it is told, per launch, how each
request of it fared.

A batch can fare badly in two ways that cost very different things, so two quantiles are tracked and
the larger one counts:

- It came after the pass had ended and found the instance *idle*. Everybody in it waits a moment
  longer, and so does whoever comes later, by 1 / (1 - load) in all. Leaving earlier by as much
  costs what arrives in between: it has to wait for the next instance instead. Both costs grow
  with the same number of requests, so the best share of idle landings is (1 - load) / (2 - load):
  a half when there is room, few when every moment counts.
- It was *left behind* by a launch that it was meant for, because only part of it had come or
  leftovers ran without it. That costs a whole pass and must be rare.
"""

from __future__ import annotations

from collections.abc import Sequence

LEFT_BEHIND_SHARE = 0.01
IDLE_STEP = 0.006
LEFT_BEHIND_STEP = 0.012
"""Steps of the estimates, in pass times."""
MOST = 0.8
"""The lead is at most this share of a pass."""
MARGIN_S = 0.003
"""Never less than this above the latency, the resolution of everything that is measured here."""


class DispatchLead:
    """Robbins-Monro estimates of the two quantiles, seconds."""

    def __init__(self) -> None:
        self._idle_s = self._left_behind_s = 0.0

    def lead_s(self, latency_s: float) -> float:
        """The lead, given L_net."""
        return max(self._idle_s, self._left_behind_s, latency_s + MARGIN_S)

    def observe(
        self,
        landed_s: Sequence[float],
        idled_s: Sequence[float],
        left_behind_s: Sequence[float],
        *,
        load: float,
        latency_s: float,
        pass_s: float,
    ) -> None:
        """One rank launched.

        Only what was sent about one lead ahead says whether the lead is right: a request sent later
        than that was expected to be late, one sent much earlier could not be.

        Args:
            landed_s: how long before the launch those were sent that were in time for it.
            idled_s: how long before the end of the last pass those were sent that came after it.
            left_behind_s: the same as ``landed_s`` for those that were left behind.
            load: share of the time that goes into tokens, 0 to 1.
            latency_s: L_net.
            pass_s: mean forward time.
        """
        lead_s = self.lead_s(latency_s)
        landed = sum(1 for s in landed_s if s <= 2 * lead_s)
        idled = sum(1 for s in idled_s if s >= 0.5 * lead_s)
        left_behind = sum(1 for s in left_behind_s if s >= 0.5 * lead_s)
        count = landed + idled + left_behind
        if count == 0:
            return
        idle_share = (1 - load) / (2 - load)
        self._idle_s += IDLE_STEP * pass_s * (idled / count - idle_share)
        self._left_behind_s += LEFT_BEHIND_STEP * pass_s * (left_behind / count - LEFT_BEHIND_SHARE)
        least_s = latency_s + MARGIN_S
        most_s = max(least_s, MOST * pass_s)
        self._idle_s = min(max(self._idle_s, least_s), most_s)
        self._left_behind_s = min(max(self._left_behind_s, least_s), most_s)
