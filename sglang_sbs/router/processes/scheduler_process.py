"""The scheduler process of a router with several front ends: the scheduler, all inputs from
engines, the front ends' sockets, and the metrics port with the sum over all processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from functools import partial

from aiohttp import web
from prometheus_client.core import Metric

from sglang_sbs.dashboard.gain import MINUTE_S, WINDOW_MINUTES
from sglang_sbs.router.dispatch.decision_times import lag_families
from sglang_sbs.router.election import Election, parse_election
from sglang_sbs.router.local_scheduler import LocalScheduler
from sglang_sbs.router.metric_families import gauge, total
from sglang_sbs.router.options.router_options import RouterOptions
from sglang_sbs.router.options.several import SeveralProcesses
from sglang_sbs.router.options.tls import worker_session
from sglang_sbs.router.policy_in_force import PolicyInForce
from sglang_sbs.router.processes.front_end_sessions import Hub
from sglang_sbs.router.processes.leading.fixed_order import FixedOrder
from sglang_sbs.router.processes.leading.lead import Lead, Unopposed
from sglang_sbs.router.processes.sockets import FrontEndSocket, SchedulerSocket
from sglang_sbs.router.processes.summed_metrics import page_parts
from sglang_sbs.router.signals.engine_signals import Watch
from sglang_sbs.router.telemetry.loop_watch import LoopWatch
from sglang_sbs.router.telemetry.metrics import RouterMetrics
from sglang_sbs.router.telemetry.metrics_port import MetricsPort, page_of
from sglang_sbs.scheduling import Scheduler
from sglang_sbs.scheduling.events import Event, InstanceDown, InstanceUp
from sglang_sbs.scheduling.explained.timelines import MOST_OVER

logger = logging.getLogger(__name__)

_AGAIN_S = 0.2
_LOOK_S = 15.0
"""Longest wait for workers' first responses before standing for election."""
_LOOK_AGAIN_S = 0.05
_LAST_WORDS_MS = 200
_SCRAPE_TURN_S = 0.005
"""Seconds spent writing metrics before other work of this process gets a turn."""


