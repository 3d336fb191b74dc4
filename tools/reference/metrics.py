"""``docs/metrics.md``, generated from the metrics a router really has.

Owns the page's form and the few lines that say what a family is about. Must not know what any
metric means: names, types, labels and texts are read from running processes, one router alone and
one of several processes, so the page cannot drift from the code.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from prometheus_client.metrics import MetricWrapperBase

from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.options.router_options import RouterOptions
from sglang_sbs.router.processes.scheduler_process import SchedulerProcess
from sglang_sbs.router.server import RouterServer
from sglang_sbs.router.telemetry.metrics import RouterMetrics

_LOCAL = (
    *("--host", "127.0.0.1", "--port", "0", "--prometheus-host", "127.0.0.1"),
    *("--prometheus-port", "0", "--sbs-endforward-bind", "tcp://127.0.0.1:*", "--policy", "sbs"),
)
_SECTIONS = (
    (
        "sbs_",
        "Scheduling",
        "Symbols are the paper's ([scheduling.md](scheduling.md)). `worker` is an instance's URL, "
        "`dp_rank` the number of a DP rank on it.",
    ),
    (
        "smg_",
        "Names of sglang_router",
        "With its names and labels, so that dashboards made for it go on working.",
    ),
)
_HEAD = """\
# Metrics

<!-- Made by scripts/reference from the code; a test compares. Do not edit by hand. -->

`GET /metrics` on `--prometheus-port` (29000), for Prometheus. With `--frontends N` the page is the
sum over all processes. Of several schedulers, the active one has this sum. Each of its front ends
also has a page of its own ([many routers](many-routers.md#what-to-watch)).
[examples/grafana](../examples/grafana) has a dashboard of these metrics, and
[examples/prometheus](../examples/prometheus) has alert rules. The router's own page is live and
needs no Prometheus ([dashboard.md](dashboard.md)).

A counter ends in `_total`; a histogram has `_bucket`, `_sum` and `_count`. *Several processes*
marks metrics that only a router with `--frontends N` (or `--sbs-role`) has.

Series with the label `worker` end when that worker is removed; one that comes back at the same
address begins at 0. Failures of its last requests after that are in the other metrics only.
"""


class MetricFacts(NamedTuple):
    """One metric, as exported."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    several_processes_only: bool = False


async def collect_facts() -> list[MetricFacts]:
    """Every metric of a router, by name. Starts and stops routers on free ports of 127.0.0.1."""
    alone = await _of_one_process()
    several = await _of_several_processes()
    return [
        several[name]._replace(several_processes_only=name not in alone)
        if name in several and name not in alone
        else alone[name]
        for name in sorted(alone.keys() | several.keys())
    ]


async def _of_one_process() -> dict[str, MetricFacts]:
    with _no_kubernetes():
        server = RouterServer(_options("--service-discovery", "--prefill-selector", "app=sglang"))
        await server.start()
        try:
            return _facts(server.metrics)
        finally:
            await server.stop(grace_s=0.0)


@contextlib.contextmanager
def _no_kubernetes() -> Iterator[None]:
    """The address of a cluster that does not answer is enough to have discovery's metrics."""
    cluster = {"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "none", "context": {"cluster": "none", "user": "none"}}
    config = {
        "current-context": "none",
        "clusters": [cluster],
        "contexts": [context],
        "users": [{"name": "none", "user": {}}],
    }
    before = os.environ.get("KUBECONFIG")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kubeconfig"
        path.write_text(json.dumps(config))
        os.environ["KUBECONFIG"] = str(path)
        try:
            yield
        finally:
            if before is None:
                del os.environ["KUBECONFIG"]
            else:
                os.environ["KUBECONFIG"] = before


async def _of_several_processes() -> dict[str, MetricFacts]:
    with tempfile.TemporaryDirectory() as folder:
        endpoint = ("--sbs-scheduler", f"ipc://{folder}/scheduler")
        scheduler = SchedulerProcess(_options("--sbs-role", "scheduler", *endpoint))
        await scheduler.start()
        server = RouterServer(_options("--sbs-role", "front-end", *endpoint))
        try:
            await server.start()
            return _facts(scheduler.metrics) | _facts(server.metrics)
        finally:
            with contextlib.suppress(AttributeError):  # it did not get as far as that
                await server.stop(grace_s=0.0)
            await scheduler.stop()


def _options(*flags: str) -> RouterOptions:
    return parse_flags([*_LOCAL, *flags])


def _facts(metrics: RouterMetrics) -> dict[str, MetricFacts]:
    found: list[MetricFacts] = [
        _fact(fact._name, fact._type or "", fact._labelnames, fact._documentation)
        for fact in vars(metrics).values()
        if isinstance(fact, MetricWrapperBase)
    ]
    own = {fact.name for fact in found}
    for family in metrics.registry.collect():
        # A family that is made when scraped knows its labels, even if it is empty.
        labels = getattr(family, "_labelnames", None)
        fact = _fact(family.name, family.type, labels or (), family.documentation)
        if labels is not None:
            found.append(fact)
        elif fact.name not in own:
            raise RuntimeError(f"the labels of {fact.name} cannot be found out")
    return {fact.name: fact for fact in found}


def _fact(name: str, kind: str, labels: Iterable[str], text: str) -> MetricFacts:
    full = f"{name}_total" if kind == "counter" and not name.endswith("_total") else name
    return MetricFacts(full, kind, tuple(labels), text)


def page(facts: Sequence[MetricFacts]) -> str:
    """The whole of ``docs/metrics.md``."""
    parts = [_HEAD]
    for prefix, title, about in _SECTIONS:
        rows = [
            f"| `{fact.name}` | {fact.kind} | {', '.join(f'`{label}`' for label in fact.labels)} | "
            f"{fact.text}{' (*several processes*)' if fact.several_processes_only else ''} |"
            for fact in facts
            if fact.name.startswith(prefix)
        ]
        table = ["| metric | type | labels | meaning |", "|---|---|---|---|", *rows]
        parts.append("\n".join([f"## {title}", "", about, "", *table, ""]))
    return "\n".join(parts)


def whole_page() -> str:
    """The page, of routers that are started for it."""
    return page(asyncio.run(collect_facts()))
