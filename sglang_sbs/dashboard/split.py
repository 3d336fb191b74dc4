"""Splits the time to the first token into parts, for typical and for slow requests. Sans-I/O and
bounded.

Percentiles of parts do not add up to the percentile of the whole. So the split at p50 is the mean
over the requests whose TTFT is near the median, and that at p99 over the slowest ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

WINDOW_S = 300.0
_MAX_SAMPLES = 2_000
_AGAIN_S = 1.0
"""Seconds between evaluations of the samples; frames are more frequent."""
_BANDS = {"p50": (0.4, 0.6), "p99": (0.98, 1.0)}
"""Range of ranks by TTFT (shares of the requests) that represents each percentile."""


class TimeSplit:
    """Splits TTFT into parts at p50 and p99. Add the parts of each request that had a first token,
    then read ``summary``."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, Mapping[str, float]]] = deque(maxlen=_MAX_SAMPLES)
        """Time of the end, TTFT, and parts in order."""
        self._made_s = -math.inf
        self._summary: dict[str, Any] = {}

    def add(self, now_s: float, ttft_s: float, parts_s: Mapping[str, float]) -> None:
        self._samples.append((now_s, ttft_s, parts_s))

    def summary(self, now_s: float) -> dict[str, Any]:
        """Return TTFT and its parts at p50 and p99, in seconds, over the last five minutes."""
        if now_s >= self._made_s + _AGAIN_S:
            self._made_s = now_s
            recent = [sample for sample in self._samples if now_s - sample[0] <= WINDOW_S]
            recent.sort(key=lambda sample: sample[1])
            self._summary = {"requests": len(recent), "window_s": WINDOW_S}
            if recent:
                self._summary |= {name: _mean_of(recent, *band) for name, band in _BANDS.items()}
        return self._summary


def _mean_of(
    ordered: Sequence[tuple[float, float, Mapping[str, float]]], low: float, high: float
) -> dict[str, Any]:
    first = min(int(low * len(ordered)), len(ordered) - 1)
    band = ordered[first : max(first + 1, math.ceil(high * len(ordered)))]
    sums_s: dict[str, float] = {}
    for _, _, parts_s in band:
        for name, seconds in parts_s.items():
            sums_s[name] = sums_s.get(name, 0.0) + seconds
    return {
        "ttft_s": round(sum(sample[1] for sample in band) / len(band), 4),
        "parts_s": {name: round(total_s / len(band), 4) for name, total_s in sums_s.items()},
    }
