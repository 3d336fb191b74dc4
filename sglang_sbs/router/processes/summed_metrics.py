"""The Prometheus pages of several processes of one router as one.

Owns adding them up. Must not know how they were fetched.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

_LASTING = ("counter", "histogram", "summary")
_MEANS = frozenset({"sbs_prompt_bytes_per_token"})
"""Gauges of which every process has its own and whose sum would mean nothing."""
_WORKER = re.compile(r'[{,]worker="([^"]*)"')

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

    def take(self, family: Metric) -> None:
        for sample in family.samples:
            self.add((sample.name, tuple(sorted(sample.labels.items()))), sample.value)

    def metric(self) -> Metric:
        out = Metric(self.name, self.text, self.kind)
        for key, value in self.values.items():
            name, labels = key
            mean = value / self.counts[key] if name in _MEANS else value
            out.add_sample(name, dict(labels), mean)
        return out


class _One:
    """A collector of one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


def of_workers(page: str, known: Callable[[str], bool]) -> str:
    """The page without the series of workers (label ``worker``) that are not known."""

    def stays(line: str) -> bool:
        worker = _WORKER.search(line)
        return worker is None or known(worker[1])

    return "\n".join(filter(stays, page.split("\n")))


def add_pages(
    pages: Iterable[str], *, own: Iterable[Metric] = (), lasting_only: bool = False
) -> str:
    """One page with the sum of every series; a page that cannot be read is left out.

    ``own``: families of this process, which need no reading. ``lasting_only``: without gauges, for
    processes that are gone.
    """
    return "".join(page_parts(pages, own=own, lasting_only=lasting_only))


def page_parts(
    pages: Iterable[str], *, own: Iterable[Metric] = (), lasting_only: bool = False
) -> Iterator[str]:
    """:func:`add_pages` family by family: with a thousand ranks the whole takes a while, and who
    has other things to do can do them between two parts."""
    alone = {family.name: family for family in own}
    sums: dict[str, _Family] = {}
    for text in pages:
        read: list[Metric] = []
        with contextlib.suppress(ValueError, KeyError, IndexError):
            read = list(text_string_to_metric_families(text))
        for family in read:
            if family.name not in sums:
                sums[family.name] = _Family(family.name, family.documentation, family.type)
                mine = alone.pop(family.name, None)
                if mine is not None:
                    sums[family.name].take(mine)
            sums[family.name].take(family)
    for family in [*alone.values(), *(one.metric() for one in sums.values())]:
        if not lasting_only or family.type in _LASTING:
            registry = CollectorRegistry(auto_describe=False)
            registry.register(_One(family))
            yield generate_latest(registry).decode()
