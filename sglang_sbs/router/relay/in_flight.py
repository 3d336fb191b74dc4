"""What is in flight: the client's request, its units, the attempts at each, each referring to the
one before. Owns the table from rid to workers (EndForward is bound through it), the counters per
worker, and whose client may abort what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial

from sglang_sbs.router.assignment.assigner import Announced, Assigner
from sglang_sbs.router.client.answer_stream import Downstream
from sglang_sbs.router.engines.connection_pool import Pool
from sglang_sbs.router.errors import Leg, LegFailure, transport_failure
from sglang_sbs.router.lanes import Pace
from sglang_sbs.router.prompts.length_estimate import PromptLengths
from sglang_sbs.router.prompts.reader import ReadPrompt
from sglang_sbs.router.relay.aborts import Aborts
from sglang_sbs.router.relay.event_reader import Payload
from sglang_sbs.router.relay.leg_answers import PrefillReply
from sglang_sbs.router.relay.pair import Pair
from sglang_sbs.router.relay.parking import TRANSFER_TIMEOUT_S, Parking
from sglang_sbs.router.relay.recent import RecentRequest, RecentRequests
from sglang_sbs.router.requests.headers import Asked
from sglang_sbs.router.requests.plan import Plan
from sglang_sbs.router.telemetry.metrics import RouterMetrics
from sglang_sbs.router.telemetry.tracing import AttemptTrace, Traces
from sglang_sbs.router.workers.server_info import may_rebootstrap
from sglang_sbs.router.workers.worker import Placement, Worker
from sglang_sbs.scheduling.events import Dispatch, Outcome
from sglang_sbs.scheduling.queue.priority import class_of

_LAST_CHANCE_S = 5.0
"""Without a byte for this long, a stream of a lost worker is over."""


@dataclass(slots=True)
class Exchange:
    headers: bytes
    """Those that both legs get."""
    request_id: str
    asked: Asked
    downstream: Downstream
    pairs: dict[int, Pair]
    """By unit index: the attempt under way."""
    plan: Plan
    prompts: list[ReadPrompt]
    """By prompt index."""
    session: str
    priority: int
    """Larger is more urgent."""
    recent: RecentRequest
    """What is remembered of it."""
    make_sink: Callable[[Pair], Callable[[Payload], None]] | None = None
    """Makes, for each attempt, what takes decode's stream; ``None``: the answer is kept whole."""
    edits_events: bool = False
    """It takes the data of each event; otherwise bytes as they come."""
    window: asyncio.Semaphore | None = None
    """Of a batch: places for units that wait for their prefill."""
    ending: bool = False
    """The first of its units failed, or its client left: none is sent any more."""


