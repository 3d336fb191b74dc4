"""Where the time to the first byte went, as a Prometheus histogram. Counting the parts of a request
costs a microsecond; the client library's histograms would take ten."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping

from prometheus_client.core import HistogramMetricFamily, Metric

BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class PartTimes:
    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        """By part: below each bound, and above the last."""
        self._sums_s: dict[str, float] = {}

    def add(self, parts: Mapping[str, float]) -> None:
        counts, sums_s = self._counts, self._sums_s
        for part, seconds in parts.items():
            if part not in counts:
                counts[part], sums_s[part] = [0] * (len(BOUNDS_S) + 1), 0.0
            counts[part][bisect_left(BOUNDS_S, seconds)] += 1
            sums_s[part] += seconds

    def families(self) -> Iterator[Metric]:
        about = "Where the time to the first byte went, per attempt that had one"
        family = HistogramMetricFamily("sbs_ttft_part_seconds", about, labels=["part"])
        for part, counts in self._counts.items():
            below, buckets = 0, []
            for bound_s, count in zip((*BOUNDS_S, None), counts, strict=True):
                below += count
                buckets.append(("+Inf" if bound_s is None else f"{bound_s}", float(below)))
            family.add_metric([part], buckets, self._sums_s[part])
        yield family
