"""A scheduler with its inputs from engines: in a router's only process, or in the scheduler process
of a router with several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from prometheus_client.core import Metric

from sglang_sbs import __version__
from sglang_sbs.console.plain_words import naming_file
from sglang_sbs.dashboard.feed import LocalFeed
from sglang_sbs.dashboard.gain import by_bound, in_words
from sglang_sbs.router.metric_families import gauge
from sglang_sbs.router.options.router_options import RouterOptions
from sglang_sbs.router.signals.engine_signals import Watch
from sglang_sbs.router.telemetry.metrics import RouterMetrics, build_info
from sglang_sbs.router.trials import Trials
from sglang_sbs.router.workers.worker_view import problems_of
from sglang_sbs.scheduling import Scheduler
from sglang_sbs.scheduling.eventlog import EventLogWriter
from sglang_sbs.scheduling.explained.timelines import Timeline


class LocalScheduler:
    """A scheduler in the process that runs it, with its inputs from engines: build it, connect the
    inputs (:meth:`.Watch.connect`), then :meth:`start` it."""

    def __init__(
        self,
        options: RouterOptions,
        metrics: RouterMetrics,
        watch: Watch,
        trials: Trials,
        lead: Callable[[], dict[str, Any] | None] = lambda: None,
    ) -> None:
        """Build the scheduler around the pump and the policy of ``trials``. ``lead`` describes for
        people which of several schedulers is active; it returns ``None`` for a single one."""
        self._options = options
        self._metrics = metrics
        self._watch = watch
        self.trials = trials
        self._pump = pump = trials.pump
        self.policy = trials.policy
        self.registry = registry = watch.registry
        self.feed = LocalFeed(
            pump,
            problems=lambda: problems_of(registry),
            order=lambda: [worker.url for worker in registry],
            lead=lead,
            trial=trials.shown,
        )
        self.policy.listeners[:0] = [watch.policy_changed, partial(setattr, metrics, "policy")]
        pump.timelines.ended = self._request_over

    def _request_over(self, timeline: Timeline) -> None:
        self.feed.request_over(timeline, self._metrics.request_over(timeline))

    async def start(self) -> str | None:
        """Open the event log, and start the feed and the inputs. Returns the EndForward endpoint;
        ``None`` if it is disabled or not free yet. Raises: as :meth:`.Watch.start`; OSError, the
        event log cannot be written."""
        options = self._options
        if options.event_log is not None:  # before any event
            with naming_file("--sbs-event-log", options.event_log):
                log = EventLogWriter(options.event_log, options.scheduler)
            self._pump.event_log = log
        if isinstance(self._pump.scheduler, Scheduler):  # not in tests
            self.feed.stay()
        self.trials.want(options.trial)
        return await self._watch.start()

    def gain(self) -> str:
        """Return the estimated gain in mean TTFT as text for the log; empty if unknown."""
        return in_words(self.feed.ratios())

    def families(self) -> Iterator[Metric]:
        yield build_info(__version__, self.policy.policy, self._options.scheduler.trigger)
        yield from self._pump.times.families()
        yield from self._watch.families(self._pump.snapshot())
        about = "Estimated mean TTFT over that of immediate dispatch (last 15 minutes)"
        yield gauge("sbs_gain_ratio", about, by_bound(self.feed.ratios()), "baseline", "bound")
        yield from self.trials.families()

    async def close(self) -> None:
        """Stop the feed and the inputs; trials and the pump are closed by their owners."""
        self.feed.close()
        await self._watch.close()
