"""The async face of the scheduler: events go in, assignments come out as futures.

Owns the one :class:`Scheduler` object of the process, its wake-up timer, the futures of waiting
requests and the event log. Every other part of the router tells the scheduler something through
here. Must not know HTTP, ZMQ or workers. O(1) per event besides the scheduler's own work.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from typing import Any, Protocol

from sglang_sbs.router.errors import Refused, RouterError
from sglang_sbs.router.eventlog import EventLogWriter
from sglang_sbs.scheduling.events import (
    Command,
    Dispatch,
    Event,
    Outcome,
    PrefillDone,
    Refuse,
    RequestArrived,
    RequestEnded,
    TimerFired,
    WakeAt,
)

logger = logging.getLogger(__name__)

_RETRY_S = 0.1
"""After a failed event the scheduler is asked again then: its own wake-up may be lost."""
_TRACEBACK_EVERY_S = 10.0

Assignment = Dispatch
"""What a request is told: the two instances and ranks, and why."""


class SchedulerLike(Protocol):
    """What the dispatcher needs of :class:`sglang_sbs.scheduling.Scheduler`."""

    def handle(self, event: Event, now_s: float) -> list[Command]: ...
    def snapshot(self, now_s: float) -> Any: ...


class DispatchObserver(Protocol):
    """Who counts what the scheduler decided (metrics)."""

    def dispatched(self, command: Dispatch) -> None: ...
    def refused(self, command: Refuse) -> None: ...


class Dispatcher:
    """Must be used from one event loop only."""

    def __init__(
        self,
        scheduler: SchedulerLike,
        *,
        observer: DispatchObserver | None = None,
        event_log: EventLogWriter | None = None,
        give_up_s: float | None = None,
    ) -> None:
        """``give_up_s``: a request the scheduler neither dispatches nor refuses by then, though it
        should, is ended here; must be longer than the scheduler's own deadlines."""
        self._give_up_s = give_up_s
        self.scheduler_errors = 0
        self._traceback_s = -math.inf
        self._scheduler = scheduler
        self._observer = observer
        self._log = event_log
        self._waiting: dict[str, asyncio.Future[Assignment]] = {}
        self._open: set[str] = set()  # announced and neither refused nor ended
        self._inbox: deque[Event] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # What the router does with requests -------------------------------------------------------

    async def assign(
        self,
        rid: str,
        *,
        prompt_tokens: int,
        max_new_tokens: int | None = None,
        deadline_s: float | None = None,
        exclude: tuple[str, ...] = (),
    ) -> Assignment:
        """Wait for instances and ranks. Cancelling it ends the request as aborted.

        Raises:
            Refused: the scheduler will not take it.
        """
        future: asyncio.Future[Assignment] = asyncio.get_running_loop().create_future()
        self._waiting[rid] = future
        self._open.add(rid)
        self.submit(
            RequestArrived(
                rid=rid,
                prompt_tokens=prompt_tokens,
                max_new_tokens=max_new_tokens,
                deadline_s=deadline_s,
                exclude=exclude,
            )
        )
        watchdog = (
            asyncio.get_running_loop().call_later(self._give_up_s, self._give_up, rid)
            if self._give_up_s is not None
            else None
        )
        try:
            return await future
        except asyncio.CancelledError:
            self._waiting.pop(rid, None)
            if future.done() and not future.cancelled():
                future.exception()  # retrieved: a refusal nobody waits for is no news
            self.ended(rid, "aborted")
            raise
        finally:
            if watchdog is not None:
                watchdog.cancel()

    def prefill_done(
        self, rid: str, prompt_tokens: int | None = None, cached_tokens: int | None = None
    ) -> None:
        if rid in self._open:
            self.submit(
                PrefillDone(rid=rid, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
            )

    def ended(self, rid: str, outcome: Outcome, completion_tokens: int | None = None) -> None:
        """Report the end of a request; only the first report of each is passed on."""
        if rid in self._open:
            self._open.discard(rid)
            self.submit(RequestEnded(rid=rid, outcome=outcome, completion_tokens=completion_tokens))

    # The event pump ---------------------------------------------------------------------------

    def submit(self, event: Event) -> None:
        """Hand an event to the scheduler and carry out what it answers.

        Safe to call from within itself: events that arise meanwhile are handled in order after it.
        """
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
            commands = self._scheduler.handle(event, now_s)
        except Exception:
            # A defect in the policy must not hang the request nor silence the signal sources.
            self._scheduler_failed(event, now_s)
            return
        if self._log is not None:
            try:
                self._log.write(now_s, event, commands)
            except OSError as error:
                self._log_failed(error)
        for command in commands:
            if isinstance(command, Dispatch):
                self._dispatch(command)
            elif isinstance(command, Refuse):
                self._refuse(command)
            elif isinstance(command, WakeAt):
                self._wake_at(command.time_s, now_s)

    def _dispatch(self, command: Dispatch) -> None:
        if self._observer is not None:
            self._observer.dispatched(command)
        future = self._waiting.pop(command.rid, None)
        if future is not None and not future.done():
            future.set_result(command)
        else:
            self.ended(command.rid, "aborted")

    def _refuse(self, command: Refuse) -> None:
        self._open.discard(command.rid)
        if self._observer is not None:
            self._observer.refused(command)
        future = self._waiting.pop(command.rid, None)
        if future is not None and not future.done():
            future.set_exception(Refused(command.cause, command.message, command.retry_after_s))

    def _scheduler_failed(self, event: Event, now_s: float) -> None:
        self.scheduler_errors += 1
        if now_s >= self._traceback_s + _TRACEBACK_EVERY_S:
            self._traceback_s = now_s
            logger.exception("the scheduler failed on %r", event)
        if isinstance(event, RequestArrived):
            self._fail(event.rid)
        if not self._closed:
            self._wake_at(now_s + _RETRY_S, now_s)

    def _give_up(self, rid: str) -> None:
        logger.error("request %s got no decision in %s s and is given up", rid, self._give_up_s)
        self._fail(rid)

    def _fail(self, rid: str) -> None:
        """End a request the scheduler lost track of; it may still have it in its books."""
        future = self._waiting.pop(rid, None)
        if future is not None and not future.done():
            message = "the scheduler failed on this request; the router's log has the cause"
            future.set_exception(RouterError(500, "scheduler_error", message))
        self.ended(rid, "failed")

    def _log_failed(self, error: OSError) -> None:
        """A full disk must not stop the router."""
        logger.error("the event log ends here: %s", error)
        log, self._log = self._log, None
        if log is not None:
            log.abandon()

    def _wake_at(self, time_s: float, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # uvloop's timers tick in milliseconds: round up, or an early one fires again and again.
        delay_s = math.ceil(max(0.0, time_s - now_s) * 1000) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self.submit(TimerFired())

    # Views and end ----------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests that have no assignment yet."""
        return len(self._waiting)

    @property
    def open(self) -> int:
        """Requests announced to the scheduler and not ended."""
        return len(self._open)

    def snapshot(self) -> Any:
        """The scheduler's state for people and metrics (a msgspec struct)."""
        return self._scheduler.snapshot(time.monotonic())

    def flush_log(self) -> None:
        if self._log is not None:
            try:
                self._log.flush()
            except OSError as error:
                self._log_failed(error)

    def close(self) -> None:
        """Stop the timer and close the log; events after this are dropped."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._log is not None:
            try:
                self._log.close()
            except OSError as error:
                self._log_failed(error)
            self._log = None
