"""From a client request to its answer: plan, assignment, pair, retries, response.

Owns the life of a client request and the books on what is in flight. Choosing instances is the
dispatcher's, the legs are :mod:`.pair`'s, JSON is :mod:`.merged_answers`'s. Every request announced
to the scheduler ends there exactly once, whatever happens here.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sglang_sbs.router.answer import Answer
from sglang_sbs.router.assignment.dispatcher import Assigner, Assignment
from sglang_sbs.router.client.answer_stream import Downstream
from sglang_sbs.router.client.client import Client
from sglang_sbs.router.client.intake import Bodies, BodyShare
from sglang_sbs.router.engines.connection_pool import Pool
from sglang_sbs.router.errors import Leg, LegFailure, RouterError, transport_failure
from sglang_sbs.router.lanes import Lanes, Pace, Turns
from sglang_sbs.router.options.config import LEGS_GROWTH, PlanLimits, RelayConfig
from sglang_sbs.router.prompts.reader import PromptReader, ReadPrompt
from sglang_sbs.router.prompts.tokenizer_check import EngineTokenizers
from sglang_sbs.router.relay.admission import Admission
from sglang_sbs.router.relay.engine_json import SHORT_BYTES, dumped_pieces, opened_in_parts
from sglang_sbs.router.relay.in_flight import InFlight
from sglang_sbs.router.relay.leg_answers import Body
from sglang_sbs.router.relay.merged_answers import (
    NoAnswer,
    StreamMerger,
    event_sink,
    merge_answers,
    merge_echoed_logprobs,
    merge_input_logprobs,
    restore_rid,
    sse,
)
from sglang_sbs.router.relay.pair import Pair, PairRequest
from sglang_sbs.router.requests.headers import Asked, session_header
from sglang_sbs.router.requests.legs import LegFields, leg_bodies
from sglang_sbs.router.requests.plan import Plan, RouteKind, Unit, plan_request
from sglang_sbs.router.requests.raw_json import JsonError
from sglang_sbs.router.telemetry.metrics import RouterMetrics
from sglang_sbs.router.workers.breaker import Suspicions
from sglang_sbs.router.workers.rank_contract import pick_bootstrap_room
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.scheduling.events import Outcome
from sglang_sbs.scheduling.queue.priority import clamped_priority, class_of
from sglang_sbs.wire.gangs import SIZED_RID_PREFIX, TAG_BITS, GangPart

logger = logging.getLogger(__name__)

PATHS: dict[RouteKind, str] = {
    "generate": "/generate",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}

_MOST_BROKEN_OFF = 2
"""Engines that may go away under a request before it is no longer tried on others: it may be what
ends them, and then it must not end them all."""
_QUICK_BYTES = 32 << 10
_QUICK_VALUES = 512
"""A body of that size and so many values is planned at once: a thread would cost more than that."""
_JOINED_BYTES = 512 << 10
"""Of an answer, copied in one turn of the event loop."""
_AT_ONCE = 4
"""Units of batches that begin, are sent or end in one turn of the event loop."""
MOST_AHEAD = 256
"""Units of one batch that wait for their prefill; the next begin as these get it."""


@dataclass(slots=True)
class _Exchange:
    """One client request."""

    plan: Plan
    path: str
    headers: bytes
    request_id: str
    downstream: Downstream
    prompts: list[ReadPrompt]
    """By prompt index."""
    session: str
    asked: Asked
    priority: int
    """Larger is more urgent."""
    pairs: dict[int, Pair]
    """By unit index: the attempt under way."""
    suspects: dict[int, list[LegFailure]] = field(default_factory=dict)
    """By unit index: answers of 5xx that may be the engine's fault, or the request's."""
    window: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_AHEAD))
    ahead: set[int] = field(default_factory=set)
    """By unit index: who has a place in ``window``."""

    async def go_ahead(self, index: int) -> None:
        """Wait for a place in the window."""
        await self.window.acquire()
        self.ahead.add(index)

    def prefilled(self, index: int) -> None:
        """The unit is past prefill, or over; its place is another's. Does nothing twice."""
        if index in self.ahead:
            self.ahead.discard(index)
            self.window.release()


