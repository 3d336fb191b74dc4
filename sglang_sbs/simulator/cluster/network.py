"""Delays of requests to the ranks of an instance (latency, jitter, serial sending, the plugin's
batch gate), and delays, losses and duplicates of EndForward."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from sglang_sbs.scheduling import Dispatch
from sglang_sbs.simulator.cluster.spec import ClusterSpec


class DispatchNetwork:
    """Delays dispatched requests. The simulation calls :meth:`arrive_s` once per batch, in order of
    time."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self._rng = random.Random(spec.seed)
        self._front_free_s = dict.fromkeys(dict(spec.prefill), 0.0)
        """Time, by instance, when the last request for it has left."""
        self._intake_free_s = 0.0
        """Time when the shared intake has read the last request."""
        self._gang = (-1, 1.0)
        """Number of the batch and its latency factor."""

    def arrive_s(self, batch: Sequence[Dispatch], now_s: float) -> list[float]:
        """Return the times at which the requests of a batch for one instance become schedulable."""
        reach_s = [self._reach_s(command, now_s) for command in batch]
        gate_s = min(max(reach_s), min(reach_s) + self._spec.gang_gate_s)
        return [max(at_s, gate_s) for at_s in reach_s]

    def _reach_s(self, command: Dispatch, now_s: float) -> float:
        latency_s = self._spec.dispatch_latency_s
        if self._spec.gang_jitter:
            if command.batch != self._gang[0]:
                self._gang = command.batch, math.exp(self._rng.gauss(0.0, self._spec.gang_jitter))
            latency_s *= self._gang[1]
        if self._spec.dispatch_jitter:
            latency_s *= math.exp(self._rng.gauss(0.0, self._spec.dispatch_jitter))
        reach_s = now_s + latency_s
        if self._spec.dispatch_serial_s:
            free_s = max(now_s, self._front_free_s[command.prefill])
            self._front_free_s[command.prefill] = free_s + self._spec.dispatch_serial_s
            reach_s += free_s + self._spec.dispatch_serial_s - now_s
        if self._spec.intake_s and reach_s < self._spec.intake_until_s:
            reach_s = max(reach_s, self._intake_free_s) + self._spec.intake_s
            self._intake_free_s = reach_s
        return reach_s


def pause_before_retry_s(attempts: int) -> float | None:
    """Return the pause after this many failed attempts; ``None``: give up. These are the router's
    defaults (``--retry-max-retries`` and related flags)."""
    return None if attempts >= 5 else 0.05 * 1.5 ** (attempts - 1)


class FeedbackChannel:
    """Delays EndForward on one connection per DP rank, as in the plugin: messages of a rank stay in
    order."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self._rng = random.Random(f"feedback {spec.seed}")
        self._last_s: dict[tuple[str, int], float] = {}
        """Arrival time of the newest message by instance and rank."""

    def arrivals_s(self, instance: str, rank: int, sent_s: float) -> list[float]:
        """Return the arrival times of a message at the scheduler: one, two (a duplicate) or
        none."""
        spec, rng = self._spec, self._rng
        if spec.endforward_loss and rng.random() < spec.endforward_loss:
            return []
        at_s = sent_s + spec.feedback_latency_s + self._delay_s()
        key = (instance, rank)
        at_s = self._last_s[key] = max(at_s, self._last_s.get(key, 0.0))
        if spec.endforward_duplicates and rng.random() < spec.endforward_duplicates:
            return [at_s, at_s + spec.feedback_latency_s + self._delay_s()]
        return [at_s]

    def _delay_s(self) -> float:
        mean_s = self._spec.endforward_delay_s
        return self._rng.expovariate(1 / mean_s) if mean_s else 0.0
