"""Algorithm 1 of the paper: the throughput-adaptive scheduling interval.

Owns the sliding window of forward times and I_opt. Must not know instances beyond their number.
"""

from __future__ import annotations

from collections import deque


class IntervalController:
    """I_opt = (mean(W) + L_net) / N_active, recomputed on every EndForward and topology change."""

    def __init__(self, *, t_default_s: float, window: int, latency_s: float) -> None:
        self._window: deque[float] = deque(maxlen=window)
        self._sum_s = 0.0
        self._t_default_s = t_default_s
        self.latency_s = latency_s
        """L_net: dispatch until the rank can run the request, as last measured."""
        self.active = 0
        """N_active."""

    @property
    def mean_forward_s(self) -> float:
        """The smoothed forward time; T_default before the first sample."""
        return self._sum_s / len(self._window) if self._window else self._t_default_s

    @property
    def interval_s(self) -> float:
        """I_opt; with no active instance the interval of a single one."""
        return (self.mean_forward_s + self.latency_s) / max(1, self.active)

    def on_end_forward(self, measured_s: float) -> None:
        """OnEndForward(t_measured)."""
        if len(self._window) == self._window.maxlen:
            self._sum_s -= self._window[0]
        self._window.append(measured_s)
        self._sum_s += measured_s

    def on_topology_change(self, active: int) -> None:
        """OnTopologyChange(N_new)."""
        self.active = active
