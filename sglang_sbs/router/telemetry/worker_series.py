"""Series of workers that are counted as things happen, and their end.

With service discovery every pod has a URL of its own, and what stayed of each would be kept and
exported for the life of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from prometheus_client.metrics import MetricWrapperBase

_M = TypeVar("_M", bound=MetricWrapperBase)


class WorkerSeries:
    """By worker URL. A worker that is not known has none: what its last requests still bring is
    not counted for it, so that nothing of it comes back."""

    def __init__(self, knows: Callable[[str], bool]) -> None:
        """``knows``: whether there is such a worker now."""
        self._knows = knows
        self._series: dict[str, dict[tuple[Any, ...], Any]] = {}

    def of(self, metric: _M, worker_url: str, *labels: str | int) -> _M | None:
        """The series of ``metric`` with ``labels`` (all of them, in its order), which is kept:
        looking it up there costs more than counting. ``None``: the worker is not known."""
        own = self._series.get(worker_url)
        if own is None:
            if not self._knows(worker_url):
                return None
            own = self._series[worker_url] = {}
        one: _M | None = own.get((metric, labels))
        if one is None:
            one = own[metric, labels] = metric.labels(*labels)
        return one

    def forget(self, worker_url: str) -> None:
        for metric, labels in self._series.pop(worker_url, {}):
            metric.remove(*labels)
