"""``GET /engine_metrics``: the Prometheus pages of all engines as one.

Owns merging them. Must not know how they were fetched. Pages cannot just be put one after another:
a family may be declared only once, and equal series of two engines need a label that tells them
apart (``worker_addr``, as sglang_router calls it). Colons in names become underscores
(``sglang_num_running_reqs``), as there: its dashboards ask for those names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


class _Families:
    """A collector of families that are there already."""

    def __init__(self) -> None:
        self.by_name: dict[str, Metric] = {}

    def collect(self) -> Iterator[Metric]:
        yield from self.by_name.values()


def merge_pages(pages: Iterable[tuple[str, str]]) -> bytes:
    """One page from ``(worker URL, page)``; a page that cannot be read is left out."""
    families = _Families()
    for url, text in pages:
        try:
            parsed = list(text_string_to_metric_families(text))
        except (ValueError, KeyError, IndexError):
            continue
        for family in parsed:
            name = family.name.replace(":", "_")
            merged = families.by_name.setdefault(
                name, Metric(name, family.documentation, family.type)
            )
            for sample in family.samples:
                merged.add_sample(
                    sample.name.replace(":", "_"),
                    {**sample.labels, "worker_addr": url},
                    sample.value,
                    sample.timestamp,
                )
    registry = CollectorRegistry(auto_describe=False)
    registry.register(families)
    return generate_latest(registry)
