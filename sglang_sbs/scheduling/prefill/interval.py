"""Algorithm 1 of the paper: the throughput-adaptive scheduling interval I_opt, and the estimate of
L_net that it contains.

I_opt uses the plain mean of the window, exactly as in Algorithm 1. Watchdog and longest hold use
the mean without outliers (a first pass compiles kernels for half a minute), unless the trigger is
the paper's (``literal``)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice

_GROSS = 10.0
"""A forward time above this multiple of the window's median is an outlier."""
_RECENT = 32
"""Number of last passes whose outliers are counted. With at most one per active instance (with a
full window: one in all) the usual forward time ignores outliers: they may be first passes. More are
typical of the load."""

_SAMPLES = 64
_FRESH_S = 30.0
"""Age limit of latency samples, in seconds."""
_FALL_BACK_S = 10.0
"""Time constant, in seconds, with which L_net returns to the assumed value without samples."""
_MOST_S = 5.0
"""Largest plausible latency, in seconds. Larger samples, from clock jumps or faulty engines, are
clipped."""
_FEW = 3
"""Least number of samples from which the latency of a lone request may rise. Fewer batches may have
waited for one another, in an intake or the batch gate."""


class NetworkLatency:
    """Estimates L_net in seconds: the time from the dispatch of a request until an idle rank
    launches it. The estimate is ``assumed_s`` before the first sample.

    It is the median of the last latency samples (:mod:`.observation`). Samples expire by age,
    because a busy cluster rarely has idle instances to learn from. Without samples the estimate
    falls to the assumed value, and the dispatch lead, which is learned on busy instances, takes
    over."""

    def __init__(self, assumed_s: float) -> None:
        self._assumed_s = self.latency_s = self.lone_s = assumed_s
        """Latency of a request that is sent alone; ``latency_s`` is that of the usual batch."""
        self.serial_s = 0.0
        """Seconds that each further request of a batch adds to its latency, because requests are
        sent and accepted one by one."""
        self._samples: deque[tuple[float, float, int]] = deque(maxlen=_SAMPLES)
        """Samples as (time, latency, batch size), oldest first."""
        self._flights: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)
        """The last requests that missed a launch, as (time, seconds since dispatch)."""
        self._seen_s = 0.0
        """Upper quartile of the seconds in ``_flights``: a batch that was sent just before the
        launch shows little."""
        self._now_s: float | None = None

    def on_flight(self, in_flight_s: float, now_s: float) -> None:
        """Add the time for which a request has been on its way at a launch that it missed
        (``in_flight_s``; 0: none missed it). The latency of that request is longer."""
        if in_flight_s > 0:
            self._flights.append((now_s, min(in_flight_s, _MOST_S)))
            while self._flights[0][0] < now_s - _FRESH_S:
                self._flights.popleft()
            ordered = sorted([seconds for _, seconds in self._flights])
            self._seen_s = ordered[len(ordered) * 3 // 4]

    def away_s(self, now_s: float) -> float:
        """Return the latency of a lone request in seconds, at least the time for which batches were
        lately seen on their way. Unlike L_net it does not fall without samples."""
        if self._flights and now_s - self._flights[-1][0] <= _FRESH_S:
            return max(self.lone_s, self._seen_s)
        return self.lone_s

    def observe(
        self, latencies_s: Sequence[float], now_s: float, requests: Sequence[int] = ()
    ) -> float:
        """Add samples, if any, and return the estimate :attr:`latency_s`. ``requests``: batch size
        of each sample; empty: all were sent alone."""
        if latencies_s:
            sizes = requests or [1] * len(latencies_s)
            self._samples.extend(
                (now_s, min(max(0.0, latency_s), _MOST_S), size)
                for latency_s, size in zip(latencies_s, sizes, strict=True)
            )
        stale = False
        while self._samples and self._samples[0][0] < now_s - _FRESH_S:
            self._samples.popleft()
            stale = True
        if latencies_s or (stale and self._samples):
            ordered = sorted([latency_s for _, latency_s, _ in self._samples])
            self.latency_s = ordered[len(ordered) // 2]
            self._fit()
        elif not self._samples and self._now_s is not None:
            share = min(1.0, (now_s - self._now_s) / _FALL_BACK_S)
            self.latency_s += share * (min(self._assumed_s, self.latency_s) - self.latency_s)
            self.serial_s *= 1 - share
            self.lone_s = min(self.lone_s, self.latency_s)
        self._now_s = now_s
        return self.latency_s

    def _fit(self) -> None:
        """Fit :attr:`serial_s` and :attr:`lone_s` to the samples: least squares of latency by batch
        size, with the slope multiplied by R squared."""
        latencies_s = [latency_s for _, latency_s, _ in self._samples]
        sizes = [size for _, _, size in self._samples]
        mean_s, mean_size = sum(latencies_s) / len(sizes), sum(sizes) / len(sizes)
        xx = sum([(size - mean_size) ** 2 for size in sizes])
        yy = sum([(latency_s - mean_s) ** 2 for latency_s in latencies_s])
        xy = sum([(x - mean_size) * (y - mean_s) for x, y in zip(sizes, latencies_s, strict=True)])
        more = sorted(sizes)[len(sizes) // 2] - 1
        slope_s = xy / xx * (xy * xy / (xx * yy)) if xy > 0 else 0.0
        self.serial_s = min(slope_s, self.latency_s / more) if more else 0.0
        within_s = self.latency_s - self.serial_s * more
        if len(sizes) >= _FEW or 1 in sizes or within_s < self.lone_s:
            self.lone_s = within_s


class IntervalController(NetworkLatency):
    """Computes I_opt = (mean(W) + L_net) / N_active. W, the window of forward times, is kept here;
    L_net is estimated by the base class."""

    def __init__(self, *, t_default_s: float, window: int, latency_s: float) -> None:
        super().__init__(latency_s)
        self._window: deque[float] = deque(maxlen=window)
        self._sum_s = 0.0
        self._t_default_s = t_default_s
        self.active = 0
        """Number of active prefill instances, N_active."""
        self.literal = False
        """Whether :attr:`mean_forward_s` includes outliers, as in Algorithm 1."""
        self.mean_forward_s = t_default_s
        """The usual forward time: mean of the window without outliers; T_default before the first
        sample."""

    @property
    def learned(self) -> bool:
        """Whether any forward time was measured."""
        return bool(self._window)

    @property
    def interval_s(self) -> float:
        """I_opt in seconds; without active instances that of a single one."""
        mean_s = self._sum_s / len(self._window) if self._window else self._t_default_s
        return (mean_s + self.latency_s) / max(1, self.active)

    def on_end_forward(self, measured_s: float) -> None:
        """Add a measured forward time to the window: Algorithm 1's OnEndForward(t_measured)."""
        if len(self._window) == self._window.maxlen:
            self._sum_s -= self._window[0]
        self._window.append(measured_s)
        self._sum_s += measured_s
        self.mean_forward_s = self._usual_s()

    def read_literally(self, literal: bool) -> None:
        """Set :attr:`literal`; it takes effect with the next measured forward time."""
        self.literal = literal

    def on_landing(self, soonest_s: float, now_s: float) -> None:
        """Add ``soonest_s``, the time from the last dispatch in a pass to its launch, as a sample
        that can only lower L_net. It is an upper bound, used only while L_net is a mean pass time
        or more. With that much in flight no instance is idle, so there are no other samples."""
        if self.lone_s >= self.mean_forward_s and soonest_s < math.inf:
            self.observe([min(soonest_s, self.lone_s)], now_s)

    def on_topology_change(self, active: int) -> None:
        self.active = active

    def _usual_s(self) -> float:
        window = self._window
        if self.literal:
            return self._sum_s / len(window)
        is_full = len(window) == window.maxlen
        # T_default counts as long as there are few other samples.
        ordered = sorted(window if is_full else (*window, self._t_default_s))
        limit_s = _GROSS * ordered[(len(ordered) - 1) // 2]
        if ordered[-1] <= limit_s:
            return self._sum_s / len(window)
        tolerated = 1 if is_full else max(1, self.active)
        if sum(gap_s > limit_s for gap_s in islice(reversed(window), _RECENT)) > tolerated:
            return self._sum_s / len(window)
        usual = [gap_s for gap_s in window if gap_s <= limit_s]
        return sum(usual) / len(usual) if usual else limit_s
