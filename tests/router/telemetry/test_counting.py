"""Counters, gauges and histograms say what those of the client library say."""

from __future__ import annotations

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sglang_sbs.router.telemetry import counting


def page(library) -> list[str]:
    registry = CollectorRegistry()
    counter = library.Counter("requests", "Of clients", ["path"], registry=registry)
    plain = library.Counter("answers", "To them", registry=registry)
    gauge = library.Gauge("waiting", "Of them", ["path"], registry=registry)
    gauge.labels("/a").inc()
    gauge.labels("/a").inc(4)
    gauge.labels("/a").dec(2)
    gauge.labels("/b").set(7)
    histogram = library.Histogram(
        "seconds", "Each", ["path"], buckets=(0.1, 1, 5), registry=registry
    )
    for seconds in (0.0, 0.1, 0.1000001, 1, 4.9, 7, float("inf")):
        histogram.labels("/a").observe(seconds)
        counter.labels("/a").inc(seconds)
        plain.inc()
    histogram.labels("/b")
    histogram.labels("/a").observe(3)
    return [
        line for line in generate_latest(registry).decode().split("\n") if "_created" not in line
    ]


def test_they_are_shown_as_those_of_the_library_are():
    assert page(counting) == page(prometheus_client)


def test_a_counter_only_grows():
    counter = counting.Counter("requests", "Of clients", registry=None)
    with pytest.raises(ValueError, match="only grows"):
        counter.inc(-1)
