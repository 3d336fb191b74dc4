"""Learns how long before the predicted end of a pass the next batch should leave: the dispatch
lead.

Each launch shows whether a batch was in time. There are two kinds of failure with very different
costs. A quantile is tracked for each, and the larger one is the lead:

- The batch arrived after the pass had ended and found the instance *idle*. Each request in it waits
  longer, and so do later requests, by 1 / (1 - load) in all. An earlier batch, on the other hand,
  leaves more requests to the next instance: those that arrive in between. Both costs grow with the
  same number of requests, so the best share of idle landings is (1 - load) / (2 - load). That is a
  half at low load, and close to 0 near saturation.
- A launch *left behind* a part of the batch. The engine runs that part at once, in an almost empty
  pass, and the requests sent next wait for it. This must be rare; leaving early costs little in
  comparison.
"""

from __future__ import annotations

import math

from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.observation import Observation


class DispatchLead:
    """Robbins-Monro estimates of the two quantiles whose maximum is the dispatch lead, in seconds,
    and of the share of a batch that idle instances leave behind. The quantiles forget as they
    learn, because a step in one direction undoes one in the other. Split batches are rare, so their
    estimate also falls once more of them are due than are seen."""

    def __init__(self) -> None:
        self._idle_s = 0.0
        self.left_behind_s = 0.0
        """The lead's estimate from split batches, in seconds; 0: not learned."""
        self._split_share = 0.0
        """Smoothed share of a batch that misses the launch on an idle instance, 0 to 1: requests
        arrive one by one, and the engine starts with the first."""
        self._split_s = 0.0
        """Time when ``_split_share`` was last updated."""
        self._splits_due = 0.0
        """Number of split batches that the tolerated share predicts since the last one."""

    def forget(self) -> None:
        """Discard both quantiles, so that the lead starts again at the dispatch latency."""
        self._idle_s = self.left_behind_s = 0.0

    def lead_s(self, latency_s: float) -> float:
        """Return the dispatch lead in seconds, at least L_net (``latency_s``) plus a margin."""
        return max(self._idle_s, self.left_behind_s, latency_s + TUNING.lead_margin_s)

    @property
    def whole(self) -> float:
        """Confidence that a batch starts whole on an idle instance, 0 to 1, from past batches."""
        return max(0.0, 1 - self._split_share / TUNING.split_most_share)

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
        """Learn from the samples of a rank's report of a launch (``seen``), which show the requests
        that were in time for it and those that were not.

        Only requests sent about one lead ahead show whether the lead is right. A request sent later
        was expected to be late, and one sent much earlier could not be late.

        Args:
            ranks: number of DP ranks of the instance; each reports the launch.
            load: share of the time that goes into tokens, 0 to 1.
            latency_s: L_net.
            pass_s: mean forward time.
        """
        self._split_share *= math.exp(-(now_s - self._split_s) / TUNING.split_forget_s)
        self._split_s = now_s
        if seen.split_share is not None:
            self._split_share += TUNING.split_step * (seen.split_share - self._split_share)
        lead_s = self.lead_s(latency_s)
        landed = sum([s <= 2 * lead_s for s in seen.landed_s])
        idled = sum([s >= lead_s / 2 for s in seen.idled_s])
        left_behind = sum([s >= lead_s / 2 for s in seen.left_behind_s])
        count = landed + idled + left_behind
        if count == 0:
            return  # as most reports
        beyond_s = max(TUNING.lead_margin_s, self.left_behind_s - latency_s)
        due = TUNING.split_share * beyond_s / pass_s / max(1, ranks)
        idle_share = (1 - load) / (2 - load)
        least_s = latency_s + TUNING.lead_margin_s
        most_s = max(least_s, pass_s)
        idle_step_s = TUNING.lead_step * pass_s * (idled / count - idle_share)
        split_step_s = TUNING.lead_step * pass_s * ((left_behind > 0) - due)
        self._idle_s = _stepped(self._idle_s, idle_step_s, least_s, most_s)
        self.left_behind_s = _stepped(self.left_behind_s, split_step_s, least_s, most_s)
        self._splits_due = 0.0 if left_behind else self._splits_due + due
        if self._splits_due > 1 and self.left_behind_s > least_s:
            # Splits stopped for longer than chance explains: the network or host became faster.
            self.left_behind_s = least_s + math.exp(-due) * (self.left_behind_s - least_s)


def _stepped(estimate_s: float, step_s: float, least_s: float, most_s: float) -> float:
    """Return an estimate after a step, from 0 to ``most_s``. A step up starts from ``least_s`` at
    least; steps down may lead below it, so that the estimate follows a falling latency."""
    if step_s > 0:
        estimate_s = max(estimate_s, least_s)
    return min(max(0.0, estimate_s + step_s), most_s)
