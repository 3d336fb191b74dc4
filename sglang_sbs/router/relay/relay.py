"""Serves a client request: plans it, runs its units concurrently and merges their responses.
:mod:`.attempts` runs each unit, :mod:`.merged_answers` handles the JSON."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from sglang_sbs.router.client.answer_stream import Downstream, joined
from sglang_sbs.router.client.intake import Bodies, BodyShare
from sglang_sbs.router.errors import Leg, LegFailure, RouterError, transport_failure, without_frames
from sglang_sbs.router.lanes import Lanes
from sglang_sbs.router.options.config import RelayConfig
from sglang_sbs.router.prompts.reader import PromptReader
from sglang_sbs.router.relay import merged_answers
from sglang_sbs.router.relay.admission import Admission
from sglang_sbs.router.relay.answer_kinds import ANSWER_KINDS
from sglang_sbs.router.relay.attempts import Attempts
from sglang_sbs.router.relay.engine_json import (
    SHORT_BYTES,
    dumped_pieces,
    opened,
    opened_in_parts,
)
from sglang_sbs.router.relay.event_reader import Payload
from sglang_sbs.router.relay.in_flight import Exchange, InFlight
from sglang_sbs.router.relay.leg_answers import Body
from sglang_sbs.router.relay.pair import Pair
from sglang_sbs.router.requests.headers import RouterHeaders
from sglang_sbs.router.requests.plan import RequestPlan, RouteKind, plan_request
from sglang_sbs.router.requests.raw_json import JsonError
from sglang_sbs.router.requests.sessions import digest_of
from sglang_sbs.router.shared_timer import SharedTimer
from sglang_sbs.router.telemetry.metrics import RouterMetrics
from sglang_sbs.scheduling.queue.priority import clamped_priority

logger = logging.getLogger(__name__)

MOST_AHEAD = 256
"""Units of one client request that may wait for prefill at once; further ones start as these have
passed prefill or ended."""
_QUICK_BYTES = 32 << 10
_QUICK_VALUES = 512
"""Request bodies up to ``_QUICK_BYTES`` with at most this many commas are parsed on the event loop,
where they cost less than in a thread."""


@dataclass(eq=False, repr=False)
class Relay:
    config: RelayConfig
    attempts: Attempts
    prompts: PromptReader
    metrics: RouterMetrics
    admission: Admission
    in_flight: InFlight
    lanes: Lanes

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.config.max_bodies_bytes, self.config.pace)
        self._timeouts = SharedTimer(self.config.request_timeout_s, self._time_out)
        self._late: set[asyncio.Task[Any]] = set()
        """Tasks of client requests that were cancelled because of the request timeout."""

    async def handle(
        self,
        request: web.Request,
        kind: RouteKind,
        headers: bytes,
        request_id: str,
        asked: RouterHeaders,
    ) -> web.StreamResponse:
        """Serve one client request; a stream is already sent on return. ``headers`` go to both
        legs.
        Raises: RouterError, while nothing has been sent to the client; asyncio.CancelledError, the
        client is gone and both legs are aborted."""
        task = asyncio.current_task()
        assert task is not None
        began_s = time.monotonic()
        # Count it from the first byte: shutdown waits for requests whose body is incomplete.
        self.in_flight.on_begun(task)
        try:
            with self.bodies.share() as share:
                plan = await self._plan(kind, request, share)
                self.in_flight.record_ids(task, plan.client_rids)
                remember, ids = self.in_flight.recent.begin, plan.client_rids
                recent = remember(request_id, kind, began_s, len(plan.units), ids)
                # Admit first: tokenizing a request that gets a 429 would be wasted.
                async with self.admission.slot(len(plan.units)):
                    prompts = await self.prompts.read(plan)
                    plan.forget_values()
                    sign = -1 if self.config.low_priority_values_first else 1
                    pairs: dict[int, Pair] = {}
                    exchange = Exchange(
                        headers=headers,
                        request_id=request_id,
                        asked=asked,
                        downstream=Downstream(request, pairs, self.config.pace),
                        pairs=pairs,
                        plan=plan,
                        prompts=prompts,
                        session=digest_of(asked.session or plan.session or asked.correlation),
                        priority=clamped_priority(sign * plan.priority),
                        recent=recent,
                    )
                    return await self._serve(exchange, task)
        except (RouterError, ConnectionError, asyncio.CancelledError) as error:
            if not self._ended_here(error, task):
                raise without_frames(error) from None
        finally:
            self.in_flight.over(task)
        raise _aborted()

    def _ended_here(self, error: BaseException, task: asyncio.Task[Any]) -> bool:
        """True if we cancelled the task ourselves (abort by id, or shutdown). The cancellation is
        undone so that the client still gets a response."""
        ended = isinstance(error, asyncio.CancelledError) and self.in_flight.was_aborted(task)
        if ended:
            task.uncancel()
        return ended

    async def _serve(self, exchange: Exchange, task: asyncio.Task[Any]) -> web.StreamResponse:
        downstream = exchange.downstream
        self._timeouts.add(task)
        try:
            return await self._answer(exchange)
        except RouterError as caught:
            error = caught
        except asyncio.CancelledError as cancelled:
            if task in self._late:
                error = _timed_out(self.config.request_timeout_s)
            elif self._ended_here(cancelled, task):
                error = _aborted()
            else:
                raise
        except ConnectionError:
            raise  # the client is gone
        except Exception:
            if downstream.response is None:
                raise
            logger.exception("%s: the stream broke here", exchange.request_id)
            error = RouterError(500, "internal_error", "internal error in the router")
        finally:
            self._timeouts.discard(task)
            if task in self._late:
                self._late.remove(task)
                task.uncancel()
        if downstream.response is None:
            raise error
        style = ANSWER_KINDS[exchange.plan.kind].error_style
        downstream.push(without_frames(error).sse_event(style))
        self.metrics.broken_streams.labels(error.code).inc()
        return await downstream.finish()

    def _time_out(self, task: asyncio.Task[Any]) -> None:
        self._late.add(task)
        task.cancel()

    async def _plan(self, kind: RouteKind, request: web.Request, share: BodyShare) -> RequestPlan:
        config, refused = self.config, self.prompts.engines.known().refused
        body = await share.read(request, config.max_payload_bytes, " (--max-payload-size)")
        if len(body) <= _QUICK_BYTES and body.count(b",") <= _QUICK_VALUES:
            return plan_request(kind, body, config, refused)
        return await self.lanes.run(len(body), plan_request, kind, body, config, refused)

    async def _answer(self, exchange: Exchange) -> web.StreamResponse:
        plan = exchange.plan
        if plan.stream:
            await self._stream(exchange)
            return await exchange.downstream.finish()
        if plan.single:
            pair = await self.attempts.run(exchange, 0)
            body = await self._body_of(plan, pair)
            headers = {"Content-Type": pair.content_type}
            return web.Response(status=pair.status, body=body, headers=headers)
        answers: list[Body] = [b""] * len(plan.units)
        engines = [""] * len(plan.units)

        async def run(unit: int) -> None:
            # Keep only the responses: there may be thousands of units.
            pair = await self.attempts.run(exchange, unit)
            answers[unit] = await self._body_of(plan, pair)
            engines[unit] = pair.decode

        await self._run_all(exchange, run)
        size = sum(map(len, answers))
        try:
            if size <= _QUICK_BYTES:
                merged = merged_answers.merge_answers(plan, answers)
            else:
                merged = await self.lanes.run(size, merged_answers.merge_answers, plan, answers)
        except merged_answers.NoAnswer as error:
            raise _no_answer(engines[error.args[0]]) from error
        return web.Response(body=await joined(merged), content_type="application/json")

    async def _body_of(self, plan: RequestPlan, pair: Pair) -> Body:
        if not plan.edits_answers:
            return pair.body
        parts = opened_in_parts(pair.body)
        try:
            while True:
                await self._spaced(len(pair.body))
                next(parts)
        except StopIteration as over:
            answer = over.value
        except JsonError as error:
            raise _no_answer(pair.decode) from error
        try:
            if pair.prefill_reply is not None:
                await self._spaced(len(pair.body) + pair.prefill_reply.size_bytes)
            return await joined(dumped_pieces(self._edited(plan, pair, answer)))
        except JsonError as error:
            raise _no_answer(pair.prefill, "prefill") from error

    async def _spaced(self, size_bytes: int) -> None:
        """Wait until it is the turn of a parsing step on this many bytes; short ones never wait."""
        if size_bytes > SHORT_BYTES:
            await asyncio.sleep(self.in_flight.pace.wait_s(size_bytes))

    @staticmethod
    def _edited(
        plan: RequestPlan, pair: Pair, output: dict[str, Any], *, first: bool = True
    ) -> dict[str, Any]:
        """Merge prefill's logprobs into a response or event, restore the client's rid, and return
        it. ``first``: it is a whole response or a stream's first event."""
        if plan.merge_logprobs and pair.prefill_reply is not None:
            if plan.kind == "generate":
                merged_answers.merge_input_logprobs(output, pair.prefill_reply.body)
            elif first:
                merged_answers.merge_echoed_logprobs(output, pair.prefill_reply.body)
        client_rid = plan.client_rid(pair.unit)
        if client_rid is not None:
            merged_answers.restore_rid(output, pair.rid, client_rid)
        return output

    async def _stream(self, exchange: Exchange) -> None:
        plan, downstream = exchange.plan, exchange.downstream
        if plan.single and not plan.edits_answers:
            exchange.make_sink = lambda _pair: downstream.push
            await self.attempts.run(exchange, 0)
            return
        answer_id = plan.client_rid(0) or uuid.uuid4().hex
        self.in_flight.recent.record_id(exchange.recent, answer_id)
        merger = merged_answers.StreamMerger(plan, answer_id)

        def make_sink(pair: Pair) -> Callable[[Payload], None]:
            begun = False

            def sink(data: Payload) -> None:
                nonlocal begun
                edited = self._edited(plan, pair, opened(data), first=not begun)
                begun = True
                for piece in merger.event(pair.unit, edited):
                    downstream.push(piece)

            return sink

        exchange.make_sink, exchange.edits_events = make_sink, True
        await self._run_all(exchange, partial(self.attempts.run, exchange))
        downstream.push(merger.end())

    async def _run_all(
        self, exchange: Exchange, run: Callable[[int], Coroutine[Any, Any, object]]
    ) -> None:
        """Run all units concurrently. The first failure cancels the others and is raised."""
        if len(exchange.plan.units) == 1:
            await run(0)
            return
        exchange.window = window = asyncio.Semaphore(MOST_AHEAD)
        failed: list[BaseException] = []
        running: set[asyncio.Task[None]] = set()

        async def until_over(unit: int) -> None:
            try:
                await run(unit)
            except Exception as error:
                failed.append(without_frames(error))  # before its place is taken
                exchange.ending = True
                window.release()  # wake the loop if it waits for a place
                raise

        def over(task: asyncio.Task[None]) -> None:
            running.discard(task)
            if not task.cancelled():
                task.exception()  # retrieve it, so that asyncio does not log it

        try:
            for unit in exchange.plan.units:
                await window.acquire()
                if not failed:
                    await self.attempts.turns.take(id(exchange))
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
            error = next((e for e in failed if isinstance(e, RouterError)), failed[0])
            failed.clear()  # avoid a reference cycle through frames
            raise error

    async def _end(self, exchange: Exchange, tasks: Collection[asyncio.Task[Any]]) -> None:
        """Cancel the units' tasks, a few per event-loop turn as each cleans up, and await them."""
        exchange.ending = True
        left = [task for task in tasks if not task.done()]
        try:
            for task in left:
                await self.attempts.turns.take(id(exchange))
                task.cancel()
            if left:
                await asyncio.wait(left)
        except asyncio.CancelledError:
            for task in left:
                task.cancel()
            raise


def _aborted() -> RouterError:
    return RouterError(
        499, "request_aborted", "aborted by /abort_request or by the router's shutdown"
    )


def _timed_out(limit_s: float) -> RouterError:
    message = f"no complete answer within {limit_s:g} s (--request-timeout-secs)"
    return RouterError(504, "request_timeout", message)


def _no_answer(engine: str, role: Leg = "decode") -> LegFailure:
    message = "the reply is not a JSON object like SGLang's"
    return transport_failure(role, engine, message)
