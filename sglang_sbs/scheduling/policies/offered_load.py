"""Measures the rate at which uncached tokens arrive, and the load: the share of all instances' time
that their computation takes, without the fixed time of passes. Must not know which requests wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.instance import Instances, PrefillInstance


class OfferedLoad:
    """Arrival rates, load, and capacity of the prefill instances, in uncached tokens. Most figures
    are as of the last :meth:`measure`."""

    def __init__(self) -> None:
        self.token_rate = self.request_rate = 0.0
        """Smoothed arrivals per second: requests, and in ``token_rate`` uncached tokens."""
        self._rate_s: float | None = None
        self._window_s = TUNING.least_window_s
        self.mean_tokens = 1.0
        """Mean uncached tokens of a request, at least 1."""
        self.capacity_tokens = 0.0
        """Most tokens of one pass of every instance, summed."""
        self.load = 0.0
        """Arriving tokens per second as a share of ``_tokens_per_s``; at most
        ``Tuning.most_load``."""
        self._is_limited = False
        """Whether the passes of any instance have a request limit."""
        self.pass_s = 0.0
        """Steady-state pass time: the length of a pass that computes exactly what arrived during
        the previous one."""
        self._number_of: dict[PrefillInstance, int] = {}
        self._learned: set[PrefillInstance] = set()
        """Instances with a changed forward model, whose speed :meth:`measure` must recompute."""
        self._speeds: list[float] = []
        """Tokens per second of each instance, without the fixed time of passes."""
        self._pass_times_s: list[tuple[float, float]] = []
        """Lengths in seconds of an empty and of a full pass of each instance."""
        self._tokens_per_s = 0.0
        """Sum of ``_speeds``."""

    def on_arrived(self, tokens: int, now_s: float) -> None:
        self._decay(now_s)
        self.token_rate += tokens / self._window_s
        self.request_rate += 1 / self._window_s

    def on_topology_change(self, instances: Instances) -> None:
        self.capacity_tokens = sum(i.capacity_tokens for i in instances)
        self._is_limited = any(i.prefill_max_requests for i in instances)
        self._number_of = {instance: number for number, instance in enumerate(instances)}
        self._speeds = [0.0] * len(instances)
        self._pass_times_s = [(0.0, 0.0)] * len(instances)
        self._learned = set(instances)

    def forget_speed(self, instance: PrefillInstance) -> None:
        if instance in self._number_of:
            self._learned.add(instance)

    def measure(self, instances: Instances, now_s: float) -> None:
        """Update all figures to ``now_s``. Call this before each decision."""
        self._decay(now_s)
        self.mean_tokens = max(1.0, self.token_rate / max(TUNING.epsilon_s, self.request_rate))
        if self._is_limited:
            self.capacity_tokens = sum(i.ranks.capacity_of(self.mean_tokens) for i in instances)
        if self._learned:
            # The capacity of a pass with a request limit depends on the mean length of requests.
            self._work_out(instances if self._is_limited else self._learned)
        self.load = min(TUNING.most_load, self.token_rate / self._tokens_per_s)
        idle_share = 1 - self.load
        times_s = [min(fixed_s / idle_share, full_s) for fixed_s, full_s in self._pass_times_s]
        self.pass_s = max(TUNING.least_pass_s, sum(times_s) / len(times_s))
        self._window_s = max(TUNING.least_window_s, TUNING.rate_passes * self.pass_s)

    def _work_out(self, instances: Iterable[PrefillInstance]) -> None:
        for instance in instances:
            number, speed = self._number_of[instance], instance.tokens_per_s
            full_s = instance.ranks.capacity_of(self.mean_tokens) / speed
            fixed_s = instance.model.formula.fixed_s
            self._speeds[number] = speed
            self._pass_times_s[number] = fixed_s, fixed_s + full_s
        self._learned.clear()
        self._tokens_per_s = sum(self._speeds)

    def capacity_of(self, instance: PrefillInstance) -> float:
        """Return the most tokens of one pass of an instance, with requests of the mean length."""
        if self._is_limited:
            return instance.ranks.capacity_of(self.mean_tokens)
        return instance.capacity_tokens

    def load_with(self, waiting_tokens: int) -> float:
        """Return the load including tokens that wait, at most ``Tuning.most_load``. Waiting tokens
        that fill a share x of all instances' next passes use a share x of the unused capacity."""
        waiting = min(1.0, waiting_tokens / max(1.0, self.capacity_tokens))
        return min(TUNING.most_load, self.load + waiting * (1 - self.load))

    def leaving_s(self, waiting: int, serial_s: float) -> float:
        """Return how much longer, in seconds, the dispatch of a batch of all ``waiting`` requests
        takes than that of one request. The batch includes requests that arrive while it is sent, up
        to one full pass. ``serial_s``: dispatch latency that each further request adds."""
        coming = min(TUNING.most_load, self.request_rate * serial_s)
        most = self.capacity_tokens / len(self._pass_times_s) / self.mean_tokens
        return serial_s * max(0.0, min(waiting / (1 - coming), most) - 1)

    def _decay(self, now_s: float) -> None:
        if self._rate_s is not None:
            share = math.exp(-(now_s - self._rate_s) / self._window_s)
            self.token_rate *= share
            self.request_rate *= share
        self._rate_s = now_s
