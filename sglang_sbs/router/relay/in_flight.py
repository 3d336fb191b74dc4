"""Tracks requests in flight: client requests, their units, and the attempts at each unit. Finds the
workers of a rid (to bind EndForward messages to workers) and the requests of a client's id (to
abort them), and keeps each worker's counters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial

from sglang_sbs.router.client.answer_stream import Downstream
from sglang_sbs.router.dispatch.dispatcher import Dispatcher, Submitted
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
from sglang_sbs.router.requests.headers import RouterHeaders
from sglang_sbs.router.requests.plan import RequestPlan
from sglang_sbs.router.telemetry.metrics import RouterMetrics
from sglang_sbs.router.telemetry.tracing import AttemptTrace, Traces
from sglang_sbs.router.workers.server_info import may_rebootstrap
from sglang_sbs.router.workers.worker import AttemptWorkers, Worker
from sglang_sbs.scheduling.events import ClientSide, Dispatch, Outcome
from sglang_sbs.scheduling.queue.priority import class_of


@dataclass(slots=True)
class Exchange:
    headers: bytes
    """Header lines sent with the prefill and the decode request."""
    request_id: str
    asked: RouterHeaders
    downstream: Downstream
    pairs: dict[int, Pair]
    """Pair of the current attempt at each running unit, by unit index."""
    plan: RequestPlan
    prompts: list[ReadPrompt]
    """Tokenized prompts by prompt index."""
    session: str
    priority: int
    """Scheduling priority; larger is more urgent."""
    recent: RecentRequest
    """The record kept for the access log and ``sglang-sbs why``."""
    make_sink: Callable[[Pair], Callable[[Payload], None]] | None = None
    """Creates the consumer of an attempt's decode stream; ``None`` collects the whole response."""
    edits_events: bool = False
    """The stream's consumer gets the data of each event instead of the bytes as received."""
    window: asyncio.Semaphore | None = None
    """Limits how many units wait for prefill at once; ``None`` with a single unit."""
    ending: bool = False
    """A unit failed or the client left: no further unit is sent."""

    def __repr__(self) -> str:
        """Show no headers, which contain the client's key, and no prompts."""
        units = len(self.plan.units)
        return f"<Exchange {self.request_id}: {self.plan.kind}, {units=}{', ending' * self.ending}>"


