"""Histogram of the time that the scheduler takes for an event. It is always measured, because
counting costs well under a microsecond."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from sglang_sbs.router.metric_families import gauge
from sglang_sbs.scheduling import events

BUCKETS_S = tuple(step * 10**power for power in (-5, -4, -3, -2, -1) for step in (1, 2, 3, 5, 7))
_KINDS: dict[type, str] = {
    events.RequestArrived: "request",
    events.RequestAdopted: "request",
    events.PrefillDone: "request",
    events.RequestEnded: "request",
    events.ForwardEnded: "report",
    events.TimerFired: "timer",
}
_OTHER = "other"


class Spread:
    """Histogram of durations in seconds, with the upper bounds :data:`BUCKETS_S`."""

    __slots__ = ("counts", "longest_s", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.total_s = self.longest_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds
        self.longest_s = max(self.longest_s, seconds)

    def add_to(self, spread: HistogramMetricFamily, longest: GaugeMetricFamily, *of: str) -> None:
        """Add this histogram and its longest duration to metric families, under the label values
        ``of``."""
        counted, buckets = 0, []
        for bound_s, count in zip((*BUCKETS_S, None), self.counts, strict=True):
            counted += count
            buckets.append(("+Inf" if bound_s is None else f"{bound_s:g}", float(counted)))
        spread.add_metric(of, buckets, self.total_s)
        longest.add_metric(of, self.longest_s)


class DecisionTimes:
    def __init__(self) -> None:
        self._kinds = {kind: Spread() for kind in (*dict.fromkeys(_KINDS.values()), _OTHER)}
        self._of_type = {event: self._kinds[kind] for event, kind in _KINDS.items()}

    def record(self, event: type, seconds: float) -> None:
        (self._of_type.get(event) or self._kinds[_OTHER]).add(seconds)

    def families(self) -> Iterator[Metric]:
        about = "Time the scheduler took for an event, by kind of event"
        spread = HistogramMetricFamily("sbs_decision_seconds", about, labels=["event"])
        longest = gauge("sbs_decision_longest_seconds", "The longest so far", None, "event")
        for kind, times in self._kinds.items():
            times.add_to(spread, longest, kind)
        yield from (spread, longest)


def lag_families(lag: Spread) -> Iterator[Metric]:
    """Yield metrics of the lateness of a periodic timer in the scheduler process, which shows its
    backlog."""
    about = "How late the scheduler process ran, ten times a second"
    spread = HistogramMetricFamily("sbs_scheduler_lag_seconds", about)
    longest = gauge("sbs_scheduler_lag_longest_seconds", "The longest so far")
    lag.add_to(spread, longest)
    yield from (spread, longest)
