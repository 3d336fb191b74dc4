"""What the relay tells the scheduler of its requests, wherever that is.

Owns the requests of this process that the scheduler was told of, until they are refused or ended.
For a scheduler in this process: :class:`Dispatcher`; in another:
:mod:`sglang_sbs.router.processes.scheduler_link`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sglang_sbs.router.assignment.scheduler_driver import Decision, SchedulerLike, SchedulerPump
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
class Announced:
    """One request, as the scheduler was told of it and what it said. The relay's record of an
    attempt (:class:`~sglang_sbs.router.relay.in_flight.Attempt`) is one of these."""

    arrival: RequestArrived
    """Without the names of its blocks once it was placed."""
    decision: asyncio.Future[Dispatch] = field(default_factory=_undecided)
    assignment: Dispatch | None = None
    """Where it goes; ``None`` while it waits."""
    prefilled: bool = False
    """The scheduler was told that prefill has answered."""

    @property
    def rid(self) -> str:
        return self.arrival.rid


class Assigner:
    """Must be used from one event loop only."""

    def __init__(self, give_up_s: float | None) -> None:
        """``give_up_s``: a request the scheduler neither dispatches nor refuses by then, though it
        should, is ended here; must be longer than the scheduler's own deadlines."""
        self.pump: SchedulerPump | None = None
        """Drives the scheduler, while that is in this process."""
        self._errors = 0
        """Of those it had before."""
        self._give_up_s = give_up_s
        self._requests: dict[str, Announced] = {}

    async def assign(self, request: Announced) -> Dispatch:
        """Wait for instances and ranks. Whatever comes of it, who asked tells the end of it
        (:meth:`ended`). Raises: Refused, the scheduler will not take it; RouterError, the scheduler
        lost track of it."""
        rid, decision = request.arrival.rid, request.decision
        self._requests[rid] = request
        watchdog: asyncio.TimerHandle | None = None
        try:
            self._say(request.arrival)
            if decision.done():  # most policies decide at once
                return decision.result()
            if self._give_up_s is not None:
                loop = asyncio.get_running_loop()
                watchdog = loop.call_later(self._give_up_s, self._give_up, rid)
            return await decision
        finally:
            if decision.done() and not decision.cancelled():
                decision.exception()  # retrieved: a refusal nobody waits for is no news
            if watchdog is not None:
                watchdog.cancel()

    def prefill_done(
        self, rid: str, prompt_tokens: int | None = None, cached_tokens: int | None = None
    ) -> None:
        """The prefill leg answered, with its counts, or decode has begun."""
        request = self._requests.get(rid)
        if request is not None:
            request.prefilled = True
            self._say(PrefillDone(rid, prompt_tokens, cached_tokens))

    def prefill_aborted(self, rid: str) -> None:
        """The request is over on prefill without an answer; decode still holds its KV. What is kept
        of it until its end no longer refers to what it was."""
        request = self._requests.get(rid)
        if request is None:
            return
        if not request.prefilled:
            self._say(PrefillDone(rid=rid, aborted=True))
        self._requests[rid] = Announced(
            arrival=request.arrival,
            decision=request.decision,
            assignment=request.assignment,
            prefilled=True,
        )

    def ended(
        self,
        rid: str,
        outcome: Outcome,
        completion_tokens: int | None = None,
        client: ClientSide | None = None,
    ) -> None:
        """Report the end of a request; only the first report of each is passed on."""
        if self._requests.pop(rid, None) is not None:
            ended = RequestEnded(
                rid=rid, outcome=outcome, completion_tokens=completion_tokens, client=client
            )
            self._say(ended)

    def cache_flushed(self, instance: InstanceId, dp_size: int) -> None:
        """An instance answered ``/flush_cache``: its ranks have no prefixes any more."""
        for rank in range(dp_size):
            self._say(BlocksCleared(instance=instance, dp_rank=rank))

    def _decided(self, command: Decision) -> None:
        """What the scheduler says of a request; of one that ended meanwhile it is told so."""
        request = self._requests.get(command.rid)
        if request is None or request.assignment is not None:
            return
        decision = request.decision
        if isinstance(command, Refuse):
            del self._requests[command.rid]
            if not decision.done():
                refused = Refused(command.cause, command.message, command.retry_after_s)
                decision.set_exception(refused)
        elif not decision.done():
            request.assignment = command
            if request.arrival.blocks:  # nobody asks for them again, and there may be thousands
                request.arrival = msgspec.structs.replace(request.arrival, blocks=[])
            decision.set_result(command)

    def _give_up(self, rid: str) -> None:
        request = self._requests.get(rid)
        if request is None or request.decision.done():
            return  # it was decided while this process stood still
        logger.error("request %s got no decision in %s s and is given up", rid, self._give_up_s)
        self._fail(rid)

    def _fail(self, rid: str) -> None:
        """End a request the scheduler lost track of; it may still have it in its books."""
        request = self._requests.get(rid)
        if request is not None and not request.decision.done():
            message = "the scheduler failed on this request; the router's log has the cause"
            request.decision.set_exception(RouterError(500, "scheduler_error", message))
        self.ended(rid, "failed")

    @property
    def waiting(self) -> int:
        return sum(not request.decision.done() for request in self._requests.values())

    @property
    def open(self) -> int:
        """Requests announced to the scheduler and not ended."""
        return len(self._requests)

    # Where the scheduler is -------------------------------------------------------------------

    def _say(self, event: RequestArrived | PrefillDone | RequestEnded | BlocksCleared) -> None:
        """Tell the scheduler, which may decide at once."""
        self.submit(event)

    def submit(self, event: Event) -> None:
        """What the registry says about instances: for a scheduler in this process."""
        if self.pump is not None:
            self.pump.submit(event)

    @property
    def scheduler_errors(self) -> int:
        """Events a scheduler in this process failed on."""
        return self._errors + (self.pump.errors if self.pump is not None else 0)

    def attempts(self, rids: Sequence[str]) -> list[AttemptStory]:
        """Return what the scheduler in this process knows of these requests."""
        return self.pump.attempts(rids) if self.pump is not None else []

    def timeline(self, rid: str) -> Timeline | None:
        """The same without the reasons, which take longer to work out."""
        return self.pump.timelines.get(rid) if self.pump is not None else None

    def snapshot(self) -> Any:
        """The scheduler's state for people and metrics (a msgspec struct)."""
        return self.pump.snapshot() if self.pump is not None else None

    def close(self) -> None:
        if self.pump is not None:
            self.pump.close()


class Dispatcher(Assigner):
    """The one whose scheduler is in this process, always."""

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
        self.pump = SchedulerPump(scheduler, self._decided, self._fail, counts, event_log)
