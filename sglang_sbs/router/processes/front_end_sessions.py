"""The scheduler process's side of its front ends: sessions, their requests, what they are told.

Owns which front end a request belongs to, so that decisions find their way and a front end that
dies takes its requests with it. Must not know sockets, HTTP or how a rank is chosen.

Theory of operation
-------------------
A session begins with :class:`Hello` and is open from :class:`Welcome` on, which is held back until
the workers have been looked at (``settled``): a scheduler that just started would refuse what its
front ends can still place by themselves. It ends with :class:`Bye`, with a later session of the
same front end, or with ``SILENT_S`` without a word; then its requests end as aborted, exactly once,
like everything else in ``_owners``. A message of an unknown session is answered
:class:`Unwelcome`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sglang_sbs.plain_words import counted
from sglang_sbs.router.assignment.decision_times import Spread
from sglang_sbs.router.assignment.dispatcher import DispatchObserver
from sglang_sbs.router.assignment.scheduler_driver import SchedulerLike, SchedulerPump
from sglang_sbs.router.errors import LegFailure
from sglang_sbs.router.processes.calls import Calls
from sglang_sbs.router.processes.messages import (
    VERSION,
    Abort,
    Aborted,
    AbortElsewhere,
    AddWorker,
    Adopted,
    Alive,
    AskMetrics,
    Bye,
    Cluster,
    Decisions,
    Done,
    FromScheduler,
    Hello,
    LegFailed,
    MetricsPage,
    RemoveWorker,
    Silenced,
    ToScheduler,
    Unwelcome,
    UpdateWorker,
    WatchDashboard,
    Welcome,
    WorkerState,
)
from sglang_sbs.router.processes.mirrored_registry import state_of
from sglang_sbs.router.workers.kubernetes_pods import Members, is_discovered
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.scheduling.eventlog import EventLogWriter
from sglang_sbs.scheduling.events import (
    BlocksCleared,
    Dispatch,
    Event,
    PrefillDone,
    Refuse,
    RequestAdopted,
    RequestArrived,
    RequestEnded,
)

logger = logging.getLogger(__name__)

TICK_S = 0.1
SILENT_S = 3.0
"""A front end without a heartbeat for so long is dead. Longer than it takes to be missed by it: it
serves on by itself meanwhile, and announces what it did when it is back."""
CLUSTER_EVERY_S = 1.0
SETTLE_S = 3.0
"""Longest time before front ends are served although some workers were not heard of yet."""
_ANSWER_S = 1.0


@dataclass(slots=True)
class _Placed:
    prefill: str = ""
    decode: str = ""
    prefill_open: bool = False


@dataclass(slots=True, eq=False)
class _Session:
    identity: bytes
    front_end: str
    name: str
    heard_s: float
    open: bool = False
    requests: dict[str, _Placed] = field(default_factory=dict)
    outbox: list[Dispatch | Refuse] = field(default_factory=list)


class Hub:
    """Between the sockets and the scheduler. Must be used from one event loop only."""

    def __init__(
        self,
        members: Members,
        tell: Callable[[bytes, FromScheduler], bool],
        scheduler: SchedulerLike,
        *,
        observer: DispatchObserver | None = None,
        event_log: EventLogWriter | None = None,
        watch_dashboard: Callable[[bytes, WatchDashboard], None] = lambda identity, asked: None,
        retire_page: Callable[[str], None] = lambda page: None,
    ) -> None:
        """``watch_dashboard`` is told that somebody looks at a front end's dashboard;
        ``retire_page`` gets the last known metrics of a front end that is gone."""
        self.boot_id = uuid.uuid4().hex
        self.pump = SchedulerPump(
            scheduler, decided=self._counted, failed=self.failed, event_log=event_log
        )
        self._observer = observer
        self._watch_dashboard = watch_dashboard
        self.foreign = 0
        """Messages about requests of another session: a defect of a front end."""
        self.lag = Spread()
        """How late its tick was."""
        self._members = members
        self._registry = members.registry
        self._tell = tell
        self._retire_page = retire_page
        self._sessions: dict[bytes, _Session] = {}
        self._owners: dict[str, _Session] = {}
        self._pages: dict[str, str] = {}
        self._asked: Calls[MetricsPage | Aborted] = Calls()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flushing = False
        self._membership_known = False
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._told_s = 0.0
        self._ticked_s = self._started_s
        self._ticker = asyncio.create_task(self._tick())

    # From outside -----------------------------------------------------------------------------

    @property
    def front_ends(self) -> int:
        """Open sessions."""
        return sum(session.open for session in self._sessions.values())

    @property
    def requests(self) -> int:
        """Announced by front ends and not ended."""
        return len(self._owners)

    @property
    def settled(self) -> bool:
        """Whether the workers have been looked at."""
        looked = all(w.info is not None or w.problems for w in self._registry)
        return looked or self._loop.time() > self._started_s + SETTLE_S

    def workers_changed(self) -> None:
        """Tell the front ends in this turn of the event loop."""
        self._told_s = 0.0
        self._flush_soon()

    def find_owner(self, rid: str, role: str) -> str | None:
        """Where the leg of that role went, for binding EndForward messages."""
        session = self._owners.get(rid)
        if session is None:
            return None
        placed = session.requests[rid]
        return (placed.prefill if role == "prefill" else placed.decode) or None

    async def metrics_pages(self) -> list[str]:
        """Every front end's page; the last known one of those that do not answer in time."""
        for front_end, answer in await self._ask_all(lambda call: AskMetrics(call=call)):
            if isinstance(answer, MetricsPage):
                self._pages[front_end] = answer.text
        return list(self._pages.values())

    async def _ask_all(
        self, question: Callable[[int], FromScheduler], besides: _Session | None = None
    ) -> list[tuple[str, MetricsPage | Aborted]]:
        """What front ends answer in time."""
        answers: list[tuple[str, MetricsPage | Aborted]] = []

        async def ask(session: _Session) -> None:
            try:
                answer = await self._asked.ask(
                    lambda number: self._tell(session.identity, question(number)), _ANSWER_S
                )
            except TimeoutError:
                logger.warning("front end %s does not answer", session.name)
                return
            if answer is not None:
                answers.append((session.front_end, answer))

        asked = [s for s in self._sessions.values() if s.open and s is not besides]
        await asyncio.gather(*map(ask, asked))
        return answers

    def close(self) -> None:
        for task in (self._ticker, *self._tasks):
            task.cancel()

    # Messages ---------------------------------------------------------------------------------

    def receive(self, identity: bytes, message: ToScheduler) -> None:
        """Handle one message of a front end."""
        session = self._sessions.get(identity)
        if isinstance(message, Hello):
            self._hello(session, identity, message)
            return
        if session is None or not session.open:
            self._tell(identity, Unwelcome())
            return
        session.heard_s = self._loop.time()
        match message:
            case Alive():
                pass
            case RequestArrived():
                self._enter(session, message.rid, _Placed(), message)
            case PrefillDone():
                self._prefill_done(session, message)
            case RequestEnded():
                self._ended(session, message)
            case Adopted():
                for request in message.requests:
                    self._adopt(session, request)
            case LegFailed():
                self._leg_failed(message)
            case AddWorker() | RemoveWorker() | UpdateWorker():
                self._tell(identity, self._change(message))
            case AbortElsewhere():
                task = asyncio.create_task(self._abort_elsewhere(session, message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case MetricsPage() | Aborted():
                self._asked.answered(message.call, message)
            case BlocksCleared():
                self.pump.submit(message)
            case WatchDashboard():
                self._watch_dashboard(identity, message)
            case Bye():
                self._end_session(session, "it said goodbye")

    def _hello(self, session: _Session | None, identity: bytes, hello: Hello) -> None:
        if hello.version != VERSION:
            reason = f"it speaks version {hello.version}, this scheduler {VERSION}"
            self._tell(identity, Unwelcome(reason=f"{reason}: run the same sglang-sbs on both"))
            return
        if session is None:
            now_s = self._loop.time()
            session = _Session(identity, hello.front_end, hello.name, now_s)
            self._sessions[identity] = session
        session.heard_s = self._loop.time()
        if not self._membership_known and hello.scheduler not in ("", self.boot_id):
            self._inherit(hello.workers)
        if not session.open and self.settled:
            for earlier in list(self._sessions.values()):
                if earlier is not session and earlier.front_end == session.front_end:
                    self._end_session(earlier, "began anew")
            session.open = True
            self._tell(identity, Welcome(scheduler=self.boot_id, workers=self._states()))
            logger.info("front end %s connected; %d now", session.name, self.front_ends)

    def _inherit(self, states: list[WorkerState]) -> None:
        """The scheduler before this one had these workers: flags may be out of date."""
        self._membership_known = True
        urls = {state.url for state in states}
        for worker in self._registry:
            if worker.url not in urls and not is_discovered(worker):  # pods know better
                self._members.remove_worker(worker)
        for state in states:
            known = self._registry.get(state.url)
            try:
                known = known or self._members.add_worker(
                    state.url, state.role, state.bootstrap_port
                )
            except ValueError as error:
                logger.error("cannot take over worker %s: %s", state.url, error)
                continue
            known.id = state.id
            known.priority, known.cost = state.priority, state.cost
            known.labels = state.labels | known.labels
            known.spelling = state.spelling

    async def _abort_elsewhere(self, session: _Session, message: AbortElsewhere) -> None:
        answers = await self._ask_all(
            lambda call: Abort(call=call, rid=message.rid), besides=session
        )
        count = sum(answer.count for _, answer in answers if isinstance(answer, Aborted))
        self._tell(session.identity, Done(call=message.call, count=count))

    def _change(self, message: AddWorker | RemoveWorker | UpdateWorker) -> Done:
        self._membership_known = True
        try:
            if isinstance(message, AddWorker):
                worker = self._members.add_worker(message.url, message.role, message.bootstrap_port)
            else:
                found = self._registry.by_id(message.worker_id)
                if found is None:
                    raise ValueError(f"there is no worker {message.worker_id}")
                worker = found
                if isinstance(message, RemoveWorker):
                    self._members.remove_worker(worker)
                else:
                    worker.priority, worker.cost = message.priority, message.cost
                    worker.labels = message.labels
        except ValueError as error:
            return Done(call=message.call, error=str(error))
        # Before the answer, so that the front end knows it when its client asks again.
        self._told_s = 0.0
        self._flush()
        return Done(call=message.call, worker_id=worker.id)

    def _leg_failed(self, failed: LegFailed) -> None:
        self._registry.leg_failed(
            LegFailure(
                failed.leg,
                failed.worker,
                failed.status,
                failed.code,
                failed.message,
                transport=failed.transport,
                unreachable=failed.unreachable,
            )
        )

    # Requests ---------------------------------------------------------------------------------

    def _enter(self, session: _Session, rid: str, placed: _Placed, event: Event) -> None:
        if rid in self._owners:
            self.foreign += 1
            return
        self._owners[rid] = session
        session.requests[rid] = placed
        self.pump.submit(event)

    def _adopt(self, session: _Session, request: RequestAdopted) -> None:
        placed = _Placed(request.prefill, request.decode, not request.prefilled)
        if request.rid not in self._owners:
            self._count(placed, 1)
        self._enter(session, request.rid, placed, request)

    def _prefill_done(self, session: _Session, event: PrefillDone) -> None:
        placed = session.requests.get(event.rid)
        if placed is None:
            self.foreign += 1
            return
        self._prefill_over(placed)
        self.pump.submit(event)

    def _ended(self, session: _Session, event: RequestEnded) -> None:
        placed = session.requests.pop(event.rid, None)
        if placed is None:
            return  # refused in the same moment
        del self._owners[event.rid]
        self._count(placed, -1)
        if event.outcome == "completed":
            self._registry.leg_succeeded(placed.prefill)
            self._registry.leg_succeeded(placed.decode)
        self.pump.submit(event)

    def _counted(self, command: Dispatch | Refuse) -> None:
        if self._observer is not None and isinstance(command, Dispatch):
            self._observer.dispatched(command)
        elif self._observer is not None and isinstance(command, Refuse):
            self._observer.refused(command)
        self.decided(command)

    def decided(self, command: Dispatch | Refuse) -> None:
        """What the scheduler says about a request."""
        session = self._owners.get(command.rid)
        if session is None:
            return  # it ended meanwhile, and the scheduler was told
        if isinstance(command, Dispatch):
            placed = session.requests[command.rid]
            placed.prefill, placed.decode = command.prefill, command.decode
            placed.prefill_open = True
            self._count(placed, 1)
            for worker in self._workers_of(placed):
                worker.dispatches += 1
        else:
            del self._owners[command.rid], session.requests[command.rid]
        session.outbox.append(command)
        self._flush_soon()

    def failed(self, rid: str) -> None:
        """The scheduler failed on its arrival: a defect, but the client is answered."""
        self.decided(
            Refuse(
                rid=rid,
                cause="flow_control",
                retry_after_s=1.0,
                message="the scheduler failed on this request; its log has the cause",
            )
        )
        self.pump.submit(RequestEnded(rid=rid, outcome="failed"))

    def _workers_of(self, placed: _Placed) -> Iterator[Worker]:
        for url in (placed.prefill, placed.decode):
            worker = self._registry.get(url)
            if worker is not None:
                yield worker

    def _count(self, placed: _Placed, step: int) -> None:
        """Legs in flight: one more of each, or one less."""
        prefill, decode = self._registry.get(placed.prefill), self._registry.get(placed.decode)
        if prefill is not None and placed.prefill_open:
            prefill.active = max(0, prefill.active + step)
        if decode is not None:
            decode.active = max(0, decode.active + step)

    def _prefill_over(self, placed: _Placed) -> None:
        prefill = self._registry.get(placed.prefill)
        if placed.prefill_open and prefill is not None:
            prefill.active = max(0, prefill.active - 1)
        placed.prefill_open = False

    # Telling ----------------------------------------------------------------------------------

    def _states(self) -> list[WorkerState]:
        now_s = time.monotonic()
        return [state_of(worker, now_s) for worker in self._registry]

    def silenced(self, worker: Worker) -> None:
        """See :class:`~sglang_sbs.router.workers.worker.WorkerEvents`."""
        self._flush()
        self._tell_all(Silenced(worker=worker.url))

    def _tell_all(self, message: FromScheduler) -> None:
        for session in list(self._sessions.values()):
            if session.open and not self._tell(session.identity, message):
                self._end_session(session, "its connection is gone")

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """News of workers first: a decision may be about a new one."""
        self._flushing = False
        if self._told_s == 0.0:
            self._told_s = self._loop.time()
            self._tell_all(Cluster(workers=self._states()))
        for session in list(self._sessions.values()):
            if session.outbox:
                commands, session.outbox = session.outbox, []
                if not self._tell(session.identity, Decisions(commands=commands)):
                    self._end_session(session, "its connection is gone")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._beat(self._loop.time())
            except Exception:
                logger.exception("heartbeat failed")

    def _beat(self, now_s: float) -> None:
        self.lag.add(max(0.0, now_s - self._ticked_s - TICK_S))
        late_s = max(0.0, now_s - self._ticked_s - 2 * TICK_S)
        self._ticked_s = now_s
        for session in list(self._sessions.values()):
            # A process that was stopped has heard nobody: that is not their silence.
            session.heard_s += late_s
            if now_s - session.heard_s > SILENT_S:
                self._end_session(session, f"silent for {now_s - session.heard_s:.1f} s")
        if now_s - self._told_s >= CLUSTER_EVERY_S:
            self._told_s = now_s
            self._tell_all(Cluster(workers=self._states(), snapshot=self.pump.snapshot()))
        self._tell_all(Alive())

    def _end_session(self, session: _Session, why: str) -> None:
        if self._sessions.pop(session.identity, None) is None:
            return
        if any(other.front_end == session.front_end for other in self._sessions.values()):
            logger.info("front end %s %s: it announces its requests again", session.name, why)
        else:
            logger.log(
                logging.WARNING if session.requests else logging.INFO,
                "front end %s is gone (%s) with %s",
                session.name,
                why,
                counted(len(session.requests), "request"),
            )
            self._retire_page(self._pages.pop(session.front_end, ""))
        requests, session.requests = session.requests, {}
        session.outbox.clear()
        for rid in requests:  # all of them first: the end of one may be the dispatch of the next
            del self._owners[rid]
        for rid, placed in requests.items():
            self._count(placed, -1)
            self.pump.submit(RequestEnded(rid=rid, outcome="aborted"))
