"""Submits the relay's requests to the scheduler, wherever that runs, and returns its decisions.

Keeps the requests of this process that were submitted to the scheduler until they are refused or
ended. :class:`LocalDispatcher` uses a scheduler in this process,
:mod:`sglang_sbs.router.processes.scheduler_link` one in another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sglang_sbs.router.dispatch.scheduler_driver import Decision, SchedulerLike, SchedulerPump
from sglang_sbs.router.errors import Refused, RouterError
from sglang_sbs.scheduling.eventlog import EventLogWriter
from sglang_sbs.scheduling.events import (
    BlocksCleared,
    ClientSide,
    Dispatch,
    Event,
    InstanceId,
    Outcome,
    PrefillDone,
    Refuse,
    RequestArrived,
    RequestEnded,
)
from sglang_sbs.scheduling.explained.stories import AttemptStory
from sglang_sbs.scheduling.explained.timelines import Timeline

logger = logging.getLogger(__name__)


def _undecided() -> asyncio.Future[Dispatch]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False, kw_only=True)
class Submitted:
    """A request submitted to the scheduler, and its decision. The relay's record of an attempt
    (:class:`~sglang_sbs.router.relay.in_flight.Attempt`) is a subclass."""

    arrival: RequestArrived
    """The event submitted. Its block names are dropped once the request is placed."""
    decision: asyncio.Future[Dispatch] = field(default_factory=_undecided)
    dispatch: Dispatch | None = None
    """The decision's engines and ranks; ``None`` until the request is placed."""
    prefilled: bool = False
    """The end of prefill was reported to the scheduler."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.rid}: {self.state()}>"

    @property
    def rid(self) -> str:
        return self.arrival.rid

    def state(self) -> str:
        """Return its state in a few words, for debuggers."""
        placed = self.dispatch
        if placed is None:
            return "refused or abandoned" if self.decision.done() else "waits for a decision"
        to = f"{placed.prefill} rank {placed.prefill_rank} and "
        to += f"{placed.decode} rank {placed.decode_rank}"
        return f"placed on {to}{', prefilled' * self.prefilled}"


class Dispatcher:
    """Submits requests to the scheduler. Use only from one event loop."""

    def __init__(self, give_up_s: float | None) -> None:
        """Create a dispatcher. A request without a decision after ``give_up_s`` (``None``: no
        limit) fails; the limit must be longer than the scheduler's own deadlines."""
        self.pump: SchedulerPump | None = None
        """Drives the scheduler if it is in this process; otherwise ``None``."""
        self._errors = 0
        """Scheduler errors counted by pumps that were replaced."""
        self._give_up_s = give_up_s
        self._requests: dict[str, Submitted] = {}

    async def dispatch(self, request: Submitted) -> Dispatch:
        """Submit a request and return the scheduler's decision. The caller must report the end
        (:meth:`on_ended`) in any case. Raises: Refused, the scheduler refuses it; RouterError, the
        scheduler failed on it or did not decide in time."""
        rid, decision = request.arrival.rid, request.decision
        self._requests[rid] = request
        watchdog: asyncio.TimerHandle | None = None
        try:
            self._report(request.arrival)
            if decision.done():  # most policies decide at once
                return decision.result()
            if self._give_up_s is not None:
                loop = asyncio.get_running_loop()
                watchdog = loop.call_later(self._give_up_s, self._give_up, rid)
            return await decision
        finally:
            if decision.done() and not decision.cancelled():
                decision.exception()  # retrieve it, so that asyncio does not log it
            if watchdog is not None:
                watchdog.cancel()

    def prefill_done(
        self, rid: str, prompt_tokens: int | None = None, cached_tokens: int | None = None
    ) -> None:
        """Report that prefill responded, with its token counts, or that decode began."""
        request = self._requests.get(rid)
        if request is not None:
            request.prefilled = True
            self._report(PrefillDone(rid, prompt_tokens, cached_tokens))

    def prefill_aborted(self, rid: str) -> None:
        """Report that prefill ended without a response while decode still holds the request's KV.
        The record kept until its end no longer refers to the attempt."""
        request = self._requests.get(rid)
        if request is None:
            return
        if not request.prefilled:
            self._report(PrefillDone(rid=rid, aborted=True))
        self._requests[rid] = Submitted(
            arrival=request.arrival,
            decision=request.decision,
            dispatch=request.dispatch,
            prefilled=True,
        )

    def on_ended(
        self,
        rid: str,
        outcome: Outcome,
        completion_tokens: int | None = None,
        client: ClientSide | None = None,
    ) -> None:
        """Report the end of a request to the scheduler; only the first report counts."""
        if self._requests.pop(rid, None) is not None:
            ended = RequestEnded(
                rid=rid, outcome=outcome, completion_tokens=completion_tokens, client=client
            )
            self._report(ended)

    def cache_flushed(self, instance: InstanceId, dp_size: int) -> None:
        """Report a successful ``/flush_cache``: the instance's ranks have no prefixes left."""
        for rank in range(dp_size):
            self._report(BlocksCleared(instance=instance, dp_rank=rank))

    def _on_decided(self, command: Decision) -> None:
        """Deliver a decision to its waiting request; ignore it if the request has ended."""
        request = self._requests.get(command.rid)
        if request is None or request.dispatch is not None:
            return
        decision = request.decision
        if isinstance(command, Refuse):
            del self._requests[command.rid]
            if not decision.done():
                refused = Refused(command.cause, command.message, command.retry_after_s)
                decision.set_exception(refused)
        elif not decision.done():
            request.dispatch = command
            if request.arrival.blocks:  # not needed again, and there may be thousands
                request.arrival = msgspec.structs.replace(request.arrival, blocks=[])
            decision.set_result(command)

    def _give_up(self, rid: str) -> None:
        request = self._requests.get(rid)
        if request is None or request.decision.done():
            return  # decided while this process was blocked
        logger.error(
            "request %s got no decision within %s s and is abandoned", rid, self._give_up_s
        )
        self._fail(rid)

    def _fail(self, rid: str) -> None:
        """End a request without a decision with an error (500), and in the scheduler's
        accounting."""
        request = self._requests.get(rid)
        if request is not None and not request.decision.done():
            message = "the scheduler failed on this request; the router's log has the cause"
            request.decision.set_exception(RouterError(500, "scheduler_error", message))
        self.on_ended(rid, "failed")

    @property
    def waiting(self) -> int:
        return sum(not request.decision.done() for request in self._requests.values())

    @property
    def open(self) -> int:
        """Number of requests submitted to the scheduler and not ended."""
        return len(self._requests)

    # Where the scheduler is -------------------------------------------------------------------

    def _report(self, event: RequestArrived | PrefillDone | RequestEnded | BlocksCleared) -> None:
        """Report an event of a request or of an instance's cache to the scheduler, which may decide
        at once."""
        self.submit(event)

    def submit(self, event: Event) -> None:
        """Pass an event to the scheduler if it is in this process; otherwise do nothing."""
        if self.pump is not None:
            self.pump.submit(event)

    @property
    def scheduler_errors(self) -> int:
        """Number of events on which a scheduler in this process failed."""
        return self._errors + (self.pump.errors if self.pump is not None else 0)

    def attempts(self, rids: Sequence[str]) -> list[AttemptStory]:
        """Return the scheduler's records of these requests; empty if it is in another process."""
        return self.pump.attempts(rids) if self.pump is not None else []

    def timeline(self, rid: str) -> Timeline | None:
        """Return the record of one request, without the reasons, which take longer to compute;
        ``None`` if it is unknown or the scheduler is in another process."""
        return self.pump.timelines.get(rid) if self.pump is not None else None

    def snapshot(self) -> Any:
        """Return the scheduler's state for display and metrics (a msgspec struct); ``None`` if it
        is in another process."""
        return self.pump.snapshot() if self.pump is not None else None

    def close(self) -> None:
        if self.pump is not None:
            self.pump.close()


class LocalDispatcher(Dispatcher):
    """A dispatcher with its scheduler in this process."""

    pump: SchedulerPump

    def __init__(
        self,
        scheduler: SchedulerLike,
        *,
        counts: Callable[[Decision], None] | None = None,
        event_log: EventLogWriter | None = None,
        give_up_s: float | None = None,
    ) -> None:
        super().__init__(give_up_s)
        self.pump = SchedulerPump(scheduler, self._on_decided, self._fail, counts, event_log)
