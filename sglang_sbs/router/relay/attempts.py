"""One unit of a client request: assigned, sent, and tried again on other engines if it failed.

Owns the attempts at a unit, and which engine is to blame for one that failed. Choosing instances is
the dispatcher's, the legs are :mod:`.pair`'s. Every attempt announced to the scheduler ends there
exactly once, whatever happens here.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable
from functools import partial

from sglang_sbs.router.assignment.dispatcher import Assigner, Assignment
from sglang_sbs.router.engines.connection_pool import Pool
from sglang_sbs.router.errors import Leg, LegFailure, RouterError, without_frames
from sglang_sbs.router.lanes import Pace, Turns
from sglang_sbs.router.options.config import RelayConfig
from sglang_sbs.router.prompts.tokenizer_check import EngineTokenizers
from sglang_sbs.router.relay.exchange import Exchange
from sglang_sbs.router.relay.in_flight import InFlight
from sglang_sbs.router.relay.pair import Pair, PairRequest
from sglang_sbs.router.requests.legs import LegFields, leg_bodies
from sglang_sbs.router.requests.plan import Unit
from sglang_sbs.router.telemetry.metrics import RouterMetrics
from sglang_sbs.router.workers.breaker import Suspicions
from sglang_sbs.router.workers.rank_contract import pick_bootstrap_room
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.scheduling.events import Outcome
from sglang_sbs.scheduling.queue.priority import class_of
from sglang_sbs.wire.gangs import SIZED_RID_PREFIX, TAG_BITS, GangPart

logger = logging.getLogger(__name__)

_MOST_BROKEN_OFF = 2
"""Engines that may go away under a request before it is no longer tried on others: it may be what
ends them, and then it must not end them all."""
_AT_ONCE = 4
"""Units of batches that begin, are sent or end in one turn of the event loop."""

MakeSink = Callable[[], Callable[[bytes], None]]
"""Makes, for each attempt, what takes decode's stream."""


