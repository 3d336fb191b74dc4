"""Drives one scheduler: passes events to it, runs its timer, delivers its decisions and writes the
event log. An exception in the policy is logged and counted, and the next event is handled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_sbs.router.dispatch.decision_times import DecisionTimes
from sglang_sbs.router.dispatch.gang_parts import GangParts
from sglang_sbs.scheduling.eventlog import EventLogWriter
from sglang_sbs.scheduling.events import (
    Command,
    Dispatch,
    Event,
    Refuse,
    RequestArrived,
    TimerFired,
    WakeAt,
)
from sglang_sbs.scheduling.explained.stories import AttemptStory
from sglang_sbs.scheduling.explained.timelines import Timelines

logger = logging.getLogger(__name__)

_RETRY_S = 0.1
"""Delay of the wake-up that is set when the scheduler fails on an event, because the wake-up that
it would have requested is lost."""
_TRACEBACK_EVERY_S = 10.0


class SchedulerLike(Protocol):
    """The parts of :class:`sglang_sbs.scheduling.Scheduler` used here."""

    def handle(self, event: Event, now_s: float) -> list[Command]: ...
    def snapshot(self, now_s: float) -> Any: ...


Decision = Dispatch | Refuse

Observer = Callable[[Event, Sequence[Command], float], None]
"""Called with an event, the scheduler's commands and the time in seconds. Must neither raise nor
block."""


@dataclass(eq=False)
class SchedulerPump:
    """Passes events to a scheduler and delivers its decisions. Use only from one event loop."""

    scheduler: SchedulerLike
    decided: Callable[[Decision], None]
    failed: Callable[[str], None]
    """Called with the rid of a request on whose arrival the scheduler failed."""
    counts: Callable[[Decision], None] | None = None
    event_log: EventLogWriter | None = None
    observer: Observer | None = None
    """Called with every event and its commands while the dashboard is open; ``None`` otherwise."""
    trial: Observer | None = None
    """Called like ``observer`` while a trial runs."""
    flush_s: float = 1.0
    """Longest time in seconds until a written event is flushed to the event log."""
    errors: int = 0
    """Number of events on which the scheduler failed."""
    times: DecisionTimes = field(default_factory=DecisionTimes)
    timelines: Timelines = field(default_factory=Timelines)
    _gangs: GangParts = field(default_factory=GangParts)
    _inbox: deque[Event] = field(default_factory=deque)
    _traceback_s: float = -math.inf
    _handling: bool = False
    _closed: bool = False
    _due_s: float = math.inf
    """Time of the next wake-up that the scheduler requested; infinite before the first."""
    _timer: asyncio.TimerHandle | None = None
    _timer_s: float = math.inf
    """Time for which the timer is set; never later than ``_due_s``."""
    _flushing: asyncio.TimerHandle | None = None

    def submit(self, event: Event) -> None:
        """Pass an event to the scheduler and execute its commands. Events submitted meanwhile are
        handled afterwards, in order."""
        self._inbox.append(event)
        if self._handling or self._closed:
            return
        self._handling = True
        try:
            while self._inbox:
                self._handle(self._inbox.popleft())
        finally:
            self._handling = False

    def _handle(self, event: Event) -> None:
        now_s = time.monotonic()
        try:
            commands = self.scheduler.handle(event, now_s)
        except Exception:
            # An error in the policy must not hang the request or stop reports from engines.
            self._scheduler_failed(event, now_s)
            return
        self.times.record(type(event), time.monotonic() - now_s)
        if self.event_log is not None:
            self._write(lambda log: log.write(now_s, event, commands))
            if self._flushing is None:
                loop = asyncio.get_running_loop()
                self._flushing = loop.call_later(self.flush_s, self.flush_log)
        try:
            self.timelines.observe(event, commands, now_s)
            if self.observer is not None:
                self.observer(event, commands, now_s)
            if self.trial is not None:
                self.trial(event, commands, now_s)
        except Exception:
            # The commands are other requests' decisions, which must not be lost with a record.
            self._count_error("the record of %r failed", event, now_s)
        if not commands:  # as after most events
            return
        for command in self._gangs.labelled(commands):
            if isinstance(command, WakeAt):
                self._wake_at(command.time_s, now_s)
                continue
            if self.counts is not None:
                self.counts(command)
            self.decided(command)

    def _scheduler_failed(self, event: Event, now_s: float) -> None:
        self._count_error("the scheduler failed on %r", event, now_s)
        if isinstance(event, RequestArrived):
            self.failed(event.rid)
        if not self._closed:
            self._wake_at(now_s + _RETRY_S, now_s)

    def _count_error(self, text: str, event: Event, now_s: float) -> None:
        self.errors += 1
        if now_s >= self._traceback_s + _TRACEBACK_EVERY_S:
            self._traceback_s = now_s
            logger.exception(text, event)

    def _write(self, step: Callable[[EventLogWriter], None]) -> None:
        """Run ``step`` on the event log. An error (full disk, text that cannot be encoded) closes
        the log. It must not reach the caller, which still has commands to execute."""
        log = self.event_log
        if log is None:
            return
        try:
            step(log)
        except (OSError, ValueError) as error:
            logger.error("the event log is closed: %s", error)
            self.event_log = None
            with contextlib.suppress(OSError):
                log.close()

    def _wake_at(self, time_s: float, now_s: float) -> None:
        self._due_s = time_s
        # A timer that fires too early is set again, instead of replaced with each event.
        if self._timer is None or time_s < self._timer_s:
            self._set_timer(now_s)

    def _set_timer(self, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = self._due_s
        # uvloop's timers have millisecond resolution: round up, because an early one would fire
        # repeatedly.
        delay_s = math.ceil(max(0.0, self._due_s - now_s) * 1000) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        if now_s < self._due_s and not self._closed:
            self._set_timer(now_s)
        else:
            self.submit(TimerFired())

    def attempts(self, rids: Sequence[str]) -> list[AttemptStory]:
        """Return the records and current reasons of these requests; forgotten ones are omitted."""
        now_s = time.monotonic()
        why = getattr(self.scheduler, "why", lambda _rid, _now_s: None)
        known = [self.timelines.get(rid) for rid in rids]
        return [
            AttemptStory(timeline, why(timeline.rid, now_s), now_s)
            for timeline in known
            if timeline is not None
        ]

    def snapshot(self) -> Any:
        return self.scheduler.snapshot(time.monotonic())

    def flush_log(self) -> None:
        self._flushing = None
        self._write(EventLogWriter.flush)

    def close(self) -> None:
        """Stop the timer and close the log; later events are dropped."""
        self._closed = True
        for timer in (self._timer, self._flushing):
            if timer is not None:
                timer.cancel()
        self._timer = self._flushing = None
        self._write(EventLogWriter.close)
        self.event_log = None
