"""The Prometheus pages of several processes of one router as one.

Owns adding them up. Must not know how they were fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

_LASTING = ("counter", "histogram", "summary")
_MEANS = frozenset({"sbs_prompt_bytes_per_token"})
"""Gauges of which every process has its own and whose sum would mean nothing."""

_Key = tuple[str, tuple[tuple[str, str], ...]]


class _Family:
    def __init__(self, name: str, text: str, kind: str) -> None:
        self.name, self.text, self.kind = name, text, kind
        self.values: dict[_Key, float] = {}
        self.counts: dict[_Key, int] = {}

    def add(self, key: _Key, value: float) -> None:
        known = self.values.get(key)
        if known is None:
            self.values[key], self.counts[key] = value, 1
        elif key[0].endswith("_created"):
            self.values[key] = min(known, value)
        else:
            self.values[key] = known + value
            self.counts[key] += 1

    def metric(self) -> Metric:
        out = Metric(self.name, self.text, self.kind)
        for key, value in self.values.items():
            name, labels = key
            mean = value / self.counts[key] if name in _MEANS else value
            out.add_sample(name, dict(labels), mean)
        return out


class _Sum:
    """A collector of what was added."""

    def __init__(self) -> None:
        self.families: dict[str, _Family] = {}

    def collect(self) -> Iterator[Metric]:
        for family in self.families.values():
            yield family.metric()


def add_pages(pages: Iterable[str], *, lasting_only: bool = False) -> str:
    """One page with the sum of every series; a page that cannot be read is left out.

    ``lasting_only``: without gauges, for processes that are gone.
    """
    total = _Sum()
    for text in pages:
        try:
            parsed = list(text_string_to_metric_families(text))
        except (ValueError, KeyError, IndexError):
            continue
        for family in parsed:
            if lasting_only and family.type not in _LASTING:
                continue
            into = total.families.setdefault(
                family.name, _Family(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                into.add((sample.name, tuple(sorted(sample.labels.items()))), sample.value)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(total)
    return generate_latest(registry).decode()