class Attempts:
    """Of all client requests: :meth:`run` takes one of their units to its end."""

    def __init__(
        self,
        config: RelayConfig,
        *,
        registry: Registry,
        dispatcher: Assigner,
        pool: Pool,
        tokenizers: EngineTokenizers,
        metrics: RouterMetrics,
        in_flight: InFlight,
    ) -> None:
        self._config = config
        self._registry = registry
        self._dispatcher = dispatcher
        self._pool = pool
        self._tokenizers = tokenizers
        self._metrics = metrics
        self._in_flight = in_flight
        self._suspicions = Suspicions()
        self.sent_as_ids = 0
        """Attempts whose engines got token ids in place of text."""
        self.pace = Pace()
        """Of work on long answers."""
        self.turns = Turns(_AT_ONCE)
        """Of batches, whose units begin, are sent and end a few at a time."""

    async def run(
        self,
        exchange: Exchange,
        unit: Unit,
        make_sink: MakeSink | None,
    ) -> Pair:
        """One unit to its end, retried while none of its bytes left. Raises: RouterError."""
        try:
            return await self._retried(exchange, unit, make_sink)
        finally:
            self._blame(exchange, unit, served=False)
            exchange.prefilled(unit.index)
            exchange.pairs.pop(unit.index, None)

    def _blame(self, exchange: Exchange, unit: Unit, *, served: bool) -> None:
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
        exchange: Exchange,
        unit: Unit,
        make_sink: MakeSink | None,
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
                without_frames(failure)
                exclude = tuple(dict.fromkeys((*exclude, failure.worker)))
                self._metrics.retried(failure, exchange.path)
                logger.info(
                    "%s: attempt %d failed (%s), retrying", exchange.request_id, attempt, failure
                )
            backoff_s = self._backoff_s(attempt)
            self._metrics.backs_off(attempt, backoff_s)
            await asyncio.sleep(backoff_s)
            attempt += 1

    def _backoff_s(self, attempt: int) -> float:
        config = self._config
        base_s = config.initial_backoff_s * config.backoff_multiplier ** (attempt - 1)
        jitter = 1 + config.jitter_factor * random.uniform(-1, 1)
        return min(base_s, config.max_backoff_s) * jitter

    async def _attempt(
        self,
        exchange: Exchange,
        unit: Unit,
        exclude: tuple[str, ...],
        make_sink: MakeSink | None,
    ) -> Pair:
        rid = uuid.uuid4().hex
        if self._config.sends_gangs:
            rid = SIZED_RID_PREFIX + rid
        self._in_flight.announce(
            rid,
            exchange.prompts[unit.prompt_index].length,
            class_of(exchange.priority),
            exchange.asked.ttft_slo_s,
            partial(exchange.prefilled, unit.index),
            exchange.session,
        )
        outcome: Outcome = "failed"
        pair: Pair | None = None
        try:
            assignment = await self._assign(exchange, unit, rid, exclude)
            self._in_flight.assigned(assignment)
            if len(exchange.plan.units) > 1:  # a policy may let go of hundreds at once
                await self.turns.take(id(exchange))
            if exchange.ending:
                raise asyncio.CancelledError
            pair = self._start(exchange, unit, assignment, make_sink)
            await pair.wait_open()
            self._blame(exchange, unit, served=True)
            if exchange.plan.stream:
                await exchange.downstream.open(pair.content_type)
                await pair.wait_done()
            outcome = "failed" if pair.engine_failed else "completed"
            if outcome == "completed":
                self._served(assignment)
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

    async def _assign(
        self, exchange: Exchange, unit: Unit, rid: str, exclude: tuple[str, ...]
    ) -> Assignment:
        prompt = exchange.prompts[unit.prompt_index]
        return await self._dispatcher.assign(
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

    def _served(self, assignment: Assignment) -> None:
        """Both engines did what was asked of them."""
        for role, engine in (("prefill", assignment.prefill), ("decode", assignment.decode)):
            self._registry.leg_succeeded(engine)
            self._suspicions.served(role, engine)

    def _start(
        self,
        exchange: Exchange,
        unit: Unit,
        assignment: Assignment,
        make_sink: MakeSink | None,
    ) -> Pair:
        """Send both legs, in this very callback where connections are at hand."""
        prefill, decode = self._workers_of(assignment)
        request = self._request(exchange, unit, assignment, prefill, decode)
        pair = Pair(
            self._pool,
            request,
            self._in_flight,
            self._in_flight.aborts.send,
            make_sink() if make_sink is not None else None,
            self.pace,
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

    def _workers_of(self, assignment: Assignment) -> tuple[Worker, Worker]:
        """Prefill's and decode's. Raises: LegFailure, RouterError: it cannot be sent there now."""
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
        return prefill, decode

    def _request(
        self,
        exchange: Exchange,
        unit: Unit,
        assignment: Assignment,
        prefill: Worker,
        decode: Worker,
    ) -> PairRequest:
        """What both legs get."""
        fields = LegFields(
            rid=assignment.rid,
            bootstrap_host=prefill.bootstrap_host,
            bootstrap_port=prefill.bootstrap_port,
            bootstrap_room=self._room(assignment, prefill, decode),
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
        return PairRequest(
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
        )

    def _room(self, assignment: Assignment, prefill: Worker, decode: Worker) -> int:
        """A bootstrap room by which engines know their ranks."""
        gang = (assignment.gang or _alone()) if self._config.sends_gangs else None
        ranks = (assignment.prefill_rank, prefill.dp_size)
        if decode.rank_choice == "by_room":
            return pick_bootstrap_room(*ranks, assignment.decode_rank, decode.dp_size, gang=gang)
        return pick_bootstrap_room(*ranks, gang=gang)


def _alone() -> GangPart:
    """Of a request that nobody told what it is sent with."""
    return GangPart(tag=random.getrandbits(TAG_BITS), members=1, ranks=1)
