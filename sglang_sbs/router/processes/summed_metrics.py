"""Sums the Prometheus pages of several processes of one router."""

from __future__ import annotations

import contextlib
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from sglang_sbs.router.metric_families import Made

_LASTING = ("counter", "histogram", "summary")
_MEANS = frozenset({"sbs_prompt_bytes_per_token"})
"""Gauges that are averaged over processes, because their sum has no meaning."""
_WORKER = re.compile(r'[{,]worker="([^"]*)"')
_MOST_FORMER = 8


class FrontEndPages:
    """Last metrics page of every front end. Those of former ones keep their counters, so that
    totals do not drop."""

    def __init__(self, known: Callable[[str], object]) -> None:
        """Create an empty collection. ``known``: as for :func:`of_workers`."""
        self._known = known
        self._of: dict[str, str] = {}
        """Last pages of connected front ends, by id."""
        self._former: OrderedDict[str, str] = OrderedDict()
        """Counters of the latest front ends that have left, by id. One that was cut off comes back
        with all of its counters, so these must not be added to the sum of the others."""
        self._retired = ""
        """Summed counters of all earlier ones."""

    def put(self, front_end: str, page: str) -> None:
        self._of[front_end] = page

    def joined(self, front_end: str) -> None:
        """Take note that a front end has connected, perhaps again."""
        if before := self._former.pop(front_end, ""):
            self._of[front_end] = before

    def left(self, front_end: str) -> None:
        if page := self._of.pop(front_end, ""):
            self._former[front_end] = self._counters(page)
        if len(self._former) > _MOST_FORMER:
            _, oldest = self._former.popitem(last=False)
            self._retired = self._counters(self._retired, oldest)

    def clear(self) -> None:
        """Forget the pages of connected front ends."""
        self._of.clear()

    def pages(self) -> list[str]:
        """Return all pages, those of former front ends without removed workers; connected ones drop
        these themselves."""
        self._retired = of_workers(self._retired, self._known)
        for front_end, page in self._former.items():
            self._former[front_end] = of_workers(page, self._known)
        every = (*self._of.values(), *self._former.values(), self._retired)
        return [page for page in every if page]

    def _counters(self, *pages: str) -> str:
        return add_pages((of_workers(page, self._known) for page in pages), lasting_only=True)


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
