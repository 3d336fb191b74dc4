"""Sums the Prometheus pages of several processes of one router."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from sglang_sbs.router.metric_families import Made

_LASTING = ("counter", "histogram", "summary")
_MEANS = frozenset({"sbs_prompt_bytes_per_token"})
"""Gauges that are averaged over processes, because their sum has no meaning."""
_WORKER = re.compile(r'[{,]worker="([^"]*)"')


def of_workers(page: str, known: Callable[[str], object]) -> str:
    """Return the metrics page without series whose label ``worker`` is not ``known``."""

    def stays(line: str) -> bool:
        worker = _WORKER.search(line)
        return worker is None or bool(known(worker[1]))

    return "\n".join(filter(stays, page.split("\n")))


def add_pages(
    pages: Iterable[str], *, own: Iterable[Metric] = (), lasting_only: bool = False
) -> str:
    """Return one metrics page with the sum of every series; unreadable pages are skipped. ``own``:
    more families to add, of this process. ``lasting_only``: omit gauges."""
    return "".join(page_parts(pages, own=own, lasting_only=lasting_only))


def page_parts(
    pages: Iterable[str], *, own: Iterable[Metric] = (), lasting_only: bool = False
) -> Iterator[str]:
    """Yield the page of :func:`add_pages` family by family, so that the caller can do other work in
    between: with a thousand ranks the whole takes long."""
    by_name: defaultdict[str, list[Metric]] = defaultdict(list)
    for family in own:
        by_name[family.name].append(family)
    for text in pages:
        with contextlib.suppress(ValueError, KeyError, IndexError):
            for family in list(text_string_to_metric_families(text)):
                by_name[family.name].append(family)
    for same in by_name.values():
        if not lasting_only or same[0].type in _LASTING:
            summed = [_sum(same) if len(same) > 1 else same[0]]
            yield generate_latest(Made(summed.copy)).decode()


def _sum(same: Sequence[Metric]) -> Metric:
    values: defaultdict[tuple[str, tuple[tuple[str, str], ...]], list[float]] = defaultdict(list)
    for family in same:
        for sample in family.samples:
            values[sample.name, tuple(sorted(sample.labels.items()))].append(sample.value)
    out = Metric(same[0].name, same[0].documentation, same[0].type)
    for (name, labels), found in values.items():
        value = min(found) if name.endswith("_created") else sum(found)
        out.add_sample(name, dict(labels), value / len(found) if name in _MEANS else value)
    return out
