"""L_net: from the dispatch of a request until an idle rank launches it.

A sample is what :mod:`.observation` calls a latency. The estimate is the median of the last ones,
so that no single one moves it far. It forgets by age: a busy cluster hardly has idle instances to
learn from, and what was true of the network a minute ago need not be true any more. Without fresh
samples it falls back to what is assumed of a network nobody has measured; the lead, which busy
instances do teach, is then what counts
(:mod:`sglang_sbs.scheduling.policies.adaptive.dispatch_lead`).
"""

from __future__ import annotations

from collections import deque

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
        self._assumed_s = self.latency_s = assumed_s
        self._samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)
        """(when, latency), oldest first."""
        self._now_s: float | None = None

    def observe(self, latencies_s: list[float], now_s: float) -> float:
        """Take samples in, or none, and return the estimate."""
        self._samples.extend((now_s, min(one, _MOST_S)) for one in latencies_s)
        stale = False
        while self._samples and self._samples[0][0] < now_s - _FRESH_S:
            self._samples.popleft()
            stale = True
        if latencies_s or (stale and self._samples):
            ordered = sorted([latency_s for _, latency_s in self._samples])
            self.latency_s = ordered[len(ordered) // 2]
        elif not self._samples and self._now_s is not None:
            share = min(1.0, (now_s - self._now_s) / _FALL_BACK_S)
            self.latency_s += share * (min(self._assumed_s, self.latency_s) - self.latency_s)
        self._now_s = now_s
        return self.latency_s
