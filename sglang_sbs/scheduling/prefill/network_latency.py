"""L_net: from the dispatch of a request until an idle rank launches it.

The median of the last latencies of :mod:`.observation`. It forgets by age, as a busy cluster hardly
has idle instances to learn from; without fresh samples it falls back to what is assumed of a
network nobody has measured, and the lead, which busy instances do teach, is what counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_SAMPLES = 64
_FRESH_S = 30.0
"""Older samples do not count."""
_FALL_BACK_S = 10.0
"""Time constant of the way back, once there are no fresh ones."""
_MOST_S = 5.0
"""What is beyond this is no network: a clock that jumped, an engine that lies."""


class NetworkLatency:
    """Seconds; ``assumed_s`` before the first sample."""

    def __init__(self, assumed_s: float) -> None:
        self._assumed_s = self.latency_s = self.lone_s = assumed_s
        """Of the usual batch, and of a request that leaves alone."""
        self.serial_s = 0.0
        """What each further request of a batch adds: they leave, and are taken in, one by one."""
        self._samples: deque[tuple[float, float, int]] = deque(maxlen=_SAMPLES)
        """(when, latency, requests), oldest first."""
        self._now_s: float | None = None

    def observe(
        self, latencies_s: Sequence[float], now_s: float, requests: Sequence[int] = ()
    ) -> float:
        """Take samples in, or none, and return the estimate. ``requests``: of the batch of each;
        empty: all left alone."""
        sizes = requests or [1] * len(latencies_s)
        self._samples.extend(
            (now_s, min(max(0.0, one), _MOST_S), size)
            for one, size in zip(latencies_s, sizes, strict=True)
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
        """What size has to do with it: least squares, believed as far as they explain."""
        latencies_s = [latency_s for _, latency_s, _ in self._samples]
        sizes = [size for _, _, size in self._samples]
        mean_s, mean_size = sum(latencies_s) / len(sizes), sum(sizes) / len(sizes)
        xx = sum([(size - mean_size) ** 2 for size in sizes])
        yy = sum([(latency_s - mean_s) ** 2 for latency_s in latencies_s])
        xy = sum([(x - mean_size) * (y - mean_s) for x, y in zip(sizes, latencies_s, strict=True)])
        more = sorted(sizes)[len(sizes) // 2] - 1
        slope_s = xy / xx * (xy * xy / (xx * yy)) if xy > 0 else 0.0
        self.serial_s = min(slope_s, self.latency_s / more) if more else 0.0
        self.lone_s = self.latency_s - self.serial_s * more
