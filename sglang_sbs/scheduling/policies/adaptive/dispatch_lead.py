"""How long before the predicted end of a pass the next batch leaves, learned from what it cost.

Each launch shows how a batch fared. It can fare badly in two ways of very different cost, so two
quantiles are tracked, and the larger one counts:

- The batch arrived after the pass had ended and found the instance *idle*. Each request in it waits
  longer, and so do those that arrive later, by 1 / (1 - load) in all. Had the batch left earlier,
  the requests that arrive in between would have to wait for the next instance. Both costs grow with
  the same number of requests, so the best share of idle landings is (1 - load) / (2 - load): a half
  at low load, few near saturation.
- A launch *left behind* a part of the batch. The engine runs that part at once, in a pass all but
  empty, and whatever is sent next waits for it. That must be rare; leaving early costs little in
  comparison.
"""

from __future__ import annotations

import math

from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.observation import Observation


class DispatchLead:
    """Robbins-Monro estimates of the two quantiles, seconds, and of how idle instances split
    batches. The quantiles forget as they learn: one step takes back another."""

    def __init__(self) -> None:
        self._idle_s = 0.0
        self.left_behind_s = 0.0
        """The estimate from split batches."""
        self._torn_share = 0.0
        """Usual share of a batch that an idle instance leaves behind: requests arrive one by one,
        and the engine starts with the first."""
        self._torn_s = 0.0
        """When that share was last updated."""
        self._leaked_s = 0.0
        """When the left-behind estimate last fell."""

    def forget(self) -> None:
        """Learn both quantiles anew, from the dispatch latency up."""
        self._idle_s = self.left_behind_s = 0.0

    def lead_s(self, latency_s: float) -> float:
        """The lead, seconds. ``latency_s``: L_net."""
        return max(self._idle_s, self.left_behind_s, latency_s + TUNING.lead_margin_s)

    @property
    def whole(self) -> float:
        """How far a batch may be trusted to start whole on an idle instance, 0 to 1."""
        return max(0.0, 1 - self._torn_share / TUNING.torn_most_share)

    def observe(
        self,
        seen: Observation,
        now_s: float,
        *,
        ranks: int,
        load: float,
        latency_s: float,
        pass_s: float,
    ) -> None:
        """Take in how the requests of a rank fared in a launch (``seen``).

        Only requests that were sent about one lead ahead show whether the lead is right: a request
        sent later was expected to be late, and one sent much earlier could not be.

        Args:
            ranks: DP ranks of the instance. Each reports the launch.
            load: share of the time that goes into tokens, 0 to 1.
            latency_s: L_net.
            pass_s: mean forward time.
        """
        self._torn_share *= math.exp(-(now_s - self._torn_s) / TUNING.torn_forget_s)
        self._torn_s = now_s
        if seen.torn is not None:
            self._torn_share += TUNING.torn_step * (seen.torn - self._torn_share)
        lead_s = self.lead_s(latency_s)
        self._leak(latency_s, now_s)
        landed = sum([s <= 2 * lead_s for s in seen.landed_s])
        idled = sum([s >= lead_s / 2 for s in seen.idled_s])
        left_behind = sum([s >= lead_s / 2 for s in seen.left_behind_s])
        count = landed + idled + left_behind
        if count == 0:
            return  # as most reports
        beyond_s = max(TUNING.lead_margin_s, self.left_behind_s - latency_s)
        torn_share = TUNING.torn_share * beyond_s / pass_s
        idle_share = (1 - load) / (2 - load)
        least_s = latency_s + TUNING.lead_margin_s
        most_s = max(least_s, pass_s)
        idle_step_s = TUNING.lead_step * pass_s * (idled / count - idle_share)
        torn_step_s = TUNING.lead_step * pass_s * ((left_behind > 0) - torn_share / max(1, ranks))
        self._idle_s = _stepped(self._idle_s, idle_step_s, least_s, most_s)
        self.left_behind_s = _stepped(self.left_behind_s, torn_step_s, least_s, most_s)

    def _leak(self, latency_s: float, now_s: float) -> None:
        """Few messages report a split batch, so the estimate also falls with time."""
        kept = math.exp(-max(0.0, now_s - self._leaked_s) / TUNING.lead_leak_s)
        self._leaked_s = now_s
        least_s = latency_s + TUNING.lead_margin_s
        if self.left_behind_s > least_s:
            self.left_behind_s = least_s + kept * (self.left_behind_s - least_s)


def _stepped(estimate_s: float, step_s: float, least_s: float, most_s: float) -> float:
    """A step up starts from ``least_s``. That is not remembered, so the estimate falls again when
    the latency does."""
    if step_s > 0:
        estimate_s = max(estimate_s, least_s)
    return min(max(0.0, estimate_s + step_s), most_s)