@dataclass(slots=True, eq=False)
class UnitRun:
    exchange: Exchange
    unit: int
    attempts: int = 0
    exclude: tuple[str, ...] = ()
    """Engines that failed it."""
    broken_off: set[str] = field(default_factory=set)
    """Those of them that went away under it."""
    suspects: list[LegFailure] = field(default_factory=list)
    """Answers of 5xx that may be the engine's fault, or the request's."""
    decode_after_s: float = 0.0
    """How long the next attempt gives prefill to refuse before it sends decode's request."""

    ahead: bool = True
    """It has a place in the window of its batch."""

    def prefilled(self) -> None:
        """It is past prefill, or over; its place is another's. Does nothing twice."""
        if self.ahead and self.exchange.window is not None:
            self.exchange.window.release()
        self.ahead = False

    @property
    def prompt(self) -> ReadPrompt:
        return self.exchange.prompts[self.unit // self.exchange.plan.samples]

    @property
    def opened(self) -> bool:
        """Something of its answer is there, and may have been passed on."""
        pair = self.exchange.pairs.get(self.unit)
        return pair is not None and pair.opened


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt(Announced):
    """One attempt: it has a rid of its own, and both legs get that."""

    run: UnitRun
    announced_s: float = 0.0
    first_byte_s: float | None = None
    pair: Pair | None = None
    """Its legs, once they were sent."""
    prefill_open: bool = False
    """They were, and prefill has not answered."""
    trace: AttemptTrace = field(default_factory=AttemptTrace)

    @property
    def placement(self) -> Placement | None:
        return self.pair.placement if self.pair is not None else None


@dataclass(eq=False, repr=False)
class InFlight:
    dispatcher: Assigner
    pool: Pool
    lengths: PromptLengths
    metrics: RouterMetrics
    worker_key: InitVar[str | None]
    traces: Traces | None = None
    recent: RecentRequests = field(default_factory=RecentRequests)
    pace: Pace = field(default_factory=Pace)
    """Of work on long answers."""
    transfer_timeout_s: float = TRANSFER_TIMEOUT_S
    _attempts: dict[str, Attempt] = field(default_factory=dict)
    _tasks: dict[asyncio.Task[object], Sequence[str]] = field(default_factory=dict)
    """Of client requests, each with the client's ids for it."""
    _aborted: set[asyncio.Task[object]] = field(default_factory=set)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self, worker_key: str | None) -> None:
        self.aborts = Aborts(self.pool, worker_key, self.metrics.aborts.inc)
        self._keyed = worker_key is not None
        self.parking = Parking(self.transfer_timeout_s)
        self._idle.set()

    def __len__(self) -> int:
        return len(self._attempts)

    @property
    def client_requests(self) -> int:
        return len(self._tasks)

    # Client requests --------------------------------------------------------------------------

    def began(self, task: asyncio.Task[object]) -> None:
        """A client request is being served, until :meth:`over`."""
        self._tasks[task] = ()
        self._idle.clear()

    def named(self, task: asyncio.Task[object], rids: Sequence[str]) -> None:
        """From now on it can be aborted by these ids of its client."""
        self._tasks[task] = rids

    def over(self, task: asyncio.Task[object]) -> None:
        del self._tasks[task]
        self._aborted.discard(task)
        if not self._tasks:
            self._idle.set()

    def abort(self, rid: str = "") -> int:
        """End the requests whose client id starts with ``rid`` (as SGLang matches), all if it is
        empty; how many."""
        found = [
            task
            for task, client_rids in self._tasks.items()
            if not rid or any(client_rid.startswith(rid) for client_rid in client_rids)
        ]
        self._aborted.update(found)
        for task in found:
            task.cancel()
        return len(found)

    def was_aborted(self, task: asyncio.Task[object]) -> bool:
        """Its cancellation came from here, not from a client that went away."""
        return task in self._aborted

    async def wait_idle(self) -> None:
        await self._idle.wait()

    # Attempts ---------------------------------------------------------------------------------

    def announce(self, attempt: Attempt) -> None:
        attempt.announced_s = time.monotonic()
        self._attempts[attempt.rid] = attempt
        run = attempt.run
        self.recent.announced(run.exchange.recent, attempt.rid, run.unit, attempt.announced_s)
        if self.traces is not None:
            self.traces.announced(attempt.trace)

    def assigned(self, attempt: Attempt, assignment: Dispatch) -> None:
        self.metrics.held(class_of(attempt.arrival.priority), assignment.held_s)
        self.recent.held(attempt.run.exchange.recent, assignment.held_s)
        attempt.trace.dispatched_ns = time.time_ns()

    def started(self, attempt: Attempt, placement: Placement) -> None:
        attempt.prefill_open = True
        attempt.trace.sent_ns = time.time_ns()
        for worker in (placement.prefill, placement.decode):
            worker.active += 1
            worker.dispatches += 1

    def end(self, attempt: Attempt, outcome: Outcome, completion_tokens: int | None) -> None:
        """The attempt is over; while its decode request is parked, only for prefill."""
        recent = attempt.run.exchange.recent
        seen = recent.client_side(attempt.announced_s, attempt.first_byte_s)
        del self._attempts[attempt.rid]
        self._prefill_over(attempt)
        # It must not know the attempt, whose bodies may be large: it can wait for minutes.
        told = partial(self.dispatcher.ended, attempt.rid, outcome, completion_tokens, seen)
        left = partial(self._left, told, attempt.placement)
        if attempt.pair is not None and attempt.pair.must_park:
            self.dispatcher.prefill_aborted(attempt.rid)
            self.parking.park(attempt.pair, left)
        else:
            left()
        self.metrics.attempt_ended(outcome)
        self.recent.attempt_ended(attempt.run.exchange.recent, attempt.rid, outcome)
        if self.traces is not None:
            self.traces.ended(attempt.trace, attempt.assignment, outcome)

    @staticmethod
    def _left(told: Callable[[], None], placement: Placement | None) -> None:
        """Decode has nothing more of it."""
        told()
        if placement is not None:
            placement.decode.active -= 1

    def sessions(self) -> dict[str, int]:
        """How many conversations have a leg in flight, by worker URL; none where it is missing."""
        names: dict[str, set[str]] = {}
        for attempt in self._attempts.values():
            placement, session = attempt.placement, attempt.arrival.session
            if placement is not None and session:
                names.setdefault(placement.decode.url, set()).add(session)
                if attempt.prefill_open:
                    names.setdefault(placement.prefill.url, set()).add(session)
        return {url: len(found) for url, found in names.items()}

    def find_owner(self, rid: str, role: str) -> str | None:
        """Where the leg of that role went, for binding EndForward messages."""
        attempt = self._attempts.get(rid)
        if attempt is None or attempt.placement is None:
            return None
        placement = attempt.placement
        return (placement.prefill if role == "prefill" else placement.decode).url

    def refuses_retraction(self, placement: Placement) -> bool:
        """Whether prefill refuses what decode may ask of it after it retracted a request: the
        engine's own request has no key and speaks plain HTTP (sglang #25372)."""
        # SGLang fault: retraction-without-key
        closed = self._keyed or placement.prefill.url.startswith("https:")
        return closed and may_rebootstrap(placement.decode.known.version)

    @staticmethod
    def _prefill_over(attempt: Attempt) -> None:
        if attempt.prefill_open and attempt.placement is not None:
            attempt.prefill_open = False
            attempt.placement.prefill.active -= 1
            attempt.run.prefilled()

    # What pairs tell, once what came in together has been passed on -----------------------------

    def prefill_replied(self, rid: str, reply: PrefillReply, now_s: float) -> None:
        attempt = self._attempts.get(rid)
        self.dispatcher.prefill_done(rid, reply.prompt_tokens, reply.cached_tokens)
        if attempt is None:
            return
        attempt.trace.prefill_ns = time.time_ns()
        if attempt.prefill_open:
            self.metrics.prefill_seconds.observe(now_s - attempt.announced_s)
        self._prefill_over(attempt)
        if reply.prompt_tokens is not None:
            self.lengths.learn(attempt.run.prompt.length, reply.prompt_tokens)
            if reply.cached_tokens is not None and attempt.assignment is not None:
                expected = attempt.assignment.cached_tokens
                self.metrics.prefix_found(reply.prompt_tokens, expected, reply.cached_tokens)

    def decode_started(self, rid: str, now_s: float) -> None:
        attempt = self._attempts.get(rid)
        if attempt is None or attempt.prefill_open:  # else its reply has said so
            self.dispatcher.prefill_done(rid)
        if attempt is not None:
            self._prefill_over(attempt)
            asked, attempt.first_byte_s = attempt.arrival, now_s
            self.recent.first_byte(attempt.run.exchange.recent, now_s)
            self.metrics.first_byte(
                class_of(asked.priority), now_s - attempt.announced_s, asked.ttft_slo_s
            )
            attempt.trace.first_byte_ns = time.time_ns()

    def fail_worker(self, worker: Worker) -> None:
        """End what waits for a worker that answers nothing any more. Streams under way get a last
        chance: they are ended if nothing comes for a while."""
        self.parking.engine_lost(worker)
        for rid, attempt in list(self._attempts.items()):
            pair, placement = attempt.pair, attempt.placement
            if pair is None or placement is None:
                continue
            if placement.decode is worker and pair.opened:
                loop = asyncio.get_running_loop()
                loop.call_later(_LAST_CHANCE_S, self._fail_if_stalled, rid, worker, pair.chunks)
            elif placement.decode is worker:
                pair.leg_failed(_lost("decode", worker))
            elif placement.prefill is worker and attempt.prefill_open:
                pair.leg_failed(_lost("prefill", worker))

    def _fail_if_stalled(self, rid: str, worker: Worker, chunks: int) -> None:
        attempt = self._attempts.get(rid)
        if attempt is not None and attempt.pair is not None and attempt.pair.chunks == chunks:
            attempt.pair.leg_failed(_lost("decode", worker))


def _lost(leg: Leg, worker: Worker) -> LegFailure:
    detail = "it answers nothing any more, not even health checks"
    return transport_failure(leg, worker.url, detail)
