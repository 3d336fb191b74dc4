"""Assembles, starts and gracefully stops the router process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from aiohttp import web
from prometheus_client.core import Metric

from sglang_sbs.console.plain_words import counted, naming_port
from sglang_sbs.dashboard.pages import Dashboard
from sglang_sbs.router.api.surface import Surface
from sglang_sbs.router.client import intake
from sglang_sbs.router.client.tls_port import TlsPort
from sglang_sbs.router.dispatch.dispatcher import Dispatcher
from sglang_sbs.router.dispatch.scheduler_driver import SchedulerLike
from sglang_sbs.router.engines.connection_pool import Pool
from sglang_sbs.router.lanes import Lanes
from sglang_sbs.router.memory import give_back_large_blocks
from sglang_sbs.router.metric_families import gauge, total
from sglang_sbs.router.options.router_options import RouterOptions
from sglang_sbs.router.options.tls import server_ssl, worker_session, worker_ssl
from sglang_sbs.router.prompts.block_names import BlockNamer
from sglang_sbs.router.prompts.chat_tokenizer import ChatTokenizer
from sglang_sbs.router.prompts.length_estimate import PromptLengths
from sglang_sbs.router.prompts.reader import PromptReader
from sglang_sbs.router.prompts.tokenizer_check import EngineTokenizers
from sglang_sbs.router.relay.admission import Admission
from sglang_sbs.router.relay.attempts import Attempts
from sglang_sbs.router.relay.in_flight import InFlight
from sglang_sbs.router.relay.relay import Relay
from sglang_sbs.router.schedulers import OwnScheduler, RemoteScheduler
from sglang_sbs.router.telemetry.loop_watch import LoopWatch
from sglang_sbs.router.telemetry.metrics import RouterMetrics
from sglang_sbs.router.telemetry.metrics_port import MetricsPort, page_of
from sglang_sbs.router.telemetry.tracing import open_traces
from sglang_sbs.scheduling.policy_registry import Policy

logger = logging.getLogger(__name__)

_BACKLOG = 4096
_SOON_S = 0.2
_LAST_WORDS_S = 5.0
"""Time at shutdown for aborted requests to send their error to clients."""
_LAST_CALL_S = 0.05
_IDLE_S = 3.0
"""Time for which an exiting front end keeps idle connections open."""
_SWITCH_S = 0.001
"""Longest time that the threads of :class:`.lanes.Lanes` may keep the interpreter lock."""
_MINUTE_S = 60.0
_SPARE_FILES = 64
"""File descriptors kept for listening sockets, logs, health checks and clients being refused."""


class RouterServer:
    """A router in this process, or one of its front ends: ``await start()``, serve,
    ``await stop()``. Also usable in tests and other programs."""

    def __init__(self, options: RouterOptions, scheduler: SchedulerLike | None = None) -> None:
        """Create the router; ``scheduler`` replaces the real one in tests."""
        self.options = options
        self.metrics = RouterMetrics(
            options.prometheus_duration_buckets, options.scheduler.policy, self._knows
        )
        self.port = options.port
        self.endforward_endpoint: str | None = None
        self._replacement = scheduler
        self._file_limit = 0
        self._runner: web.AppRunner | None = None
        self._metrics_port: MetricsPort | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._loop_watch = LoopWatch()
        self._listening: list[asyncio.Server | TlsPort] = []
        self.traces = open_traces(options.otlp_endpoint) if options.otlp_endpoint else None

    async def start(self) -> None:
        """Start listening, and watch workers in the background. Raises: OSError, a port or the
        EndForward endpoint is in use; ValueError, the tokenizer cannot be loaded."""
        self._file_limit = raise_file_limit()
        sys.setswitchinterval(_SWITCH_S)
        give_back_large_blocks()
        self.doorman = intake.Doorman(most=self._file_limit // 2)
        self._build()
        try:
            surface = Surface(self.options, self.relay, self.scheduler, self.session)
            self._runner = web.AppRunner(
                surface.application(self.doorman, self.dashboard),
                handler_cancellation=True,
                access_log=None,
                logger=intake.ParserLog(self.metrics.malformed.inc),
                auto_decompress=False,
                max_line_size=intake.MAX_HEAD_LINE_BYTES,
                max_field_size=intake.MAX_HEAD_LINE_BYTES,
                keepalive_timeout=intake.KEEP_ALIVE_S,
                read_bufsize=intake.READ_BYTES,
                shutdown_timeout=_LAST_WORDS_S,
            )
            # Connect to the scheduler before the port opens, so that no request arrives without
            # one.
            self.endforward_endpoint = await self.scheduler.start()
            self.port = await self._listen(self._runner)
            await self._open_metrics()
        except BaseException:
            await self.stop(grace_s=0.0)
            raise
        for work in (self.tokenizers.watch(), self._log_minutes(), self._loop_watch.run()):
            self._tasks.append(asyncio.create_task(work))

    def _build(self) -> None:
        options = self.options
        path, template = options.tokenizer_path, options.chat_template
        self.tokenizer = ChatTokenizer.load(path, template) if path else None
        self.session = worker_session(options)
        self.pool = Pool(asyncio.get_running_loop(), ssl_context=worker_ssl(options))
        self.scheduler = scheduler = self._make_scheduler()
        self.registry = scheduler.registry
        self.dispatcher: Dispatcher = scheduler.dispatcher
        self.dashboard = Dashboard(scheduler.feed)
        missed = self.metrics.length_error
        self.lengths = PromptLengths(lambda relative: missed.observe(abs(relative)))
        self.lanes = Lanes()
        self._build_prompts()
        self.in_flight = InFlight(
            dispatcher=self.dispatcher,
            pool=self.pool,
            lengths=self.lengths,
            metrics=self.metrics,
            worker_key=options.worker_key,
            traces=self.traces,
            transfer_timeout_s=options.relay.transfer_timeout_s,
            last_chance_s=options.relay.last_chance_s,
        )
        scheduler.connect(self.in_flight)
        self.admission = Admission(
            options.max_concurrent_requests,
            options.queue_size,
            options.queue_timeout_s,
            self._has_descriptors,
            refill_per_s=options.rate_limit_per_s,
            observe=self.metrics.door,
        )
        attempts = Attempts(
            options.relay,
            registry=self.registry,
            dispatcher=self.dispatcher,
            tokenizers=self.tokenizers,
            metrics=self.metrics,
            in_flight=self.in_flight,
        )
        self.relay = Relay(
            options.relay,
            attempts=attempts,
            prompts=self.prompts,
            metrics=self.metrics,
            admission=self.admission,
            in_flight=self.in_flight,
            lanes=self.lanes,
        )
        self._policy_changed(scheduler.policy.policy)
        # Run before the scheduler's listener, so that requests of a new policy have what it needs.
        scheduler.policy.listeners.insert(0, self._policy_changed)
        self.metrics.collect_with(self._collect)
        self.metrics.collect_with(self._loop_watch.families)

    def _build_prompts(self) -> None:
        options = self.options
        self.tokenizers = EngineTokenizers(
            self.registry,
            self.session,
            self.tokenizer,
            forwarding=options.forward_token_ids,
            api_key=options.api_key,
            every_s=options.monitor.tokenizers_every_s,
            again_s=options.monitor.tokenizers_again_s,
        )
        self.prompts = PromptReader(
            self.tokenizer,
            self.lengths,
            BlockNamer(as_published=options.prefix_source != "approximate"),
            self.tokenizers,
            lanes=self.lanes,
        )

    def _policy_changed(self, policy: Policy) -> None:
        """Compute prefix blocks and label batches only for policies that use them, because this
        costs time."""
        names = self.options.names_blocks(policy)
        approximate = self.options.prefix_source in ("auto", "approximate")
        self.tokenizers.names_blocks = names
        self.prompts.names_text = names and approximate
        self.relay.attempts.sends_gangs = self.options.sends_gangs(policy)

    def _make_scheduler(self) -> OwnScheduler | RemoteScheduler:
        options, metrics, session = self.options, self.metrics, self.session
        if options.role == "front-end":
            return RemoteScheduler(options, metrics, session)
        return OwnScheduler(options, self._replacement, metrics, session)

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop accepting, let requests in flight finish, and abort those still running after
        ``grace_s`` (``None``: ``--shutdown-grace-period-secs``)."""
        self.in_flight.draining = True
        self.dashboard.close()
        limit_s = self.options.shutdown_grace_s if grace_s is None else grace_s
        if self.options.role == "front-end" and limit_s > 0:
            await asyncio.sleep(_LAST_CALL_S)  # accept connections already waiting at the port
        for listening in self._listening:
            listening.close()  # connections continue; each response closes its own
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.in_flight.wait_idle()
                if self.options.role == "front-end":
                    await self._wait_for_idle_connections()
        left = self.in_flight.abort()
        if left:
            logger.warning("aborting %s still in flight", counted(left, "request"))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self.in_flight.wait_idle()
                    await self.in_flight.aborts.wait_idle()
        await self.in_flight.parking.drain()
        for task in self._tasks:
            task.cancel()
        await self.scheduler.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._metrics_port is not None:
            await self._metrics_port.close()
        self.lanes.close()
        self.pool.close()
        await self.session.close()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
        self.dispatcher.close()

    async def _wait_for_idle_connections(self) -> None:
        """Wait until clients have dropped their kept connections. A request that arrives as its
        connection closes is lost, so idle ones stay open for a while, and each ends with its next
        response."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_IDLE_S):
                while self._connections():  # noqa: ASYNC110 - aiohttp has no event for closed ones
                    await asyncio.sleep(_LAST_CALL_S)
        await self.in_flight.wait_idle()

    def _connections(self) -> int:
        web_server = self._runner.server if self._runner is not None else None
        return len(web_server.connections) if web_server is not None else 0

    async def _log_minutes(self, every_s: float = _MINUTE_S) -> None:
        """Log one line for each minute with requests."""
        while True:
            await asyncio.sleep(every_s)
            try:
                if line := self.in_flight.recent.minute.take(self.scheduler.gain()):
                    logger.info("%s", line)
            except Exception:
                logger.exception("the line of the last minute failed")

    def _knows(self, worker_url: str) -> bool:
        return self.registry.get(worker_url) is not None

    def _has_descriptors(self, units: int) -> bool:
        """Return whether file descriptors suffice for ``units`` more attempts. Each needs one to
        prefill and one to decode, and some stay reserved."""
        of_legs = max(self.pool.open_connections, 2 * self.admission.running)
        used = self.in_flight.client_requests + of_legs
        return used + 2 * units <= self._file_limit - max(_SPARE_FILES, self._file_limit // 20)

    # Listening --------------------------------------------------------------------------------

    async def _listen(self, runner: web.AppRunner) -> int:
        """Open the serving port, or the sockets inherited from the supervisor. Returns the port
        number."""
        options = self.options
        await runner.setup()
        assert runner.server is not None
        gate = partial(intake.Gate, self.doorman, intake.refusing_odd_expect(runner.server))
        tls = server_ssl(options)

        async def open_port(*place: Any, sock: socket.socket | None = None) -> None:
            loop = asyncio.get_running_loop()
            # With TLS, connections are accepted by TlsPort, so that they are counted at once.
            listening = await loop.create_server(
                *(gate, *place), sock=sock, backlog=_BACKLOG, start_serving=tls is None
            )
            if tls is None:
                self._listening.append(listening)
                return
            sockets = [socket.socket(fileno=os.dup(port.fileno())) for port in listening.sockets]
            listening.close()
            for port in sockets:
                port.listen(_BACKLOG)
            self._listening.append(TlsPort(sockets, tls, self.doorman, gate))

        if options.listen_fds:
            for fd in options.listen_fds:
                await open_port(sock=socket.socket(fileno=fd))
        else:
            with naming_port("--port", options.host, options.port):
                await open_port(options.host, options.port)
        for listening in self._listening:
            for sock in listening.sockets:  # accepted sockets inherit it
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return int(self._listening[0].sockets[0].getsockname()[1])

    # Metrics ----------------------------------------------------------------------------------

    @property
    def prometheus_port(self) -> int:
        return self._metrics_port.port if self._metrics_port is not None else 0

    async def _open_metrics(self) -> None:
        """Open the metrics port, unless the scheduler process exports this front end's metrics. A
        front end on another machine has its own page, and serves clients even without it."""
        options, apart = self.options, self.options.several.apart
        if options.role == "front-end" and not apart:
            return
        number, pages = options.prometheus_port, {"/metrics": self._metrics_page}
        if apart and number:
            # Use the port after the scheduler's, which may be on the same machine.
            number = min(number + 1, 65535)
        malformed = self.metrics.malformed.inc
        port = MetricsPort(options.prometheus_host, number, pages, malformed)
        self._metrics_port = port
        if apart:
            opening = asyncio.create_task(port.open_when_free())
            self._tasks.append(opening)
            # Wait briefly, so that the start-up log can name the port.
            await asyncio.wait({opening}, timeout=_SOON_S)
        else:
            await port.open()

    async def _metrics_page(self, _request: web.Request) -> web.Response:
        return page_of(self.metrics.render())

    def _collect(self) -> Iterator[Metric]:
        about = "Events on which the scheduler failed (a defect)"
        yield total("sbs_scheduler_errors", about, self.dispatcher.scheduler_errors)
        yield from self.scheduler.families()
        about = "Calibrated ratio for estimated prompt lengths"
        yield gauge("sbs_prompt_bytes_per_token", about, self.lengths.bytes_per_token)
        yield total(
            "sbs_prompts", "Prompts by source of their length", self.prompts.counts, "counted"
        )
        about = "Prompts of exact length for which engines reported another"
        yield total("sbs_prompts_contradicted", about, self.lengths.contradicted)
        about = "Requests sent to engines as token ids"
        yield total("sbs_requests_sent_as_ids", about, self.relay.attempts.sent_as_ids)
        parking = self.in_flight.parking
        about = "Cancelled decode requests waiting until no KV can arrive for them"
        yield gauge("sbs_parked_requests", about, parking.by_worker(), "worker")
        about = "Decode requests that were parked so far"
        yield total("sbs_requests_parked", about, parking.parked_total)
        held = self.in_flight.sessions()
        sessions = {worker.url: held.get(worker.url, 0) for worker in self.registry}
        about = "Conversations in flight"
        yield gauge("smg_worker_routing_keys_active", about, sessions, "worker")


def raise_file_limit() -> int:
    """Raise this process's limit on file descriptors as far as possible, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 1_048_576
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            logger.warning("open files stay limited to %d: %s", soft, error)
            return soft
    return max(soft, wanted)
