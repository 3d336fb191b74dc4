"""Runs one unit (one prompt and sample) of a client request: submits it to the scheduler, sends it
to the selected engines, and retries it on others. The end of every submitted attempt is reported to
the scheduler exactly once."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_sbs.router.dispatch.dispatcher import Dispatcher
from sglang_sbs.router.errors import Leg, LegFailure, RouterError, without_frames
from sglang_sbs.router.lanes import LoopTurns
from sglang_sbs.router.options.config import RelayConfig
from sglang_sbs.router.prompts.tokenizer_check import EngineTokenizers
from sglang_sbs.router.relay.in_flight import Attempt, Exchange, InFlight, UnitRun
from sglang_sbs.router.relay.pair import Pair
from sglang_sbs.router.relay.time_split import HEADER, server_timing, split_of
from sglang_sbs.router.requests.plan import CONVERTED, PATHS, RouteKind, leg_bodies
from sglang_sbs.router.telemetry.metrics import RouterMetrics
from sglang_sbs.router.workers.breaker import Suspicions
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import takes_converted
from sglang_sbs.router.workers.worker import AttemptWorkers, Worker
from sglang_sbs.scheduling.events import Dispatch, Outcome, RequestArrived
from sglang_sbs.wire.gangs import (
    RESPONSE_RID_PREFIX,
    SIZED_RID_PREFIX,
    TAG_BITS,
    GangPart,
    is_sized,
)

logger = logging.getLogger(__name__)

_MOST_BROKEN_OFF = 2
"""Number of engines that may drop the connection during a request before it is no longer retried.
The request may be crashing them, and must not reach them all."""
_AT_ONCE = 4
"""Units of multi-unit requests that are started, sent or cancelled per turn of the event loop."""


# SGLang fault: refused-room-stays
def _time_to_refuse_s(failure: LegFailure, least_s: float, most_s: float) -> float:
    """Return how many seconds the next attempt waits for a refusal by prefill before it sends
    decode's request; 0 unless prefill has just refused. A decode engine contacts prefill at once,
    and its state there is never freed if prefill refuses the request (SGLang's
    ``disaggregation/mooncake/conn.py``, ``transfer_infos``; sglang #39428).

    No response shows that prefill has accepted a request: prefill responds at the end, which needs
    decode, and EndForward lists a request only after decode's contact. So the wait is twice the
    time of the last refusal, because the same cause leads to a refusal after a similar time."""
    if failure.leg != "prefill" or failure.after_s is None:
        return 0.0
    return min(max(2 * failure.after_s, least_s), most_s)


def _avoided(run: UnitRun, failure: LegFailure) -> list[str]:
    """Return the engines that further attempts avoid because of a failure: the one that failed,
    and the attempt's other engine if it took part in an earlier one. An engine whose KV transfers
    fail lets its partners report it, looks idle, and would be chosen again and again."""
    partner = failure.partner
    if failure.transport or not partner:
        return [failure.worker]
    avoided = [failure.worker, *([partner] if partner in run.partners else [])]
    run.partners.add(partner)
    return avoided


def _at_fault(failure: LegFailure, failures: Sequence[LegFailure], served: Pair) -> LegFailure:
    """Return one of a unit's ``failures``, as one of the engine that probably caused it. That is
    the attempt's other engine if it was not in the pair that ``served`` the unit, and the engine
    that failed was, or took part in fewer failures."""
    serving, engine, partner = (served.prefill, served.decode), failure.worker, failure.partner
    if not partner or partner in serving:
        return failure
    took_part = Counter(url for each in failures for url in (each.worker, each.partner))
    cleared = engine in serving or took_part[engine] < took_part[partner]
    return failure.against_partner() if cleared else failure


@dataclass(eq=False, repr=False)
class Attempts:
    """Runs the units of all client requests; :meth:`run` handles one unit."""

    config: RelayConfig
    registry: Registry
    dispatcher: Dispatcher
    tokenizers: EngineTokenizers
    metrics: RouterMetrics
    in_flight: InFlight
    sends_gangs: bool = False
    """Mark rids and bootstrap rooms with the request's batch, for the engines' batch gate."""
    sent_as_ids: int = 0
    """Number of attempts whose engines received token ids instead of text."""
    turns: LoopTurns = field(default_factory=lambda: LoopTurns(_AT_ONCE))
    """Limits how many units of multi-unit requests start, are sent or end per event-loop turn."""
    _suspicions: Suspicions = field(default_factory=Suspicions)

    async def run(self, exchange: Exchange, unit: int) -> Pair:
        """Run one unit and return its successful pair; a stream is complete by then. Retry while
        none of the response has been sent. Raises: RouterError, the last attempt failed."""
        run = UnitRun(exchange, unit, exclude=self._unfit(exchange))
        try:
            return await self._retried(run)
        finally:
            self._blame(run, None)
            run.on_prefilled()
            exchange.pairs.pop(unit, None)

    def _unfit(self, exchange: Exchange) -> tuple[str, ...]:
        """Return URLs of engines too old for the request's API. The scheduler selects one only if
        no other is left; :meth:`_placement` then refuses it."""
        if exchange.plan.kind not in CONVERTED:
            return ()
        return tuple(
            worker.url for worker in self.registry if not takes_converted(worker.known.version)
        )

    def _blame(self, run: UnitRun, served: Pair | None) -> None:
        """Count a unit's 5xx responses against the engines' circuit breakers. If several engines
        failed and none ``served`` the unit, count none: the request may be the cause, and a few
        such requests must not take out every engine. If only one engine was tried (no retries, or
        the client left), :class:`.Suspicions` decides."""
        if not run.suspects:
            return
        suspects, run.suspects = run.suspects, []
        alone = len({failure.worker for failure in suspects}) == 1
        now_s = time.monotonic()
        for failure in suspects:
            role, engine = failure.leg, failure.worker
            if served is not None:
                self.registry.leg_failed(_at_fault(failure, suspects, served))
            elif alone and self._suspicions.against(role, engine, now_s):
                self.registry.leg_failed(failure)

    async def _retried(self, run: UnitRun) -> Pair:
        kind, name = run.exchange.plan.kind, run.exchange.request_id
        while True:
            run.attempts += 1
            try:
                return await self._attempt(run)
            except LegFailure as failure:
                recent = run.exchange.recent
                self.in_flight.recent.on_attempt_failed(recent, run.unit, failure)
                if failure.transport:
                    self.registry.leg_failed(failure)
                elif failure.counts_against_worker:
                    run.suspects.append(failure)
                self.metrics.leg_failed(failure)
                if failure.leaves_room:
                    self.registry.room_left(failure.worker)
                if failure.broke_off:
                    run.broken_off.add(failure.worker)
                harmful = len(run.broken_off) >= _MOST_BROKEN_OFF
                last = run.attempts >= self.config.max_attempts or harmful
                retryable = failure.retryable and not run.opened
                if retryable and last:
                    self.metrics.gave_up(failure, kind)
                    if harmful:
                        gone = " and ".join(sorted(run.broken_off))
                        why = f"{gone} dropped the connection: the request is not retried"
                        logger.warning("%s: %s", name, why)
                if last or not retryable:
                    raise
                without_frames(failure)
                limits_s = self.config.least_to_refuse_s, self.config.most_to_refuse_s
                run.decode_after_s = _time_to_refuse_s(failure, *limits_s)
                run.exclude = tuple(dict.fromkeys((*run.exclude, *_avoided(run, failure))))
                self.metrics.retried(failure, kind)
                logger.info("%s: attempt %d failed (%s), retrying", name, run.attempts, failure)
            backoff_s = self._backoff_s(run.attempts)
            self.metrics.backs_off(run.attempts, backoff_s)
            await asyncio.sleep(backoff_s)

    def _backoff_s(self, attempt: int) -> float:
        config = self.config
        base_s = config.initial_backoff_s * config.backoff_multiplier ** (attempt - 1)
        jitter = 1 + config.jitter_factor * random.uniform(-1, 1)
        return min(base_s, config.max_backoff_s) * jitter

    async def _attempt(self, run: UnitRun) -> Pair:
        exchange = run.exchange
        if self.in_flight.parking.full:
            why = "too many cancelled requests are waiting for their KV transfer to end"
            raise RouterError(503, "too_many_parked", why, retry_after_s=1.0)
        attempt = Attempt(arrival=self._arrival(run), run=run)
        self.in_flight.on_submitted(attempt)
        outcome: Outcome = "failed"
        try:
            dispatch = await self.dispatcher.dispatch(attempt)
            self.in_flight.on_dispatched(attempt, dispatch)
            if len(exchange.plan.units) > 1:  # a policy may dispatch hundreds at once
                await self.turns.take(id(exchange))
            if exchange.ending:
                raise asyncio.CancelledError
            pair = self._start(attempt, dispatch)
            await pair.wait_open()
            self._blame(run, pair)
            if exchange.plan.stream:
                await exchange.downstream.open(pair.content_type, self._timing(exchange))
                await pair.wait_done()
            outcome = "failed" if pair.engine_failed else "completed"
            if outcome == "completed":
                self._served(dispatch)
            return pair
        except (asyncio.CancelledError, ConnectionResetError):
            outcome = "aborted"  # the client is gone
            raise
        finally:
            tokens: int | None = None
            if attempt.pair is not None:
                tokens = attempt.pair.completion_tokens
                if outcome != "completed":
                    attempt.pair.abort()
            self.in_flight.end(attempt, outcome, tokens)

    def _timing(self, exchange: Exchange) -> dict[str, str]:
        """Return the ``Server-Timing`` header if the client asked for it, otherwise no header."""
        if not exchange.asked.timing:
            return {}
        value = server_timing(split_of(exchange.recent, self.dispatcher))
        return {HEADER: value} if value else {}

    def _arrival(self, run: UnitRun) -> RequestArrived:
        exchange, prompt = run.exchange, run.prompt
        rid = SIZED_RID_PREFIX * self.sends_gangs + os.urandom(16).hex()
        return RequestArrived(
            rid=RESPONSE_RID_PREFIX + rid if exchange.plan.kind == "responses" else rid,
            prompt_tokens=prompt.length.tokens,
            estimated=not prompt.length.exact,
            max_new_tokens=exchange.plan.prompts[run.unit // exchange.plan.samples].max_new_tokens,
            exclude=run.exclude,
            blocks=prompt.blocks.tolist(),
            block_tokens=prompt.block_tokens,
            session=exchange.session,
            priority=exchange.priority,
            ttft_slo_s=exchange.asked.ttft_slo_s,
            tenant=exchange.asked.tenant,
        )

    def _served(self, dispatch: Dispatch) -> None:
        for role, engine in (("prefill", dispatch.prefill), ("decode", dispatch.decode)):
            self.registry.leg_succeeded(engine)
            self._suspicions.served(role, engine)

    def _start(self, attempt: Attempt, dispatch: Dispatch) -> Pair:
        """Send both legs and return their pair, without waiting. Raises: as :meth:`_placement`."""
        run, plan = attempt.run, attempt.run.exchange.plan
        placement = self._placement(dispatch, plan.kind)
        prefill, ids_json = placement.prefill, run.prompt.ids_json
        if ids_json and not self.tokenizers.may_get_ids(plan.kind, prefill, placement.decode):
            ids_json = None
        self.sent_as_ids += ids_json is not None
        gang = None
        # Decide by the rid, because the policy may have changed since arrival.
        if is_sized(attempt.rid):
            # Send it as a batch of one if its batch is unknown or may span several ranks.
            known = None if prefill.rank_is_a_hint else dispatch.gang
            gang = known or GangPart(random.getrandbits(TAG_BITS), members=1, ranks=1)
        asks = prefill.info is not None and prefill.info.cached_details and plan.may_ask_cached
        bodies = leg_bodies(
            run.unit,
            plan,
            placement,
            rid=attempt.rid,
            room=placement.pick_room(gang),
            ids_json=ids_json,
            asks_cached=asks,
        )
        pair = Pair(attempt, placement, self.in_flight, asks)
        pair.start(plan.kind, run.exchange.headers, bodies, run.decode_after_s)
        attempt.pair = pair
        run.exchange.pairs[run.unit] = pair
        self.in_flight.started(attempt, placement)
        if logger.isEnabledFor(logging.DEBUG):
            to = f"{dispatch.prefill} rank {dispatch.prefill_rank} and "
            to += f"{dispatch.decode} rank {dispatch.decode_rank}"
            held = f"after {dispatch.held_s * 1000:.1f} ms: {dispatch.reason}"
            logger.debug("%s: rid %s to %s %s", run.exchange.request_id, dispatch.rid, to, held)
        return pair

    def _placement(self, dispatch: Dispatch, kind: RouteKind) -> AttemptWorkers:
        """Return the workers of a dispatch. Raises: LegFailure, one was removed or restarted;
        RouterError, one is too old for the API, or has no such DP rank."""
        prefill_rank, decode_rank = dispatch.prefill_rank, dispatch.decode_rank
        prefill = self._worker("prefill", dispatch.prefill, prefill_rank)
        decode = self._worker("decode", dispatch.decode, decode_rank)
        for worker in (prefill, decode) if kind in CONVERTED else ():
            if not takes_converted(worker.known.version):
                why = f"{worker.url} runs SGLang {worker.known.version}, and {PATHS[kind]} with PD"
                raise RouterError(501, "not_implemented", f"{why} needs 0.5.22 or later")
        return AttemptWorkers(prefill, prefill_rank, decode, decode_rank)

    def _worker(self, role: Leg, url: str, rank: int) -> Worker:
        worker = self.registry.get(url)
        left = worker is not None and worker.known.elastic and rank >= worker.dp_size
        if worker is None or worker.info is None or left:  # since the dispatch
            why = "was removed" if worker is None else "has been restarted"
            why = f"worker {url} {f'has no DP rank {rank} any longer' if left else why}"
            raise LegFailure(role, url, 503, f"{role}_unavailable", why)
        if not 0 <= rank < worker.dp_size:
            why = f"DP rank {rank} of {url} is outside [0, {worker.dp_size})"
            raise RouterError(500, "rank_out_of_range", why)
        return worker
