"""Connects a router to its scheduler and workers, in this process or in another."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
import msgspec
from prometheus_client.core import Metric

from sglang_sbs.router.dispatch.dispatcher import LocalDispatcher
from sglang_sbs.router.dispatch.scheduler_driver import SchedulerLike
from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.local_scheduler import LocalScheduler
from sglang_sbs.router.metric_families import gauge, total
from sglang_sbs.router.options.router_options import RouterOptions
from sglang_sbs.router.policy_in_force import PolicyInForce
from sglang_sbs.router.processes import messages
from sglang_sbs.router.processes.dashboard_feed import RemoteFeed
from sglang_sbs.router.processes.leading.scheduler_choice import SchedulerChoice
from sglang_sbs.router.processes.mirrored_registry import MirroredRegistry
from sglang_sbs.router.processes.scheduler_link import SchedulerLink
from sglang_sbs.router.processes.sockets import FrontEndSocket
from sglang_sbs.router.relay.in_flight import InFlight
from sglang_sbs.router.signals.engine_signals import Watch
from sglang_sbs.router.telemetry.metrics import RouterMetrics
from sglang_sbs.router.trials import Trials
from sglang_sbs.router.workers.health import Monitor
from sglang_sbs.router.workers.worker import Worker, WorkerEvents
from sglang_sbs.scheduling import Scheduler, SchedulerConfig
from sglang_sbs.scheduling.events import InstanceRole, PolicySwitched
from sglang_sbs.scheduling.explained.stories import Story, with_attempts
from sglang_sbs.scheduling.explained.timelines import MOST_OVER
from sglang_sbs.scheduling.policy_registry import Policy, require

logger = logging.getLogger(__name__)

OVERDUE_S = 10.0
"""Time after the scheduler's own deadline at which a request without a decision is ended."""
_REFUSED = "trial_refused"
_FIND_S = 15.0
"""Longest wait of a starting front end for the scheduler; then it accepts requests without it."""


