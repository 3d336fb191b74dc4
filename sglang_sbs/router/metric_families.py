"""Helpers that create Prometheus metric families when a scrape asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Values = float | Mapping[Any, float] | None
"""Values of a metric family: one number without labels, or numbers by label or tuple of labels.
``None``: the caller adds them one by one."""
_F = TypeVar("_F", GaugeMetricFamily, CounterMetricFamily)


class Made(Collector):
    def __init__(self, make: Callable[[], Iterable[Metric]]) -> None:
        self._make = make

    def collect(self) -> Iterable[Metric]:
        return self._make()


def gauge(name: str, text: str, values: Values = None, *labels: str) -> GaugeMetricFamily:
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def total(name: str, text: str, values: Values = None, *labels: str) -> CounterMetricFamily:
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def _filled(family: _F, values: Values) -> _F:
    if isinstance(values, Mapping):
        for of, value in values.items():
            family.add_metric([of] if isinstance(of, str) else of, float(value))
    elif values is not None:
        family.add_metric([], float(values))
    return family
