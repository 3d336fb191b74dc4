"""How EndForward messages travel in the simulation: late, lost, twice."""

from __future__ import annotations

import random

from sglang_sbs.simulator.cluster.spec import ClusterSpec


class FeedbackChannel:
    """One connection per DP rank, as the plugin has: messages of a rank do not overtake."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self._rng = random.Random(f"feedback {spec.seed}")
        self._last_s: dict[tuple[str, int], float] = {}
        """Arrival of the newest message by instance and rank."""

    def arrivals_s(self, instance: str, rank: int, sent_s: float) -> list[float]:
        """When a message reaches the scheduler: once, twice, or never."""
        spec, rng = self._spec, self._rng
        if not spec.plugin or (spec.endforward_loss and rng.random() < spec.endforward_loss):
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