class SchedulerProcess:
    """The scheduler process. It serves from :meth:`start` until :meth:`stop`."""

    def __init__(self, options: RouterOptions) -> None:
        self.options = options
        self.endpoint = ""
        self.endforward_endpoint: str | None = None
        self.metrics = RouterMetrics(
            options.prometheus_duration_buckets, options.scheduler.policy, self._knows
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._metrics_port: MetricsPort | None = None

    async def start(self) -> None:
        """Listen for front ends, and start watching workers in the background.
        Raises: OSError, an endpoint or the metrics port is in use; ValueError, workers cannot be
        discovered (``--service-discovery``)."""
        options = self.options
        several = options.several
        assert several.listen is not None, "checked with the command line"
        election = _election_of(several)
        self.lead = Lead(election, several.advertise)
        loop_watch = LoopWatch()
        self._session = worker_session(options)
        self._watch = Watch(options, self.metrics, self._session)
        self._sockets = SchedulerSocket()
        self._hub = hub = Hub(
            self._watch,
            self._sockets.send_message,
            Scheduler(options.scheduler, remembers=MOST_OVER),
            self.lead,
            policy=PolicyInForce(options.scheduler.policy),
            counts=self.metrics.on_decided,
        )
        self._local = LocalScheduler(
            options, self.metrics, self._watch, hub.trials, self.lead.shown_to_people
        )
        hub.frames = self._local.feed.watch
        sent_to = hub.pump.timelines.sent_to
        self._watch.connect(self._submit, sent_to, hub.find_owner, hub.silenced)
        self.metrics.collect_with(self._collect)
        self.metrics.collect_with(loop_watch.families)
        try:
            await self._listen_for_metrics()
            self.endforward_endpoint = await self._local.start()
            self.endpoint = self._sockets.open(several.listen, several.keys, hub.receive)
        except BaseException:
            await self.stop()
            raise
        for work in (loop_watch.run(), self._stand(election), self._log_gain()):
            self._tasks.append(asyncio.create_task(work))

    @property
    def prometheus_port(self) -> int:
        return self._metrics_port.port if self._metrics_port is not None else 0

    @property
    def front_ends(self) -> int:
        return self._hub.front_ends

    def let_go(self) -> None:
        """Free the EndForward endpoint and the metrics port for the process that takes over."""
        self._watch.let_go()
        port, self._metrics_port = self._metrics_port, None
        if port is not None:
            self._tasks.append(asyncio.create_task(port.close()))

    async def stop(self) -> None:
        for task in self._tasks:  # first, so that another scheduler can take over at once
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._local.close()
        self._hub.close()
        self._sockets.close(_LAST_WORDS_MS)
        self._hub.pump.close()
        if self._metrics_port is not None:
            await self._metrics_port.close()
        await self._session.close()

    async def _stand(self, election: Election) -> None:
        """Stand for election repeatedly. With several schedulers, first check the workers: an
        active scheduler that does not know them yet refuses requests that another could place."""
        if not isinstance(election, Unopposed):
            self._hub.stands = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    while not self._has_looked():  # noqa: ASYNC110 - there is no event for it
                        await asyncio.sleep(_LOOK_AGAIN_S)
        self._hub.stands = True
        last_cause = ""
        while True:
            try:
                await election.run(self._hub.lead, self._hub.follow)
            except Exception as error:
                if repr(error) != last_cause:
                    logger.exception("the election failed: this scheduler is now a standby")
                last_cause = repr(error)
            await asyncio.sleep(_AGAIN_S)

    def _has_looked(self) -> bool:
        found = len(self._watch.registry) > 0 or self.options.discovery is None
        return found and self._hub.membership.looked

    async def _log_gain(self, every_s: float = MINUTE_S) -> None:
        """Log once a minute the policy's TTFT gain over immediate dispatch, if known. Front ends
        log everything else."""
        while True:
            await asyncio.sleep(every_s)
            try:
                if line := self._local.gain():
                    logger.info("last %d minutes: %s", WINDOW_MINUTES, line)
            except Exception:
                logger.exception("the estimate of the gain failed")

    # Between the parts ------------------------------------------------------------------------

    def _submit(self, event: Event) -> None:
        self._hub.pump.submit(event)
        if isinstance(event, InstanceUp | InstanceDown):
            self._hub.workers_changed()

    def _knows(self, worker_url: str) -> bool:
        return self._watch.registry.get(worker_url) is not None

    # Metrics ----------------------------------------------------------------------------------

    async def _listen_for_metrics(self) -> None:
        host, number = self.options.prometheus_host, self.options.prometheus_port
        standing = {"/readiness": self._readiness, "/active": self._active}
        pages, malformed = {"/metrics": self._metrics, **standing}, self.metrics.malformed.inc
        self._metrics_port = port = MetricsPort(host, number, pages, malformed)
        if self.options.take_over:
            self._tasks.append(asyncio.create_task(port.open_when_free()))
        else:
            await port.open()

    async def _metrics(self, _request: web.Request) -> web.Response:
        pages = await self._hub.metrics_pages()
        parts = []
        since_s = time.monotonic()
        for part in page_parts(pages, own=self.metrics.registry.collect()):
            parts.append(part)
            if time.monotonic() - since_s > _SCRAPE_TURN_S:
                await asyncio.sleep(0)  # let decisions go first
                since_s = time.monotonic()
        return page_of("".join(parts).encode())

    async def _readiness(self, _request: web.Request) -> web.Response:
        """Answer ``/readiness``: 200 once the workers are checked, otherwise 503. A standby is
        ready as well, because it can take over."""
        ready = self._hub.settled
        return self._standing("ready" if ready else "checking the workers", good=ready)

    async def _active(self, _request: web.Request) -> web.Response:
        return self._standing("active" if self.lead.active else "standby", good=self.lead.active)

    def _standing(self, status: str, *, good: bool) -> web.Response:
        lead = self.lead
        shown = {"status": status, "scheduler": "active" if lead.active else "standby"}
        known = {"term": lead.term, "leader": lead.leader, "front_ends": self.front_ends}
        return web.json_response(shown | known, status=200 if good else 503)

    def _collect(self) -> Iterator[Metric]:
        yield from self._local.families()
        yield from lag_families(self._hub.lag)
        yield from self.lead.families()
        about = "Events on which the scheduler failed (a defect)"
        yield total("sbs_scheduler_errors", about, self._hub.pump.errors)
        yield gauge("sbs_front_ends", "Front ends connected to the scheduler", self.front_ends)
        fates = self._sockets.counts | {"foreign": self._hub.foreign}
        yield total("sbs_front_end_messages", "Messages of front ends by result", fates, "fate")


def _election_of(several: SeveralProcesses) -> Election:
    if several.election is not None:
        url, times = several.election
        try:
            return parse_election(url, several.advertise, times)
        except ValueError as error:
            raise ValueError(f"--sbs-election: {error}") from error
    others = several.schedulers
    if len(others) <= 1:
        return Unopposed()
    dial = partial(FrontEndSocket, several.keys)
    return FixedOrder(others, others.index(several.advertise), dial)