class OwnScheduler(LocalScheduler):
    """The scheduler in this process, with its inputs and its HTTP access
    (:class:`.SchedulerAccess`)."""

    def __init__(
        self,
        options: RouterOptions,
        scheduler: SchedulerLike | None,
        metrics: RouterMetrics,
        session: aiohttp.ClientSession,
    ) -> None:
        """Create the scheduler and its inputs; ``scheduler`` replaces the real one in tests."""
        self.dispatcher = dispatcher = LocalDispatcher(
            scheduler or Scheduler(options.scheduler, remembers=MOST_OVER),
            counts=metrics.on_decided,
            give_up_s=options.scheduler.default_timeout_s + OVERDUE_S,
        )
        policy, pump = PolicyInForce(options.scheduler.policy), dispatcher.pump
        policy.listeners.append(lambda policy: pump.submit(PolicySwitched(policy=policy)))
        super().__init__(options, metrics, Watch(options, metrics, session), Trials(policy, pump))

    def connect(self, in_flight: InFlight) -> None:
        """Connect the inputs to the scheduler, and to the requests of this process."""
        submit, sent_to = self.dispatcher.submit, self.dispatcher.pump.timelines.sent_to
        self._watch.connect(submit, sent_to, in_flight.find_owner, in_flight.fail_worker)

    async def add_worker(self, url: str, role: InstanceRole, bootstrap_port: int | None) -> Worker:
        return self._watch.add_worker(url, role, bootstrap_port)

    async def remove_worker(self, worker: Worker) -> None:
        self._watch.remove_worker(worker)

    async def update_worker(self, worker: Worker) -> None:
        """Do nothing: there is no other process to inform."""

    async def drain_worker(self, worker: Worker, draining: bool) -> None:
        self.registry.drain(worker, draining)

    async def switch_policy(self, policy: Policy) -> None:
        self.policy.switch(policy, _own_name())

    async def trial(self, do: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self.trials.ask(do, body)
        except ValueError as error:
            raise RouterError(400, _REFUSED, str(error)) from error

    @property
    def placing_policy(self) -> str:
        return self.policy.policy

    async def abort_elsewhere(self, rid: str) -> int:
        return 0

    async def story(self, name: str, known: Story | None) -> Story | None:
        return with_attempts(name, known, self.dispatcher.attempts)

    def scheduled_by(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        self.trials.close()
        await super().close()


class RemoteScheduler:
    """The link to a scheduler in another process, with a fallback in this one while it is
    unreachable."""

    def __init__(
        self, options: RouterOptions, metrics: RouterMetrics, session: aiohttp.ClientSession
    ) -> None:
        name = _own_name()
        self._options = options
        self._metrics = metrics
        self.policy = policy = PolicyInForce(options.scheduler.policy)
        policy.listeners.append(partial(setattr, metrics, "policy"))
        self._session = session
        self._monitor: Monitor | None = None
        self._closed = False

        dial = partial(FrontEndSocket, options.several.keys)
        self.registry = MirroredRegistry(
            breaker=options.breaker,
            monitor=options.monitor,
            prefix_source=options.prefix_source,
        )
        self.dispatcher = self._link = SchedulerLink(
            # Containers may share a host name, and each has a process 1.
            SchedulerChoice(options.several.schedulers, dial, f"{name}/{uuid.uuid4().hex[:8]}"),
            self.registry,
            name=name,
            policy=policy,
            fallback=lambda: Scheduler(_alone(options, policy.lasting), remembers=MOST_OVER),
            counts=metrics.on_decided,
            metrics_page=lambda: metrics.render().decode(),
            over=metrics.request_over,
            alone_changed=self._alone_changed,
            give_up_s=options.scheduler.default_timeout_s + OVERDUE_S,
        )
        self.feed = RemoteFeed(self._link)

    def connect(self, in_flight: InFlight) -> None:
        """Connect the link to the scheduler with the mirrored workers and the requests of this
        process."""
        link, metrics = self._link, self._metrics
        self.registry.connect(
            WorkerEvents(
                link.submit,
                self._doubted,
                in_flight.fail_worker,
                removed=lambda worker: metrics.forget(worker.url),
            )
        )
        self.registry.report = link.send_message
        link.abort, link.find = in_flight.abort, in_flight.recent.story
        link.dashboard_frame = self.feed.deliver

    async def start(self) -> None:
        await self._link.start(_FIND_S)

    async def add_worker(self, url: str, role: InstanceRole, bootstrap_port: int | None) -> Worker:
        wanted = messages.AddWorker(url=url, role=role, bootstrap_port=bootstrap_port)
        worker = self.registry.by_id((await self._link.ask(wanted)).worker_id)
        if worker is None:
            raise RouterError(
                503, "scheduler_unavailable", "the scheduler was lost in the meantime"
            )
        return worker

    async def remove_worker(self, worker: Worker) -> None:
        await self._change(worker, messages.RemoveWorker(worker_id=worker.id))

    def gain(self) -> str:
        """Return an empty text, because the scheduler process logs the gain for all front ends."""
        return ""

    async def update_worker(self, worker: Worker) -> None:
        id_, priority, cost, labels = worker.id, worker.priority, worker.cost, worker.labels
        now = messages.UpdateWorker(worker_id=id_, priority=priority, cost=cost, labels=labels)
        await self._change(worker, now)

    async def drain_worker(self, worker: Worker, draining: bool) -> None:
        change = messages.DrainWorker(worker_id=worker.id, draining=draining)
        await self._change(worker, change)

    async def switch_policy(self, policy: Policy) -> None:
        try:
            await self._link.ask(messages.SwitchPolicy(policy=policy))
        except ValueError as error:  # the scheduler is of another release
            raise RouterError(400, "unknown_policy", str(error)) from error

    async def trial(self, do: str, body: Mapping[str, Any]) -> dict[str, Any]:
        question = messages.AskTrial(do=do, body=msgspec.json.encode(body))
        try:
            answer = await self._link.ask(question)
        except ValueError as error:
            raise RouterError(400, _REFUSED, str(error)) from error
        found: dict[str, Any] = msgspec.json.decode(answer.payload)
        return found

    @property
    def placing_policy(self) -> str:
        policy = self.policy
        return policy.policy if self._link.connected else _fallback_of(policy.lasting)

    async def _change(self, worker: Worker, change: messages.Change) -> None:
        try:
            await self._link.ask(change)
        except ValueError:
            logger.info("worker %s was already removed", worker.url)

    async def abort_elsewhere(self, rid: str) -> int:
        try:
            return (await self._link.ask(messages.AbortElsewhere(rid=rid))).count
        except RouterError:
            logger.warning("without the scheduler only this front end's requests are aborted")
            return 0

    async def story(self, name: str, known: Story | None) -> Story | None:
        if self._link.pump is not None:
            return with_attempts(name, known, self._link.attempts)
        rids = [] if known is None else [attempt.rid for attempt in known.sent]
        try:
            answer = await self._link.ask(messages.AskStory(name=name, rids=rids))
        except RouterError:
            return known
        found = messages.read_story(answer.payload)
        if found is not None and known is not None:
            known.attempts = found.attempts
        return known or found

    def scheduled_by(self) -> dict[str, Any]:
        return {"scheduler": msgspec.to_builtins(self._link.lead())}

    def families(self) -> Iterator[Metric]:
        """Yield metrics of the link to the scheduler; the scheduler process exports all others."""
        lead = self._link.lead()
        about = "Front ends without the scheduler now"
        yield gauge("sbs_front_ends_alone", about, not lead.connected)
        about, served = "Front ends served by a scheduler", {lead.address: lead.connected}
        yield gauge("sbs_front_ends_served", about, served, "scheduler")
        yield total("sbs_scheduler_losses", "Times a front end lost the scheduler", lead.losses)
        about = "Times a front end found a different active scheduler"
        yield total("sbs_scheduler_changes", about, lead.changes)
        about = "Messages of replaced schedulers, dropped"
        yield total("sbs_scheduler_messages_fenced", about, self._link.fenced)

    async def close(self) -> None:
        self.feed.close()
        self._closed = True
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            await monitor.close()

    def _doubted(self, worker: Worker) -> None:
        if self._monitor is not None:
            self._monitor.doubt(worker)

    def _alone_changed(self, alone: bool) -> None:
        """Check the workers' health in this process only while it is without scheduler
        (``alone``)."""
        if self._closed:
            return
        if alone and self._monitor is None:
            config = replace(self._options.monitor, load_poll_interval_s=None)
            self._monitor = Monitor(self.registry, self._session, config, self._link.submit)
            for worker in self.registry:
                self._monitor.start(worker)
        elif not alone and self._monitor is not None:
            self._monitor.stop_all()
            self._monitor = None
        self.feed.scheduler_changed()  # last, as it may raise


def _alone(options: RouterOptions, policy: Policy) -> SchedulerConfig:
    """Return the fallback's configuration: an immediate policy that needs no reports of engines."""
    return msgspec.structs.replace(options.scheduler, policy=_fallback_of(policy))


def _fallback_of(policy: Policy) -> Policy:
    return require(policy).fallback or policy


def _own_name() -> str:
    """Return this process's name for logs, ``HOST/PID``."""
    return f"{socket.gethostname()}/{os.getpid()}"
