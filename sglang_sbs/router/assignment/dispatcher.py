"""The async face of the scheduler: requests go in, assignments come out as futures.

Owns the futures of waiting requests and the set of those that have not ended. Every other part of
the router tells the scheduler something through here. Must not know HTTP, ZMQ or workers.
:class:`Assigner` is what the relay needs of it; :mod:`sglang_sbs.router.processes.scheduler_link`
is the other implementation, for a scheduler in another process. O(1) per event besides the
scheduler's own work.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol, Required, TypedDict, Unpack

from sglang_sbs.router.assignment.scheduler_driver import SchedulerLike, SchedulerPump
from sglang_sbs.router.errors import Refused, RouterError
from sglang_sbs.scheduling.eventlog import EventLogWriter
from sglang_sbs.scheduling.events import (
    BlocksCleared,
    Dispatch,
    Event,
    InstanceId,
    Outcome,
    PrefillDone,
    Refuse,
    RequestArrived,
    RequestEnded,
)

logger = logging.getLogger(__name__)

Assignment = Dispatch
"""What a request is told: the two instances and ranks, and why."""


class Arrival(TypedDict, total=False):
    """The fields of :class:`RequestArrived` that the relay gives, besides the rid."""

    prompt_tokens: Required[int]
    estimated: bool
    max_new_tokens: int | None
    exclude: tuple[str, ...]
    blocks: list[int]
    block_tokens: int
    session: str
    priority: int
    ttft_slo_s: float | None
    tenant: str


class DispatchObserver(Protocol):
    """Who counts what the scheduler decided (metrics)."""

    def dispatched(self, command: Dispatch) -> None: ...
    def refused(self, command: Refuse) -> None: ...


class Assigner(Protocol):
    """What the relay tells the scheduler, wherever that is."""

    async def assign(self, rid: str, **arrival: Unpack[Arrival]) -> Assignment:
        """Wait for instances and ranks. Cancelling it ends the request as aborted.

        Raises:
            Refused: the scheduler will not take it.
        """

    def prefill_done(
        self, rid: str, prompt_tokens: int | None = None, cached_tokens: int | None = None
    ) -> None: ...

    def ended(self, rid: str, outcome: Outcome, completion_tokens: int | None = None) -> None:
        """Report the end of a request; only the first report of each is passed on."""

    def cache_flushed(self, instance: InstanceId, dp_size: int) -> None:
        """An instance answered ``/flush_cache``: its ranks have no prefixes any more."""

    def submit(self, event: Event) -> None:
        """What the registry says about instances."""

    @property
    def open(self) -> int:
        """Requests announced to the scheduler and not ended."""

    @property
    def scheduler_errors(self) -> int: ...

    def snapshot(self) -> Any:
        """The scheduler's state for people and metrics (a msgspec struct)."""

    def flush_log(self) -> None: ...
    def close(self) -> None: ...


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
        self._observer = observer
        self._waiting: dict[str, asyncio.Future[Assignment]] = {}
        self._open: set[str] = set()  # announced and neither refused nor ended
        self.pump = SchedulerPump(
            scheduler, decided=self._decided, failed=self._fail, event_log=event_log
        )
        self.submit = self.pump.submit
        self.snapshot = self.pump.snapshot
        self.flush_log = self.pump.flush_log
        self.close = self.pump.close
        self.times = self.pump.times

    # What the router does with requests -------------------------------------------------------

    async def assign(self, rid: str, **arrival: Unpack[Arrival]) -> Assignment:
        """See :class:`Assigner`."""
        future: asyncio.Future[Assignment] = asyncio.get_running_loop().create_future()
        self._waiting[rid] = future
        self._open.add(rid)
        self.submit(RequestArrived(rid=rid, **arrival))
        if future.done():  # most policies decide at once
            return future.result()
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

    def cache_flushed(self, instance: InstanceId, dp_size: int) -> None:
        """See :class:`Assigner`."""
        for rank in range(dp_size):
            self.submit(BlocksCleared(instance=instance, dp_rank=rank))

    # Decisions --------------------------------------------------------------------------------

    def _decided(self, command: Dispatch | Refuse) -> None:
        if isinstance(command, Dispatch):
            self._dispatch(command)
        else:
            self._refuse(command)

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

    def _give_up(self, rid: str) -> None:
        logger.error("request %s got no decision in %s s and is given up", rid, self._give_up_s)
        self._fail(rid)

    def _fail(self, rid: str) -> None:
        """End a request the scheduler lost track of; it may still have it in its books."""
        future = self._waiting.pop(rid, None)
        if future is not None and not future.done():
            future.set_exception(lost_track())
        self.ended(rid, "failed")

    # Views ------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests that have no assignment yet."""
        return len(self._waiting)

    @property
    def open(self) -> int:
        """Requests announced to the scheduler and not ended."""
        return len(self._open)

    @property
    def scheduler_errors(self) -> int:
        """Events the scheduler failed on."""
        return self.pump.errors


def lost_track() -> RouterError:
    """The error of a request that got no decision."""
    message = "the scheduler failed on this request; the router's log has the cause"
    return RouterError(500, "scheduler_error", message)
