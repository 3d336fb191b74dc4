"""The router process put together: parts, start, graceful end.

Owns construction and lifetime of every part. Must not know what the parts do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import ssl
import time
from collections.abc import Iterator

import aiohttp
from aiohttp import web
from prometheus_client.core import Metric

from sglang_sbs.router.admission import Admission
from sglang_sbs.router.app import build_app
from sglang_sbs.router.chat_tokenizer import ChatTokenizer
from sglang_sbs.router.dispatcher import Dispatcher, SchedulerLike
from sglang_sbs.router.endforward import EndForwardListener
from sglang_sbs.router.eventlog import EventLogWriter
from sglang_sbs.router.flags import FEEDBACK_POLICIES, RouterOptions
from sglang_sbs.router.inflight import InFlight
from sglang_sbs.router.intake import Doorman
from sglang_sbs.router.lengths import PromptLengths
from sglang_sbs.router.metrics import RouterMetrics, gauge, snapshot_families, total
from sglang_sbs.router.monitor import Monitor
from sglang_sbs.router.registry import Registry, Worker
from sglang_sbs.router.relay import Relay
from sglang_sbs.router.server_info import WorkerInfo
from sglang_sbs.router.upstream import Pool
from sglang_sbs.scheduling.events import InstanceRole
from sglang_sbs.wire import EndForward

logger = logging.getLogger(__name__)

_BACKLOG = 4096
_FLUSH_S = 1.0
_OVERDUE_S = 10.0
"""So long after the scheduler's own deadline a request that got no decision is ended."""
_LAST_WORDS_S = 5.0
"""At the end: for aborted requests to say so, and for clients to take it."""
_SPARE_FILES = 64
"""Descriptors kept for listening sockets, logs, health checks and clients being refused."""


