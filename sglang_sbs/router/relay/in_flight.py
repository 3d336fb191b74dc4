"""The books on what is in flight: which rid went where, and whose client may abort it.

Owns the table from rid to workers (EndForward is bound through it) and the counters per worker.
Must not know how a request is answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sglang_sbs.router.assignment.dispatcher import Assigner, Assignment
from sglang_sbs.router.engines.connection_pool import Pool
from sglang_sbs.router.errors import Leg, LegFailure, transport_failure
from sglang_sbs.router.prompts.length_estimate import PromptLength, PromptLengths
from sglang_sbs.router.relay.aborts import Aborts
from sglang_sbs.router.relay.leg_answers import PrefillReply
from sglang_sbs.router.relay.pair import Pair
from sglang_sbs.router.telemetry.metrics import RouterMetrics
from sglang_sbs.router.telemetry.tracing import AttemptTrace, Traces
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.scheduling.events import Outcome
from sglang_sbs.scheduling.queue.priority import PriorityClass

_LAST_CHANCE_S = 5.0
"""Without a byte for this long, a stream of a lost worker is over."""


def _nobody() -> None:
    """Nobody wants to know."""


@dataclass(slots=True)
class _Request:
    length: PromptLength
    announced_s: float
    priority: PriorityClass
    slo_s: float | None
    """The client wants its first token by then."""
    session: str
    """What the client calls the conversation."""
    prefilled: Callable[[], None] = _nobody
    pair: Pair | None = None
    prefill: Worker | None = None
    decode: Worker | None = None
    prefill_open: bool = False
    expected_cached_tokens: int = 0
    trace: AttemptTrace | None = None


class InFlight:
    """Also the :class:`PairObserver` of every pair."""

    def __init__(
        self,
        *,
        dispatcher: Assigner,
        pool: Pool,
        lengths: PromptLengths,
        metrics: RouterMetrics,
        worker_key: str | None,
        traces: Traces | None = None,
    ) -> None:
        self._traces = traces
        self._dispatcher = dispatcher
        self._pool = pool
        self._lengths = lengths
        self._metrics = metrics
        self.aborts = Aborts(pool, worker_key, metrics.aborts.inc)
        self._requests: dict[str, _Request] = {}
        self._clients: dict[str, set[asyncio.Task[object]]] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._aborted: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def client_requests(self) -> int:
        return len(self._tasks)

    # Client requests --------------------------------------------------------------------------

    def began(self, task: asyncio.Task[object]) -> None:
        """A client request is being served, until :meth:`over`."""
        self._tasks.add(task)
        self._idle.clear()

    def over(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        self._aborted.discard(task)
        if not self._tasks:
            self._idle.set()

    @contextmanager
    def named(self, rids: Sequence[str], task: asyncio.Task[object]) -> Iterator[None]:
        """Known by the client's ids meanwhile, so that it can be aborted by them."""
        for rid in rids:
            self._clients.setdefault(rid, set()).add(task)
        try:
            yield
        finally:
            for rid in rids:
                tasks = self._clients.get(rid)
                if tasks is not None:
                    tasks.discard(task)
                    if not tasks:
                        del self._clients[rid]

    def abort_client_request(self, rid: str) -> int:
        """End the requests whose client id starts with ``rid`` (as SGLang matches); how many."""
        tasks = {
            task
            for client_rid, group in self._clients.items()
            if client_rid.startswith(rid)
            for task in group
        }
        return self._abort(tasks)

    def abort_all(self) -> int:
        return self._abort(set(self._tasks))

    def _abort(self, tasks: set[asyncio.Task[object]]) -> int:
        for task in tasks:
            self._aborted.add(task)
            task.cancel()
        return len(tasks)

    def was_aborted(self, task: asyncio.Task[object]) -> bool:
        """Its cancellation came from here, not from a client that went away."""
        return task in self._aborted

    async def wait_idle(self) -> None:
        """Until no client request is being served."""
        await self._idle.wait()

    # Attempts ---------------------------------------------------------------------------------

    def announce(
        self,
        rid: str,
        length: PromptLength,
        priority: PriorityClass = "normal",
        slo_s: float | None = None,
        prefilled: Callable[[], None] = _nobody,
        session: str = "",
    ) -> None:
        """An attempt begins; ``prefilled`` is told when its prefill is over."""
        now_s = time.monotonic()
        request = self._requests[rid] = _Request(length, now_s, priority, slo_s, session, prefilled)
        if self._traces is not None:
            request.trace = self._traces.announced()

    def assigned(self, assignment: Assignment) -> None:
        """The scheduler let it go."""
        request = self._requests[assignment.rid]
        request.expected_cached_tokens = assignment.cached_tokens
        self._metrics.class_held(request.priority, assignment.held_s)
        trace = request.trace
        if trace is not None:
            trace.assignment = assignment
            trace.dispatched_ns = time.time_ns()

    def started(self, assignment: Assignment, pair: Pair, prefill: Worker, decode: Worker) -> None:
        request = self._requests[assignment.rid]
        request.pair, request.prefill, request.decode = pair, prefill, decode
        request.prefill_open = True
        if request.trace is not None:
            request.trace.sent_ns = time.time_ns()
        for worker in (prefill, decode):
            worker.active += 1
            worker.dispatches += 1

    def ended(self, rid: str, outcome: Outcome) -> None:
        request = self._requests.pop(rid, None)
        if request is None:
            return
        self._prefill_over(request)
        if request.decode is not None:
            request.decode.active -= 1
        self._metrics.attempt_ended(outcome)
        if request.trace is not None and self._traces is not None:
            self._traces.ended(request.trace, outcome)

    def sessions(self) -> dict[str, int]:
        """How many conversations have a leg in flight, by worker URL; none where it is missing."""
        names: dict[str, set[str]] = {}
        for request in self._requests.values():
            if request.session:
                for worker in (request.decode, request.prefill if request.prefill_open else None):
                    if worker is not None:
                        names.setdefault(worker.url, set()).add(request.session)
        return {url: len(found) for url, found in names.items()}

    def find_owner(self, rid: str, role: str) -> str | None:
        """Where the leg of that role went, for binding EndForward messages."""
        request = self._requests.get(rid)
        if request is None:
            return None
        worker = request.prefill if role == "prefill" else request.decode
        return worker.url if worker is not None else None

    @staticmethod
    def _prefill_over(request: _Request) -> None:
        if request.prefill_open and request.prefill is not None:
            request.prefill_open = False
            request.prefill.active -= 1
            request.prefilled()

    # PairObserver -----------------------------------------------------------------------------

    # Booked when what came in together has been passed on: a first byte does not wait for it.

    def prefill_came(self, rid: str) -> None:
        """See :class:`~.pair.PairObserver`. Others are not held until it was read."""
        self._pool.loop.call_soon(self._dispatcher.prefill_done, rid)

    def prefill_replied(self, rid: str, reply: PrefillReply) -> None:
        """See :class:`~.pair.PairObserver`."""
        self._pool.loop.call_soon(self._book_reply, rid, reply, time.monotonic())

    def decode_started(self, rid: str) -> None:
        """See :class:`~.pair.PairObserver`."""
        self._pool.loop.call_soon(self._book_start, rid, time.monotonic())

    def _book_reply(self, rid: str, reply: PrefillReply, now_s: float) -> None:
        request = self._requests.get(rid)
        self._dispatcher.prefill_done(rid, reply.prompt_tokens, reply.cached_tokens)
        if request is None:
            return
        if request.trace is not None:
            request.trace.prefill_ns = time.time_ns()
        if request.prefill_open:
            self._metrics.prefill_seconds.observe(now_s - request.announced_s)
        self._prefill_over(request)
        if reply.prompt_tokens is not None:
            self._lengths.learn(request.length, reply.prompt_tokens)
            if reply.cached_tokens is not None:
                self._metrics.prefix_found(
                    reply.prompt_tokens, request.expected_cached_tokens, reply.cached_tokens
                )

    def _book_start(self, rid: str, now_s: float) -> None:
        request = self._requests.get(rid)
        if request is None or request.prefill_open:  # else its reply has said so
            self._dispatcher.prefill_done(rid)
        if request is not None:
            self._prefill_over(request)
            self._metrics.first_byte(request.priority, now_s - request.announced_s, request.slo_s)
            if request.trace is not None:
                request.trace.first_byte_ns = time.time_ns()

    # Lost workers -----------------------------------------------------------------------------

    def fail_worker(self, worker: Worker) -> None:
        """End what waits for a worker that answers nothing any more.

        Streams under way get a last chance: they are ended if nothing comes for a while.
        """
        for rid, request in list(self._requests.items()):
            pair = request.pair
            if pair is None:
                continue
            if request.decode is worker and pair.opened:
                loop = asyncio.get_running_loop()
                loop.call_later(_LAST_CHANCE_S, self._fail_if_stalled, rid, worker, pair.chunks)
            elif request.decode is worker:
                pair.leg_failed(_lost("decode", worker))
            elif request.prefill is worker and request.prefill_open:
                pair.leg_failed(_lost("prefill", worker))

    def _fail_if_stalled(self, rid: str, worker: Worker, chunks: int) -> None:
        request = self._requests.get(rid)
        if request is not None and request.pair is not None and request.pair.chunks == chunks:
            request.pair.leg_failed(_lost("decode", worker))


def _lost(leg: Leg, worker: Worker) -> LegFailure:
    detail = "it answers nothing any more, not even health checks"
    return transport_failure(leg, worker.url, detail, unreachable=False)
