"""Algorithm 1 of the paper: the throughput-adaptive scheduling interval.

I_opt is Algorithm 1's to the letter: the plain mean of the window. Watchdog and longest hold rest
on the mean of the passes that are not out of all proportion (a first one compiles kernels for half
a minute), unless the trigger is the paper's (``literal``)."""

from __future__ import annotations

from collections import deque
from itertools import islice

from sglang_sbs.scheduling.prefill.network_latency import NetworkLatency

_GROSS = 10.0
"""Out of proportion is a pass beyond this many medians of the window."""
_RECENT = 32
"""But only while there are as few of them among so many last ones as instances that may have had
their first pass; with a full window, one. More are the nature of the load."""


class IntervalController(NetworkLatency):
    """I_opt = (mean(W) + L_net) / N_active, with what it rests on: forward times are learned here,
    L_net by the base."""

    def __init__(self, *, t_default_s: float, window: int, latency_s: float) -> None:
        super().__init__(latency_s)
        self._window: deque[float] = deque(maxlen=window)
        self._sum_s = 0.0
        self._t_default_s = t_default_s
        self.active = 0
        """N_active."""
        self.literal = False
        """Whether the usual forward time is the plain mean, too."""
        self.mean_forward_s = t_default_s
        """The usual forward time: the smoothed one without outliers; T_default before the first
        sample."""

    @property
    def interval_s(self) -> float:
        """I_opt; with no active instance the interval of a single one."""
        mean_s = self._sum_s / len(self._window) if self._window else self._t_default_s
        return (mean_s + self.latency_s) / max(1, self.active)

    def on_end_forward(self, measured_s: float) -> None:
        """OnEndForward(t_measured)."""
        if len(self._window) == self._window.maxlen:
            self._sum_s -= self._window[0]
        self._window.append(measured_s)
        self._sum_s += measured_s
        self.mean_forward_s = self._usual_s()

    def on_topology_change(self, active: int) -> None:
        self.active = active

    def _usual_s(self) -> float:
        window = self._window
        if self.literal:
            return self._sum_s / len(window)
        is_full = len(window) == window.maxlen
        # T_default has a say as long as there is hardly anything else.
        ordered = sorted(window if is_full else (*window, self._t_default_s))
        limit_s = _GROSS * ordered[(len(ordered) - 1) // 2]
        if ordered[-1] <= limit_s:
            return self._sum_s / len(window)
        tolerated = 1 if is_full else max(1, self.active)
        if sum(one > limit_s for one in islice(reversed(window), _RECENT)) > tolerated:
            return self._sum_s / len(window)
        usual = [one for one in window if one <= limit_s]
        return sum(usual) / len(usual) if usual else limit_s