class RouterServer:
    """``await start()``, serve, ``await stop()``; also usable inside tests and other programs."""

    registry: Registry
    dispatcher: Dispatcher
    relay: Relay
    in_flight: InFlight
    doorman: Doorman
    session: aiohttp.ClientSession

    def __init__(self, options: RouterOptions, scheduler: SchedulerLike | None = None) -> None:
        """``scheduler`` replaces the real one (tests)."""
        self.options = options
        self.metrics = RouterMetrics(options.prometheus_duration_buckets)
        self.draining = False
        self.started_at = int(time.time())
        self.port = options.port
        self.prometheus_port = options.prometheus_port
        self.endforward_endpoint: str | None = None
        self._scheduler = scheduler
        self._file_limit = 0
        self._runners: list[web.AppRunner] = []
        self._socket: asyncio.Server | None = None
        self._flusher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen; workers are waited for in the background.

        Raises:
            OSError: a port or the EndForward endpoint is taken.
            ValueError: the tokenizer cannot be loaded.
        """
        options = self.options
        self._file_limit = raise_file_limit()
        self._build()
        try:
            self.endforward_endpoint = self._listener.open(options.endforward_bind)
            self._runners = [
                web.AppRunner(
                    build_app(self),
                    handler_cancellation=True,
                    access_log=None,
                    keepalive_timeout=75.0,
                    shutdown_timeout=_LAST_WORDS_S,
                ),
                web.AppRunner(self._metrics_app(), access_log=None, shutdown_timeout=_LAST_WORDS_S),
            ]
            self.port = await self._listen(self._runners[0])
            self.prometheus_port = await self._listen_for_metrics(self._runners[1])
        except BaseException:
            await self.stop(grace_s=0.0)
            raise
        for url, port in options.prefill:
            self.add_worker(url, "prefill", port)
        for url in options.decode:
            self.add_worker(url, "decode", None)
        self._flusher = asyncio.create_task(self._flush_log())

    def _build(self) -> None:
        options = self.options
        loop = asyncio.get_running_loop()
        tokenizer = (
            ChatTokenizer.load(options.tokenizer_path, options.chat_template)
            if options.tokenizer_path
            else None
        )
        scheduler = self._scheduler
        if scheduler is None:
            from sglang_sbs.scheduling import Scheduler

            scheduler = Scheduler(options.scheduler)
        log = EventLogWriter(options.event_log, options.scheduler) if options.event_log else None
        tls = self._worker_ssl()
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls if tls is not None else True)
        )
        self.dispatcher = Dispatcher(
            scheduler,
            observer=self.metrics,
            event_log=log,
            give_up_s=options.scheduler.default_timeout_s + _OVERDUE_S,
        )
        self.registry = Registry(
            self.dispatcher.submit,
            options.breaker,
            expects_endforward=(
                options.scheduler.policy in FEEDBACK_POLICIES
                and options.endforward_bind is not None
            ),
        )
        self.pool = Pool(loop, ssl_context=tls)
        self.lengths = PromptLengths(tokenizer, self.metrics.length_missed)
        self.in_flight = InFlight(
            dispatcher=self.dispatcher,
            pool=self.pool,
            lengths=self.lengths,
            metrics=self.metrics,
            worker_key=options.worker_key,
        )
        self.registry.silenced = self.in_flight.fail_worker
        self.admission = Admission(
            options.max_concurrent_requests,
            options.queue_size,
            options.queue_timeout_s,
            self._has_descriptors,
        )
        self.relay = Relay(
            options.relay,
            registry=self.registry,
            dispatcher=self.dispatcher,
            pool=self.pool,
            lengths=self.lengths,
            metrics=self.metrics,
            admission=self.admission,
            in_flight=self.in_flight,
        )
        self._listener = EndForwardListener(
            self.registry, self.dispatcher.submit, self.in_flight.find_owner, self._reported
        )
        self._monitor = Monitor(
            self.registry,
            self.session,
            options.monitor,
            self.dispatcher.submit,
            self._described,
        )
        self.metrics.collect_with(self._collect)

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop accepting, let requests in flight end, abort those that do not in time."""
        self.draining = True
        if self._socket is not None:
            self._socket.close()  # what is connected may go on; every answer says it is the last
        limit_s = self.options.shutdown_grace_s if grace_s is None else grace_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.in_flight.wait_idle()
        left = self.in_flight.abort_all()
        if left:
            logger.warning("aborting %d requests still in flight", left)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self.in_flight.wait_idle()
        if self._flusher is not None:
            self._flusher.cancel()
        await self._monitor.close()
        self._listener.close()
        for runner in self._runners:
            await runner.cleanup()
        self._runners.clear()
        self.lengths.close()
        self.pool.close()
        await self.session.close()
        self.dispatcher.close()

    # Workers ----------------------------------------------------------------------------------

    def add_worker(self, url: str, role: InstanceRole, bootstrap_port: int | None) -> Worker:
        """Register a worker and wait for it in the background. Raises: ValueError."""
        worker = self.registry.add(url, role, bootstrap_port)
        self._monitor.start(worker)
        return worker

    def remove_worker(self, worker: Worker) -> None:
        self.registry.remove(worker)
        self._monitor.stop(worker)

    def _described(self, worker: Worker, info: WorkerInfo) -> None:
        self._listener.described(worker, info)

    def _reported(self, worker: Worker, report: EndForward) -> None:
        chunk = report.chunk_tokens or (worker.info.chunk_tokens if worker.info else 0)
        self.metrics.forward_ended(worker.url, chunk, report)

    def _has_descriptors(self) -> bool:
        """A request needs two for its legs (its client has one); some stay for other things."""
        used = self.in_flight.client_requests + self.pool.open_connections
        return used + 2 <= self._file_limit - max(_SPARE_FILES, self._file_limit // 20)

    # Listening --------------------------------------------------------------------------------

    async def _listen(self, runner: web.AppRunner) -> int:
        """Open the serving port; returns the real one (for port 0)."""
        options = self.options
        await runner.setup()
        assert runner.server is not None
        self.doorman = Doorman(runner.server)
        self._socket = await asyncio.get_running_loop().create_server(
            self.doorman,
            options.host,
            options.port,
            ssl=self._server_ssl(),
            backlog=_BACKLOG,
        )
        return int(self._socket.sockets[0].getsockname()[1])

    async def _listen_for_metrics(self, runner: web.AppRunner) -> int:
        await runner.setup()
        site = web.TCPSite(runner, self.options.prometheus_host, self.options.prometheus_port)
        await site.start()
        return int(runner.addresses[0][1])

    def _server_ssl(self) -> ssl.SSLContext | None:
        options = self.options
        if options.tls_cert_path is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(options.tls_cert_path, options.tls_key_path)
        return context

    def _worker_ssl(self) -> ssl.SSLContext | None:
        options = self.options
        if not options.ca_cert_paths and options.client_cert_path is None:
            return None
        context = ssl.create_default_context()
        for path in options.ca_cert_paths:
            context.load_verify_locations(path)
        if options.client_cert_path is not None:
            context.load_cert_chain(options.client_cert_path, options.client_key_path)
        return context

    # Metrics ----------------------------------------------------------------------------------

    def _metrics_app(self) -> web.Application:
        async def metrics(_request: web.Request) -> web.Response:
            return web.Response(
                body=self.metrics.render(),
                headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
            )

        app = web.Application()
        app.router.add_get("/metrics", metrics)
        return app

    def _collect(self) -> Iterator[Metric]:
        yield from snapshot_families(self.dispatcher.snapshot())
        health = gauge("smg_worker_health", "1 if healthy", "worker", "worker_type")
        breaker = gauge(
            "smg_worker_cb_state", "Circuit breaker: 0 closed, 1 open, 2 half-open", "worker"
        )
        active = gauge("smg_worker_requests_active", "Legs in flight", "worker")
        problems = gauge("sbs_worker_problem", "1 per known problem", "worker", "problem")
        messages = total("sbs_endforward_messages", "EndForward messages", "worker", "dp_rank")
        fates = total("sbs_endforward_received", "Messages by what became of them", "fate")
        pool = gauge("smg_worker_pool_size", "Registered workers", "worker_type")
        states = {"closed": 0, "open": 1, "half_open": 2}
        for worker in self.registry:
            health.add_metric([worker.url, worker.role], float(worker.healthy))
            breaker.add_metric([worker.url], states[worker.breaker.state])
            active.add_metric([worker.url], worker.active)
            for kind in worker.problems:
                problems.add_metric([worker.url, kind], 1)
            for rank, count in worker.reports.items():
                messages.add_metric([worker.url, str(rank)], count)
        for fate, count in self._listener.counts.items():
            fates.add_metric([fate], count)
        for role in ("prefill", "decode"):
            pool.add_metric([role], sum(w.role == role for w in self.registry))
        errors = total("sbs_scheduler_errors", "Events the scheduler failed on: a defect")
        errors.add_metric([], self.dispatcher.scheduler_errors)
        ratio = gauge("sbs_prompt_bytes_per_token", "Calibrated, for estimated prompt lengths")
        ratio.add_metric([], self.lengths.bytes_per_token)
        yield from (health, breaker, active, problems, messages, fates, pool, errors, ratio)

    async def _flush_log(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            self.dispatcher.flush_log()


def raise_file_limit() -> int:
    """Take all the descriptors the system allows; returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 1_048_576
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            logger.warning("open files stay limited to %d: %s", soft, error)
            return soft
    return max(soft, wanted)
