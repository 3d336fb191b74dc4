"""Combines all inputs from engines in the process with the scheduler: the registry, EndForward, KV
events, health checks and load polls."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
from prometheus_client.core import Metric

from sglang_sbs.router.metric_families import total
from sglang_sbs.router.options.router_options import RouterOptions
from sglang_sbs.router.options.tls import worker_ssl
from sglang_sbs.router.signals.endforward_listener import EndForwardListener, FindOwner
from sglang_sbs.router.signals.kv_subscriber import KvEventSubscriber
from sglang_sbs.router.telemetry.metrics import RouterMetrics, snapshot_families
from sglang_sbs.router.telemetry.worker_metrics import engine_requests, model_name, worker_families
from sglang_sbs.router.workers.health import Monitor
from sglang_sbs.router.workers.kubernetes_watch import PodDiscovery
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.worker import Worker, WorkerEvents
from sglang_sbs.scheduling.events import Event, InstanceDown, InstanceRole, InstanceUp
from sglang_sbs.scheduling.policy_registry import Policy, reads_reports
from sglang_sbs.wire import EndForward

logger = logging.getLogger(__name__)

_TAKEN_AGAIN_S = 0.2


class Watch:
    """All inputs from engines. Create it, :meth:`connect` it to a scheduler, then :meth:`start` it.
    Workers can be added afterwards."""

    def __init__(
        self, options: RouterOptions, metrics: RouterMetrics, session: aiohttp.ClientSession
    ) -> None:
        self._options = options
        self._metrics = metrics
        self._session = session
        self.registry = Registry(
            breaker=options.breaker,
            monitor=options.monitor,
            prefix_source=options.prefix_source,
        )
        found = options.discovery
        self._discovery = PodDiscovery(found, self) if found is not None else None
        self._waiting: asyncio.Task[None] | None = None

    def connect(
        self,
        submit: Callable[[Event], None],
        sent_to: Callable[[str], tuple[str, int] | None],
        find_owner: FindOwner,
        silenced: Callable[[Worker], None],
    ) -> None:
        """Connect the inputs to a scheduler, which gets events with ``submit``. ``sent_to`` returns
        the prefill worker and DP rank that a request was sent to, if known. ``silenced``: see
        :class:`~sglang_sbs.router.workers.worker.WorkerEvents`."""
        options, registry, metrics = self._options, self.registry, self._metrics
        self._submit, self._sent_to = submit, sent_to
        self._kv_events = KvEventSubscriber(registry, submit)
        self._listener = EndForwardListener(registry, submit, find_owner, self._reported)
        self._monitor = Monitor(
            *(registry, self._session, options.monitor, submit, self._listener.described),
            tls=worker_ssl(options),
        )
        registry.connect(
            WorkerEvents(
                self._emit,
                self._monitor.doubt,
                silenced,
                removed=lambda worker: metrics.forget(worker.url),
            )
        )
        self.policy_changed(options.scheduler.policy)

    def policy_changed(self, policy: Policy) -> None:
        """Expect EndForward and poll loads only under a policy that uses them."""
        reads = reads_reports(policy)
        listens = self._options.endforward_bind is not None
        self.registry.expect_endforward(reads and listens)
        self._monitor.polls_loads = reads

    async def start(self) -> str | None:
        """Open EndForward, and start watching the workers from flags and pods. Return the bound
        endpoint; ``None`` if there is none, or a router being replaced still holds it. Raises:
        OSError, it is in use; ValueError, pods cannot be discovered."""
        endpoint = None
        if self._options.take_over:
            self._waiting = asyncio.create_task(self._open_when_free())
        else:
            endpoint = self._open()
        for url, port in self._options.prefill:
            self.add_worker(url, "prefill", port)
        for url in self._options.decode:
            self.add_worker(url, "decode", None)
        if self._discovery is not None:
            await self._discovery.start()
        return endpoint

    def _open(self) -> str | None:
        """Open the EndForward socket and return its endpoint, ``None`` if there is none to bind.
        Raises: OSError, it cannot be bound."""
        return self._listener.open(self._options.endforward_bind, self._options.endforward_keys)

    async def _open_when_free(self) -> None:
        waiting = ""
        while True:
            try:
                logger.info("EndForward at %s", self._open() or "nothing")
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    logger.error("no EndForward: %s", error)
                    return
                if not waiting:
                    waiting = f"{error}: waiting for it, using load polls until then"
                    logger.info("%s", waiting)
            await asyncio.sleep(_TAKEN_AGAIN_S)

    def let_go(self) -> None:
        """Free the EndForward endpoint for a successor, which gets all new requests."""
        if self._waiting is not None:
            self._waiting.cancel()
        self._listener.close()

    def add_worker(self, url: str, role: InstanceRole, bootstrap_port: int | None) -> Worker:
        """Register a worker and start watching it. Raises: ValueError, the URL is invalid or
        already registered."""
        worker = self.registry.add(url, role, bootstrap_port)
        self._monitor.start(worker)
        return worker

    def remove_worker(self, worker: Worker) -> None:
        """Remove a worker and all state kept for it."""
        self.registry.remove(worker)
        self._monitor.stop(worker)
        self._listener.removed(worker.url)
        self._kv_events.removed(worker.url)

    def families(self, snapshot: Any) -> Iterator[Metric]:
        """Yield the metrics for a scrape; ``snapshot``: of the scheduler with these inputs."""
        yield from snapshot_families(snapshot, self.registry)
        yield self._metrics.selections(model_name(self.registry))
        fates, about = self._listener.counts, "Messages by result"
        yield total("sbs_endforward_received", about, fates, "fate")
        refused = self._listener.peers.refused if self._listener.peers is not None else 0
        about = "Connections to the EndForward port closed because of their number"
        yield total("sbs_endforward_peers_refused", about, refused)
        about = "Time spent on messages, the scheduler's included"
        yield total("sbs_endforward_seconds", about, self._listener.busy_s)
        if self._discovery is not None:
            yield from self._discovery.families()
        yield from self._kv_events.families()
        yield from worker_families(self.registry, self._monitor.checks, time.monotonic())

    async def close(self) -> None:
        self.let_go()
        if self._discovery is not None:
            await self._discovery.close()
        await self._monitor.close()
        await self._kv_events.close()

    def _emit(self, event: Event) -> None:
        """Send the registry's event to the scheduler, and follow KV events of instances that are
        up."""
        self._submit(event)
        if isinstance(event, InstanceDown) and event.drained:
            return  # it continues to publish
        if isinstance(event, InstanceUp | InstanceDown) and (
            worker := self.registry.get(event.instance)
        ):
            up = isinstance(event, InstanceUp)
            (self._kv_events.up if up else self._kv_events.down)(worker)

    def _reported(self, worker: Worker, report: EndForward) -> None:
        chunk = report.chunk_tokens or (worker.info.chunk_tokens if worker.info else 0)
        self._metrics.on_forward_ended(worker.url, chunk, report)
        worker.engine_holds[report.dp_rank] = engine_requests(report)
        if worker.role == "prefill" and worker.dp_size > 1:
            self._compare_ranks(worker, report)

    def _compare_ranks(self, worker: Worker, report: EndForward) -> None:
        """For each request that a prefill rank has accepted, report to the registry the DP rank
        that it was sent to and the one that accepted it."""
        for rid in report.rids:
            sent_to = self._sent_to(rid)
            if sent_to is not None and sent_to[0] == worker.url:
                self.registry.accepted(worker, rid, sent_to[1], report.dp_rank)