@dataclass(slots=True, eq=False)
class UnitRun:
    exchange: Exchange
    unit: int
    attempts: int = 0
    exclude: tuple[str, ...] = ()
    """URLs of engines to avoid: they failed this unit, or are too old for its API."""
    partners: set[str] = field(default_factory=set)
    """URLs of the other engines of attempts that ended with an engine's error status."""
    broken_off: set[str] = field(default_factory=set)
    """URLs of engines that dropped the connection on this unit."""
    suspects: list[LegFailure] = field(default_factory=list)
    """5xx responses not counted against engines yet, because the request may be the cause."""
    decode_after_s: float = 0.0
    """Time that the next attempt gives prefill to refuse before it sends decode's request."""

    ahead: bool = True
    """The unit still occupies a place in ``exchange.window``."""

    def __repr__(self) -> str:
        return f"<UnitRun {self.unit} of {self.exchange!r}: attempts={self.attempts}>"

    def on_prefilled(self) -> None:
        """Free the unit's place in the window: it is past prefill, or over. Repeated calls do
        nothing."""
        if self.ahead and self.exchange.window is not None:
            self.exchange.window.release()
        self.ahead = False

    @property
    def prompt(self) -> ReadPrompt:
        return self.exchange.prompts[self.unit // self.exchange.plan.samples]

    @property
    def opened(self) -> bool:
        """Whether the current attempt has output, which may have been sent to the client."""
        pair = self.exchange.pairs.get(self.unit)
        return pair is not None and pair.opened


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class Attempt(Submitted):
    """One attempt at a unit; both legs use its rid."""

    run: UnitRun
    submitted_s: float = 0.0
    first_byte_s: float | None = None
    pair: Pair | None = None
    """The prefill and the decode request; ``None`` until they are sent."""
    prefill_open: bool = False
    """The legs were sent, and prefill has not responded."""
    trace: AttemptTrace | None = None
    """Times for its tracing spans; ``None`` without tracing."""

    def state(self) -> str:
        of = f"attempt {self.run.attempts} at unit {self.run.unit}"
        return f"{of}, {self.pair or Submitted.state(self)}"

    @property
    def placement(self) -> AttemptWorkers | None:
        return self.pair.placement if self.pair is not None else None


@dataclass(eq=False, repr=False)
class InFlight:
    dispatcher: Dispatcher
    pool: Pool
    lengths: PromptLengths
    metrics: RouterMetrics
    worker_key: InitVar[str | None]
    traces: Traces | None = None
    recent: RecentRequests = field(default_factory=RecentRequests)
    pace: Pace = field(default_factory=Pace)
    """Spaces out the steps of parsing long responses, so that other work runs in between."""
    draining: bool = False
    """Shutdown has begun: each response closes its connection."""
    transfer_timeout_s: float = TRANSFER_TIMEOUT_S
    last_chance_s: float = 5.0
    """Seconds without an event after which the open stream of an unresponsive worker is ended."""
    _attempts: dict[str, Attempt] = field(default_factory=dict)
    _tasks: dict[asyncio.Task[object], Sequence[str]] = field(default_factory=dict)
    """Tasks of client requests, each with the client's own ids."""
    _aborted: set[asyncio.Task[object]] = field(default_factory=set)
    _sending: int = 0
    """Complete responses that are still being sent; they can no longer be aborted."""
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self, worker_key: str | None) -> None:
        self.aborts = Aborts(self.pool, worker_key, self.metrics.aborts.inc)
        self._keyed = worker_key is not None
        self.parking = Parking(self.transfer_timeout_s)

    def __len__(self) -> int:
        return len(self._attempts)

    @property
    def client_requests(self) -> int:
        return len(self._tasks)

    # Client requests --------------------------------------------------------------------------

    def on_begun(self, task: asyncio.Task[object]) -> None:
        """Register a client request until :meth:`over`."""
        self._tasks[task] = ()

    def record_ids(self, task: asyncio.Task[object], rids: Sequence[str]) -> None:
        """Set the client's ids, by which the request can be aborted."""
        self._tasks[task] = rids

    def over(self, task: asyncio.Task[object]) -> None:
        del self._tasks[task]
        self._aborted.discard(task)
        if not self._tasks:
            self._idle.set()

    def on_answered(self) -> None:
        """Count a complete response until :meth:`on_sent`: shutdown waits for slow readers."""
        self._sending += 1

    def on_sent(self) -> None:
        self._sending -= 1
        self._idle.set()

    def abort(self, rid: str = "") -> int:
        """Abort the requests whose client id starts with ``rid`` (as SGLang matches), or all if it
        is empty; return their number."""
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
        """Return whether :meth:`abort` cancelled the task, and not a client that disconnected."""
        return task in self._aborted

    async def wait_idle(self) -> None:
        """Wait until all client requests are over and their responses are sent."""
        while self._tasks or self._sending:
            self._idle.clear()
            await self._idle.wait()

    # Attempts ---------------------------------------------------------------------------------

    def on_submitted(self, attempt: Attempt) -> None:
        attempt.submitted_s = time.monotonic()
        self._attempts[attempt.rid] = attempt
        run = attempt.run
        self.recent.on_submitted(run.exchange.recent, attempt.rid, run.unit, attempt.submitted_s)
        if self.traces is not None:
            attempt.trace = self.traces.on_submitted()

    def on_dispatched(self, attempt: Attempt, dispatch: Dispatch) -> None:
        self.metrics.record_held(class_of(attempt.arrival.priority), dispatch.held_s)
        self.recent.record_held(attempt.run.exchange.recent, dispatch.held_s)
        if attempt.trace is not None:
            attempt.trace.dispatched_ns = time.time_ns()

    def started(self, attempt: Attempt, placement: AttemptWorkers) -> None:
        attempt.prefill_open = True
        if attempt.trace is not None:
            attempt.trace.sent_ns = time.time_ns()
        for worker in (placement.prefill, placement.decode):
            worker.active += 1
            worker.dispatches += 1

    def end(self, attempt: Attempt, outcome: Outcome, completion_tokens: int | None) -> None:
        """End an attempt in the scheduler, the counters and the records. If its decode request must
        be parked, decode's part ends in the scheduler only when it is released."""
        recent = attempt.run.exchange.recent
        seen = recent.client_side(attempt.submitted_s, attempt.first_byte_s)
        del self._attempts[attempt.rid]
        self._prefill_over(attempt)
        # Reference no attempt here: it may hold large bodies, and parking can last minutes.
        left = attempt.rid, outcome, completion_tokens, seen, attempt.placement
        if attempt.pair is not None and attempt.pair.must_park:
            self.dispatcher.prefill_aborted(attempt.rid)
            self.parking.park(attempt.pair, partial(self._left, *left))
        else:
            self._left(*left)
        self.metrics.on_attempt_ended(outcome)
        self.recent.on_attempt_ended(attempt.run.exchange.recent, attempt.rid, outcome)
        if self.traces is not None and attempt.trace is not None:
            self.traces.on_ended(attempt.trace, attempt.dispatch, outcome)

    def _left(
        self,
        rid: str,
        outcome: Outcome,
        completion_tokens: int | None,
        seen: ClientSide,
        placement: AttemptWorkers | None,
    ) -> None:
        """Report an attempt's end to the scheduler and uncount it at the decode worker; runs at
        once, or when the parked decode request is released."""
        self.dispatcher.on_ended(rid, outcome, completion_tokens, seen)
        if placement is not None:
            placement.decode.active -= 1

    def sessions(self) -> dict[str, int]:
        """Conversations with a leg in flight, by worker URL; workers without any are omitted."""
        names: dict[str, set[str]] = {}
        for attempt in self._attempts.values():
            placement, session = attempt.placement, attempt.arrival.session
            if placement is not None and session:
                names.setdefault(placement.decode.url, set()).add(session)
                if attempt.prefill_open:
                    names.setdefault(placement.prefill.url, set()).add(session)
        return {url: len(found) for url, found in names.items()}

    def find_owner(self, rid: str, role: str) -> str | None:
        """Return the URL of the engine to which the attempt's leg of ``role`` was sent, ``None`` if
        unknown; binds EndForward messages to workers."""
        attempt = self._attempts.get(rid)
        if attempt is None or attempt.placement is None:
            return None
        placement = attempt.placement
        return (placement.prefill if role == "prefill" else placement.decode).url

    def refuses_retraction(self, placement: AttemptWorkers) -> bool:
        """Return whether prefill will refuse decode's own request after a retraction: the engine
        sends it without a key and over plain HTTP (sglang #25372)."""
        # SGLang fault: retraction-without-key
        closed = self._keyed or placement.prefill.url.startswith("https:")
        return closed and may_rebootstrap(placement.decode.known.version)

    @staticmethod
    def _prefill_over(attempt: Attempt) -> None:
        if attempt.prefill_open and attempt.placement is not None:
            attempt.prefill_open = False
            attempt.placement.prefill.active -= 1
            attempt.run.on_prefilled()

    # Reports of pairs, sent after received data has been passed on -----------------------------

    def prefill_replied(self, rid: str, reply: PrefillReply, now_s: float) -> None:
        attempt = self._attempts.get(rid)
        self.dispatcher.prefill_done(rid, reply.prompt_tokens, reply.cached_tokens)
        if attempt is None:
            return
        if attempt.trace is not None:
            attempt.trace.prefill_ns = time.time_ns()
        if attempt.prefill_open:
            self.metrics.prefill_seconds.observe(now_s - attempt.submitted_s)
        self._prefill_over(attempt)
        if reply.prompt_tokens is not None:
            self.lengths.learn(attempt.run.prompt.length, reply.prompt_tokens)
            if reply.cached_tokens is not None and attempt.dispatch is not None:
                expected = attempt.dispatch.cached_tokens
                self.metrics.prefix_found(reply.prompt_tokens, expected, reply.cached_tokens)

    def decode_started(self, rid: str, now_s: float) -> None:
        attempt = self._attempts.get(rid)
        if attempt is None or attempt.prefill_open:  # else its response has reported this
            self.dispatcher.prefill_done(rid)
        if attempt is not None:
            self._prefill_over(attempt)
            asked, attempt.first_byte_s = attempt.arrival, now_s
            self.recent.first_byte(attempt.run.exchange.recent, now_s)
            self.metrics.first_byte(
                class_of(asked.priority), now_s - attempt.submitted_s, asked.ttft_slo_s
            )
            if attempt.trace is not None:
                attempt.trace.first_byte_ns = time.time_ns()

    def fail_worker(self, worker: Worker) -> None:
        """Fail requests waiting for a worker that no longer responds. Open streams end only if
        nothing arrives for ``last_chance_s``."""
        self.parking.engine_lost(worker)
        for rid, attempt in list(self._attempts.items()):
            pair, placement = attempt.pair, attempt.placement
            if pair is None or placement is None:
                continue
            if placement.decode is worker and pair.opened:
                loop = asyncio.get_running_loop()
                fail = partial(self._fail_if_stalled, rid, worker, pair.chunks)
                loop.call_later(self.last_chance_s, fail)
            elif placement.decode is worker:
                pair.leg_failed(_lost("decode", worker))
            elif placement.prefill is worker and attempt.prefill_open:
                pair.prefill_lost = True
                pair.leg_failed(_lost("prefill", worker))

    def _fail_if_stalled(self, rid: str, worker: Worker, chunks: int) -> None:
        attempt = self._attempts.get(rid)
        if attempt is not None and attempt.pair is not None and attempt.pair.chunks == chunks:
            attempt.pair.leg_failed(_lost("decode", worker))


def _lost(leg: Leg, worker: Worker) -> LegFailure:
    detail = "it no longer responds, not even to health checks"
    return transport_failure(leg, worker.url, detail)