class Relay:
    def __init__(
        self,
        config: RelayConfig,
        *,
        registry: Registry,
        dispatcher: Assigner,
        pool: Pool,
        prompts: PromptReader,
        tokenizers: EngineTokenizers,
        metrics: RouterMetrics,
        admission: Admission,
        in_flight: InFlight,
        lanes: Lanes,
    ) -> None:
        self._config = config
        self._registry = registry
        self._dispatcher = dispatcher
        self._pool = pool
        self._prompts = prompts
        self._tokenizers = tokenizers
        self.sent_as_ids = 0
        """Attempts whose engines got token ids in place of text."""
        self._metrics = metrics
        self._admission = admission
        self._in_flight = in_flight
        self._lanes = lanes
        self._suspicions = Suspicions()
        self._pace = Pace()
        self._turns = Turns(_AT_ONCE)
        """Of batches, whose units begin, are sent and end a few at a time."""
        self.bodies = Bodies(config.max_bodies_bytes)
        self._limits = PlanLimits(
            config.max_samples, config.max_units, LEGS_GROWTH * config.max_payload_bytes
        )

    async def handle(
        self, client: Client, kind: RouteKind, headers: bytes, request_id: str, asked: Asked
    ) -> Answer | None:
        """Answer one client request; ``None``: the answer was streamed to the client.

        ``headers`` are those that both legs get; ``asked`` is what the others say.

        Raises:
            RouterError: as long as nothing was sent to the client.
            asyncio.CancelledError: the client is gone; both legs are aborted.
        """
        task = asyncio.current_task()
        assert task is not None
        # From the first byte on: a request whose body is still coming is waited for at the end.
        self._in_flight.began(task)
        try:
            return await self._serve(client, kind, headers, request_id, asked, task)
        except asyncio.CancelledError:
            if not self._in_flight.was_aborted(task):
                raise
            task.uncancel()
            raise _aborted() from None
        finally:
            self._in_flight.over(task)

    async def _serve(
        self,
        client: Client,
        kind: RouteKind,
        headers: bytes,
        request_id: str,
        asked: Asked,
        task: asyncio.Task[Any],
    ) -> Answer | None:
        with self.bodies.share() as share:
            plan = await self._plan(kind, client, share)
            return await self._serve_plan(client, plan, headers, request_id, asked, task)

    async def _serve_plan(
        self,
        client: Client,
        plan: Plan,
        headers: bytes,
        request_id: str,
        asked: Asked,
        task: asyncio.Task[Any],
    ) -> Answer | None:
        pairs: dict[int, Pair] = {}
        with self._in_flight.named(plan.client_rids, task):
            prompts = await self._prompts.read(plan)
            plan.forget_values()
            exchange = _Exchange(
                plan=plan,
                path=PATHS[plan.kind],
                headers=headers,
                request_id=request_id,
                downstream=Downstream(client, pairs),
                pairs=pairs,
                prompts=prompts,
                session=session_header(headers) or plan.session,
                asked=asked,
                priority=self._priority_of(plan),
            )
            async with self._admission.slot(len(plan.units)):
                try:
                    async with asyncio.timeout(self._config.request_timeout_s):
                        return await self._answer(exchange)
                except TimeoutError:
                    limit = self._config.request_timeout_s
                    error = RouterError(
                        504,
                        "request_timeout",
                        f"no complete answer within {limit:g} s (--request-timeout-secs)",
                    )
                except RouterError as caught:
                    error = caught
                except asyncio.CancelledError:
                    if not self._in_flight.was_aborted(task):
                        raise
                    task.uncancel()
                    error = _aborted()
                except ConnectionError:
                    raise  # the client is gone
                except Exception:
                    if not exchange.downstream.opened:
                        raise
                    logger.exception("%s: the stream broke here", request_id)
                    error = RouterError(500, "internal_error", "internal error in the router")
                if not exchange.downstream.opened:
                    raise error
                exchange.downstream.push(error.sse_event())
                self._metrics.stream_broken(error)
                await exchange.downstream.finish()
                return None

    async def _plan(self, kind: RouteKind, client: Client, share: BodyShare) -> Plan:
        body = await share.read(client, self._config.max_payload_bytes)
        if len(body) <= _QUICK_BYTES and body.count(b",") <= _QUICK_VALUES:
            return plan_request(kind, body, self._limits)
        return await self._lanes.run(len(body), plan_request, kind, body, self._limits)

    def _priority_of(self, plan: Plan) -> int:
        sign = -1 if self._config.low_priority_values_first else 1
        return clamped_priority(sign * plan.priority)

    async def _answer(self, exchange: _Exchange) -> Answer | None:
        plan = exchange.plan
        if plan.stream:
            await self._stream(exchange)
            await exchange.downstream.finish()
            return None
        if plan.single:
            pair = await self._run_unit(exchange, plan.units[0], None)
            return Answer(pair.status, await self._body_of(plan, pair, 0), pair.content_type)
        answers: list[Body] = [b""] * len(plan.units)
        engines = [""] * len(plan.units)

        async def run(unit: Unit) -> None:
            # Thousands of answers may be kept, so nothing else of their pairs is.
            pair = await self._run_unit(exchange, unit, None)
            answers[unit.index] = await self._body_of(plan, pair, unit.index)
            engines[unit.index] = pair.request.decode

        await self._run_all(exchange, run)
        size = sum(map(len, answers))
        try:
            if size <= _QUICK_BYTES:
                merged = merge_answers(plan, answers)
            else:
                merged = await self._lanes.run(size, merge_answers, plan, answers)
        except NoAnswer as error:
            raise _no_answer(engines[error.args[0]]) from error
        return Answer(200, await _joined(merged), "application/json")

    # Edits of complete answers and stream events ----------------------------------------------

    async def _body_of(self, plan: Plan, pair: Pair, position: int) -> Body:
        if not self._needs_edit(plan):
            return pair.body
        parts = opened_in_parts(pair.body)
        try:
            while True:
                await self._spaced(len(pair.body))
                next(parts)
        except StopIteration as over:
            answer = over.value
        except JsonError as error:
            raise _no_answer(pair.request.decode) from error
        try:
            if pair.prefill_reply is not None:
                await self._spaced(len(pair.body) + pair.prefill_reply.size_bytes)
            return await _joined(dumped_pieces(self._edited(plan, pair, answer, position)))
        except JsonError as error:
            raise _no_answer(pair.request.prefill, "prefill") from error

    async def _spaced(self, size_bytes: int) -> None:
        """Wait until a piece of work on so many bytes may be done."""
        if size_bytes > SHORT_BYTES:
            await asyncio.sleep(self._pace.wait_s(size_bytes))

    @staticmethod
    def _needs_edit(plan: Plan) -> bool:
        return plan.merge_logprobs or bool(plan.client_rids)

    @staticmethod
    def _edited(
        plan: Plan, pair: Pair, output: dict[str, Any], position: int, *, first: bool = True
    ) -> dict[str, Any]:
        """``first``: a whole answer, or the first event of a stream."""
        if plan.merge_logprobs and pair.prefill_reply is not None:
            if plan.kind == "generate":
                merge_input_logprobs(output, pair.prefill_reply.body)
            elif first:
                merge_echoed_logprobs(output, pair.prefill_reply.body)
        client_rid = plan.client_rid(position)
        if client_rid is not None:
            restore_rid(output, pair.rid, client_rid)
        return output

    async def _stream(self, exchange: _Exchange) -> None:
        plan, downstream = exchange.plan, exchange.downstream
        if plan.single and not self._needs_edit(plan):
            await self._run_unit(exchange, plan.units[0], lambda: downstream.push)
            return
        merger = StreamMerger(plan, plan.client_rid(0) or uuid.uuid4().hex)

        def sink_of(unit: Unit) -> Callable[[], Callable[[bytes], None]]:
            begun = False

            def transform(event: dict[str, Any]) -> bytes | None:
                nonlocal begun
                pair = exchange.pairs[unit.index]
                edited = self._edited(plan, pair, event, unit.index, first=not begun)
                begun = True
                return sse(edited) if plan.single else merger.event(unit, edited)

            return lambda: event_sink(transform, downstream.push)

        async def run(unit: Unit) -> None:
            await self._run_unit(exchange, unit, sink_of(unit))

        await self._run_all(exchange, run)
        downstream.push(merger.end())

    # Units ------------------------------------------------------------------------------------

    async def _run_all(
        self, exchange: _Exchange, run: Callable[[Unit], Coroutine[Any, Any, None]]
    ) -> None:
        """All units side by side; the first failure ends the others."""
        units = exchange.plan.units
        if len(units) == 1:
            await run(units[0])
            return
        failed: list[BaseException] = []
        running: set[asyncio.Task[None]] = set()

        async def until_over(unit: Unit) -> None:
            try:
                await run(unit)
            except Exception as error:
                failed.append(error)  # before anybody gets the place that it leaves
                exchange.window.release()  # if a place is waited for, that is over
                raise

        def over(task: asyncio.Task[None]) -> None:
            running.discard(task)
            if not task.cancelled():
                task.exception()  # it is known already

        try:
            for unit in units:
                await exchange.go_ahead(unit.index)
                if not failed:
                    await self._turns.take(id(exchange))
                if failed:
                    break
                task = asyncio.create_task(until_over(unit))
                running.add(task)
                task.add_done_callback(over)
            if running and not failed:
                await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await self._end(exchange, running)
        if failed:
            raise next((e for e in failed if isinstance(e, RouterError)), failed[0])

    async def _end(self, exchange: _Exchange, tasks: Collection[asyncio.Task[Any]]) -> None:
        """End units and wait for that; a few at a time, for what each leaves behind takes time."""
        left = [task for task in tasks if not task.done()]
        try:
            for task in left:
                await self._turns.take(id(exchange))
                task.cancel()
            if left:
                await asyncio.wait(left)
        except asyncio.CancelledError:
            for task in left:
                task.cancel()
            raise

    async def _run_unit(
        self,
        exchange: _Exchange,
        unit: Unit,
        make_sink: Callable[[], Callable[[bytes], None]] | None,
    ) -> Pair:
        """One unit to its end, retried while none of its bytes left. Raises: RouterError."""
        try:
            return await self._retried(exchange, unit, make_sink)
        finally:
            self._blame(exchange, unit, served=False)
            exchange.prefilled(unit.index)
            exchange.pairs.pop(unit.index, None)

    def _blame(self, exchange: _Exchange, unit: Unit, *, served: bool) -> None:
        """For answers of 5xx. When two engines gave one and none served the request, it may be
        what they cannot do: a few such requests must not take every engine out. Where only one was
        asked (without retries, or its client left), it depends on the others' failures."""
        suspects = exchange.suspects.pop(unit.index, [])
        alone = len({failure.worker for failure in suspects}) == 1
        now_s = time.monotonic()
        for failure in suspects:
            role, engine = failure.leg, failure.worker
            if served or (alone and self._suspicions.against(role, engine, now_s)):
                self._registry.leg_failed(failure)

    async def _retried(
        self,
        exchange: _Exchange,
        unit: Unit,
        make_sink: Callable[[], Callable[[bytes], None]] | None,
    ) -> Pair:
        exclude: tuple[str, ...] = ()
        attempt = 1
        broken_off: set[str] = set()
        while True:
            try:
                return await self._attempt(exchange, unit, exclude, make_sink)
            except LegFailure as failure:
                if failure.transport:
                    self._registry.leg_failed(failure)
                elif failure.counts_against_worker:
                    exchange.suspects.setdefault(unit.index, []).append(failure)
                self._metrics.leg_failed(failure)
                started = unit.index in exchange.pairs and exchange.pairs[unit.index].opened
                if failure.broke_off:
                    broken_off.add(failure.worker)
                harmful = len(broken_off) >= _MOST_BROKEN_OFF
                last = attempt >= self._config.max_attempts or harmful
                if started or not failure.retryable or last:
                    if last and failure.retryable and not started:
                        self._metrics.gave_up(failure, exchange.path)
                        if harmful:
                            logger.warning(
                                "%s: %s went away under it: not sent to another engine",
                                exchange.request_id,
                                " and ".join(sorted(broken_off)),
                            )
                    raise
                exclude = tuple(dict.fromkeys((*exclude, failure.worker)))
                self._metrics.retried(failure, exchange.path)
                logger.info(
                    "%s: attempt %d failed (%s), retrying", exchange.request_id, attempt, failure
                )
            await asyncio.sleep(self._backoff_s(attempt))
            attempt += 1

    def _backoff_s(self, attempt: int) -> float:
        config = self._config
        base_s = config.initial_backoff_s * config.backoff_multiplier ** (attempt - 1)
        jitter = 1 + config.jitter_factor * random.uniform(-1, 1)
        return min(base_s, config.max_backoff_s) * jitter

    async def _attempt(
        self,
        exchange: _Exchange,
        unit: Unit,
        exclude: tuple[str, ...],
        make_sink: Callable[[], Callable[[bytes], None]] | None,
    ) -> Pair:
        rid = uuid.uuid4().hex
        if self._config.sends_gangs:
            rid = SIZED_RID_PREFIX + rid
        prompt = exchange.prompts[unit.prompt_index]
        slo_s = exchange.asked.ttft_slo_s
        self._in_flight.announce(
            rid,
            prompt.length,
            class_of(exchange.priority),
            slo_s,
            partial(exchange.prefilled, unit.index),
        )
        outcome: Outcome = "failed"
        pair: Pair | None = None
        try:
            assignment = await self._dispatcher.assign(
                rid,
                prompt_tokens=prompt.length.tokens,
                estimated=not prompt.length.exact,
                max_new_tokens=unit.max_new_tokens,
                exclude=exclude,
                blocks=prompt.blocks.tolist(),
                block_tokens=prompt.block_tokens,
                session=exchange.session,
                priority=exchange.priority,
                ttft_slo_s=exchange.asked.ttft_slo_s,
                tenant=exchange.asked.tenant,
            )
            self._in_flight.assigned(assignment)
            if len(exchange.plan.units) > 1:  # a policy may let go of hundreds at once
                await self._turns.take(id(exchange))
            pair = self._start(exchange, unit, assignment, make_sink)
            await pair.wait_open()
            self._blame(exchange, unit, served=True)
            if exchange.plan.stream:
                await exchange.downstream.open(pair.content_type)
                await pair.wait_done()
            outcome = "failed" if pair.engine_failed else "completed"
            if outcome == "completed":
                for role, engine in (
                    ("prefill", assignment.prefill),
                    ("decode", assignment.decode),
                ):
                    self._registry.leg_succeeded(engine)
                    self._suspicions.served(role, engine)
            return pair
        except (asyncio.CancelledError, ConnectionResetError):
            outcome = "aborted"  # the client is gone
            raise
        finally:
            if pair is not None:
                if outcome != "completed":
                    pair.abort()
                self._dispatcher.ended(rid, outcome, pair.completion_tokens)
            else:
                self._dispatcher.ended(rid, outcome)
            self._in_flight.ended(rid, outcome)

    def _start(
        self,
        exchange: _Exchange,
        unit: Unit,
        assignment: Assignment,
        make_sink: Callable[[], Callable[[bytes], None]] | None,
    ) -> Pair:
        """Send both legs, in this very callback where connections are at hand."""
        prefill = self._registry.get(assignment.prefill)
        decode = self._registry.get(assignment.decode)
        if prefill is None or decode is None:
            gone = assignment.prefill if prefill is None else assignment.decode
            leg: Leg = "prefill" if prefill is None else "decode"
            raise LegFailure(leg, gone, 503, f"{leg}_unavailable", f"worker {gone} was removed")
        for worker, rank in (
            (prefill, assignment.prefill_rank),
            (decode, assignment.decode_rank),
        ):
            if worker.info is None:  # its engine was started anew since it was chosen
                why = f"{worker.url} has been restarted"
                raise LegFailure(worker.role, worker.url, 503, f"{worker.role}_unavailable", why)
            if not 0 <= rank < worker.dp_size:
                raise RouterError(
                    500,
                    "rank_out_of_range",
                    f"DP rank {rank} of {worker.url} is outside [0, {worker.dp_size})",
                )
        gang = (assignment.gang or _alone()) if self._config.sends_gangs else None
        ranks = (assignment.prefill_rank, prefill.dp_size)
        if decode.rank_choice == "by_room":
            room = pick_bootstrap_room(*ranks, assignment.decode_rank, decode.dp_size, gang=gang)
        else:
            room = pick_bootstrap_room(*ranks, gang=gang)
        fields = LegFields(
            rid=assignment.rid,
            bootstrap_host=prefill.bootstrap_host,
            bootstrap_port=prefill.bootstrap_port,
            bootstrap_room=room,
            prefill_rank=assignment.prefill_rank,
            decode_rank=assignment.decode_rank,
            prefill_coupled=prefill.coupled,
            decode_coupled=decode.coupled,
        )
        plan = exchange.plan
        ids_json = exchange.prompts[unit.prompt_index].ids_json
        if ids_json and not self._tokenizers.may_get_ids(plan.kind, prefill, decode):
            ids_json = None
        self.sent_as_ids += ids_json is not None
        details = prefill.info is not None and prefill.info.cached_details
        asks_cached = details and plan.may_ask_cached
        prefill_body, decode_body = leg_bodies(
            unit, plan, fields, ids_json, asks_cached=asks_cached
        )
        # What is edited may turn out to be unreadable: its first event decides on the status.
        plain = plan.stream and plan.single and not self._needs_edit(plan)
        pair = Pair(
            self._pool,
            PairRequest(
                rid=assignment.rid,
                prefill=prefill.url,
                decode=decode.url,
                prefill_origin=prefill.url_of(assignment.prefill_rank),
                decode_origin=decode.url_of(assignment.decode_rank),
                path=exchange.path,
                headers=exchange.headers,
                prefill_body=prefill_body,
                decode_body=decode_body,
                stream=plan.stream,
                needs_prefill_reply=plan.merge_logprobs,
                asks_cached=asks_cached,
            ),
            self._in_flight,
            self._in_flight.aborts.send,
            make_sink() if make_sink is not None else None,
            exchange.downstream.open_at_once if plain else None,
            self._pace,
        )
        exchange.pairs[unit.index] = pair
        self._in_flight.started(assignment, pair, prefill, decode)
        logger.debug(
            "%s: rid %s to %s rank %d and %s rank %d after %.1f ms: %s",
            exchange.request_id,
            assignment.rid,
            assignment.prefill,
            assignment.prefill_rank,
            assignment.decode,
            assignment.decode_rank,
            assignment.held_s * 1000,
            assignment.reason,
        )
        return pair


async def _joined(pieces: Sequence[bytes | memoryview]) -> Body:
    """In slices: to copy a large answer at once would take long."""
    if sum(map(len, pieces)) <= _JOINED_BYTES:
        return b"".join(pieces)
    whole = bytearray()
    due = _JOINED_BYTES
    for piece in pieces:
        view = memoryview(piece)
        for at in range(0, len(view), _JOINED_BYTES):
            whole += view[at : at + _JOINED_BYTES]
            if len(whole) >= due:
                due = len(whole) + _JOINED_BYTES
                await asyncio.sleep(0)
    return whole


def _aborted() -> RouterError:
    return RouterError(499, "request_aborted", "aborted by /abort_request or the router's end")


def _no_answer(engine: str, role: Leg = "decode") -> LegFailure:
    message = "the reply is not a JSON object as SGLang's"
    return transport_failure(role, engine, message, unreachable=False)


def _alone() -> GangPart:
    """Of a request that nobody told what it is sent with."""
    return GangPart(tag=random.getrandbits(TAG_BITS), members=1, ranks=1)
