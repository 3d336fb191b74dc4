"""One attempt at a request: its prefill leg and its decode leg, which succeed or fail together.
Must not know clients or retries. Prefill's failure fails the pair only until decode's first byte,
because decode has the KV cache from then on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang_sbs.router.engines.connection import Receiver
from sglang_sbs.router.engines.connection_pool import Call, request_lines
from sglang_sbs.router.errors import (
    EventTooLarge,
    LegFailure,
    RouterError,
    answer_too_large,
    transport_failure,
)
from sglang_sbs.router.relay.answer_kinds import ANSWER_KINDS
from sglang_sbs.router.relay.event_reader import LONG_BYTES, EventReader, Payload
from sglang_sbs.router.relay.leg_answers import Body, DecodeLeg, PrefillLeg, PrefillReply
from sglang_sbs.router.requests.plan import PATHS, Pieces, RouteKind, leg_headers
from sglang_sbs.router.workers.worker import AttemptWorkers

if TYPE_CHECKING:
    from sglang_sbs.router.relay.in_flight import Attempt, InFlight

logger = logging.getLogger(__name__)

_SETTLE_S = 10.0
"""Time that prefill's response may take after decode's is complete."""
_MOST_REPEATED = 16
"""Limit on the bytes before the first output of ``/v1/responses``, as a multiple of the request's
size. Two events repeat instructions and tools, with every field that a tool leaves out."""
_MOST_WAITING = 3
"""Decode's bytes before its first output that are read while prefill is at work, as a multiple of
the request's size. Reading then pauses until prefill has responded, which may take long."""
# SGLang fault: retraction-without-key
_WHY_RETRACTION_FAILS = (
    "decode ended the stream early. If it had retracted the request, it asked prefill over plain "
    "HTTP and without a key to compute it again, which prefill refuses here (sglang #25372): see "
    "pair.retraction-key of sglang-sbs doctor"
)
# SGLang fault: early-abort-ignored
_ABORT_AGAIN_S = 1.0
"""A request aborted at an age below this gets a second abort after the same time, because an engine
that is still tokenizing ignores aborts."""


class Pair:
    """Both legs of an attempt: build it, then :meth:`start` it. It must not keep the attempt or
    the bodies that it sends: prefill may outlive its client, and thousands of pairs wait for
    responses."""

    prefill_call: Call
    decode_call: Call

    def __init__(
        self, attempt: Attempt, placement: AttemptWorkers, in_flight: InFlight, asks_cached: bool
    ) -> None:
        """Prepare both legs. ``asks_cached``: prefill was asked for ``cached_tokens_details``,
        which it omits if there are none."""
        exchange = attempt.run.exchange
        plan = exchange.plan
        self.rid = attempt.rid
        self.unit = attempt.run.unit
        self.placement = placement
        self.prefill, self.decode = placement.prefill.url, placement.decode.url
        self.stream = plan.stream
        self.needs_prefill_reply = plan.merge_logprobs
        """Decode's stream waits for prefill's response, whose logprobs go into it."""
        self.asks_cached = asks_cached
        self.status = 0
        self.content_type = ""
        self.body: Body = b""
        """A complete response that was not streamed."""
        self.prefill_reply: PrefillReply | None = None
        self.pace = in_flight.pace
        self.opened = False
        """Decode's first byte has arrived, or all of a response that is not streamed."""
        self.closed = False
        """Aborted: further data is discarded."""
        self.must_park = False
        """Aborted, but decode's request must stay open (:mod:`.parking`)."""
        self.decode_spoke = False
        """Decode has sent output, for which it needs all of the KV."""
        self._in_flight = in_flight
        self._pool = in_flight.pool
        self._sink = exchange.make_sink(self) if exchange.make_sink is not None else None
        self._edits_events = whole = exchange.edits_events
        self.answers = answers = ANSWER_KINDS[plan.kind]
        self._reader = _NOT_STREAMED
        if self.stream:
            repeated = _MOST_REPEATED * len(plan.common) if answers.repeats_request else 0
            most = LONG_BYTES + repeated
            self._reader = EventReader(answers, self.decode, whole=whole, most_held=most)
        self._fails_silently = in_flight.refuses_retraction(placement)
        self._waits_for_prefill = self.needs_prefill_reply
        self._held = b""
        """Part of decode's stream that arrived before prefill's response."""
        self._most_waiting = LONG_BYTES + _MOST_WAITING * len(plan.common)
        self._paused = False
        self._done = False
        self._failure: LegFailure | None = None
        self._woken: asyncio.Future[None] | None = None
        """Future on which the attempt waits for the next change of this pair."""
        self._prefill_over = self._decode_over = False
        self._all_sent = False
        """Prefill responded with 200: decode has the whole KV."""
        self.prefill_lost = False
        """The prefill engine no longer responds: its response may never come."""
        self._never_taken = False
        """Prefill refused the request, so no KV will be sent."""
        self._started_s = 0.0

    def __repr__(self) -> str:
        flags = ("opened", "closed", "must_park", "_paused", "_done", "_prefill_over")
        names = [flag for flag in (*flags, "_decode_over") if getattr(self, flag)]
        state = ["sent" if self._started_s else "not sent", *names]
        if self._failure is not None:
            state.append(f"{self._failure.leg} failed with {self._failure.status}")
        shown = ", ".join(state).replace("_", " ").replace("  ", " ")
        return f"<Pair {self.rid} to {self.prefill} and {self.decode}: {shown}>"

    def start(
        self,
        kind: RouteKind,
        headers: bytes,
        bodies: tuple[Pieces, Pieces],
        decode_after_s: float = 0.0,
    ) -> None:
        """Send both legs. ``bodies`` are those of prefill and decode, and ``headers`` the header
        lines of both. ``decode_after_s``: time for prefill to refuse the request before decode gets
        it."""
        self._started_s = time.monotonic()
        # Keep the client's headers a separate piece: a batch may send them a thousand times.
        lines = (*leg_headers(kind, headers, self.rid), b"\r\n")

        def send(origin: str, body: Pieces, leg: Receiver, after_s: float) -> Call:
            head = request_lines("POST", origin, PATHS[kind], sum(map(len, body)))
            return self._pool.call(origin, (head, *lines, *body), leg, after_s=after_s)

        # Send prefill first, because it queues. Both writes leave in this callback.
        prefill, decode = self.placement.prefill_origin, self.placement.decode_origin
        self.prefill_call = send(prefill, bodies[0], PrefillLeg(self), 0.0)
        self.decode_call = send(decode, bodies[1], DecodeLeg(self), decode_after_s)

    # For the relay ----------------------------------------------------------------------------

    async def wait_open(self) -> None:
        """Wait until :attr:`opened`. Raises: LegFailure, a leg failed first; both are already
        aborted."""
        while not self.opened:
            await self._wait()

    async def wait_done(self) -> None:
        """Wait until decode's response is complete. Raises: LegFailure, a leg failed first."""
        while not self._done:
            await self._wait()

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._woken = self._pool.loop.create_future()
        await self._woken

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def abort(self) -> None:
        """End both requests, on the engines as well, unless the decode request :attr:`must_park`.
        Does nothing once both are over."""
        if self.closed:
            return
        self.closed = True
        self._sink = None
        self.must_park = self._kv_may_come()
        if not self._prefill_over:
            if self.must_park:
                # Its response shows whether all KV was sent, so keep the connection.
                self._abort_on_engine(self.prefill_call)
            else:
                self._abort_leg(self.prefill_call)
        if self.must_park:
            self._held = b""
            self.decode_call.set_paused(False)
        elif not self._decode_over:
            self._abort_leg(self.decode_call)

    def _kv_may_come(self) -> bool:
        """Return whether prefill may still write to KV pages that decode would free upon an
        abort."""
        if self.placement.decode.known.defers_release:
            return False
        taken = self.prefill_call.sent and not self._never_taken
        waits = self.decode_call.sent and not (self._decode_over or self.decode_spoke)
        return waits and taken and not self._all_sent

    @property
    def prefill_over(self) -> bool:
        """No further result of prefill's request can arrive, or none is expected."""
        return self._prefill_over or self.prefill_lost or self.prefill_call.over

    def forget(self) -> None:
        """Drop everything large, because the pair may stay parked for long."""
        self._failure = None
        if self.stream:
            self._reader.watch(b"")
        self.prefill_call.forget_payload()
        self.decode_call.forget_payload()

    def abort_decode(self) -> None:
        """Abort the parked decode request, and stop waiting for prefill's response."""
        self.must_park = False
        if not self._prefill_over:
            self._prefill_over = True
            self.prefill_call.cancel()
        if not self._decode_over:
            self._abort_leg(self.decode_call)

    def parked_data(self, data: bytes) -> None:
        """Handle data of a parked request: its first output shows that its KV has arrived."""
        if not self.stream or self.status != 200 or self._reader.watch(data):
            self._in_flight.parking.release(self)

    def on_decode_ended(self) -> None:
        """Handle that the decode engine ended a parked request by itself."""
        self._decode_over = True
        self._in_flight.parking.release(self)

    def _abort_leg(self, call: Call) -> None:
        sent = call.sent
        call.cancel()
        if sent:
            self._abort_on_engine(call)

    def _abort_on_engine(self, call: Call) -> None:
        send = self._in_flight.aborts.send
        send(call.origin, self.rid)
        if time.monotonic() - self._started_s < _ABORT_AGAIN_S:
            self._pool.loop.call_later(_ABORT_AGAIN_S, send, call.origin, self.rid)

    def pause(self) -> None:
        """Stop reading from decode, because the client is slow."""
        self._paused = True
        self.decode_call.set_paused(True)

    def resume(self) -> None:
        self._paused = False
        self._read_on()

    def _read_on(self) -> None:
        if not (self._paused or self._held or self._waits_unopened):
            self.decode_call.set_paused(False)

    @property
    def _waits_unopened(self) -> bool:
        return not self._all_sent and self._reader.unopened_bytes > self._most_waiting

    @property
    def engine_failed(self) -> bool:
        """The stream sent to the client ends in an abort or error of the engine."""
        return self._reader.failed

    @property
    def chunks(self) -> int:
        """Number of events of the stream so far."""
        return self._reader.events

    @property
    def completion_tokens(self) -> int | None:
        """Tokens reported by the response, else the number of stream events; ``None`` if both are
        unknown."""
        reported = self.answers.output_tokens(self._reader.last or self.body)
        return (self.chunks or None) if reported is None else reported

    # Verdicts (from the legs) -----------------------------------------------------------------

    def leg_failed(self, failure: LegFailure) -> None:
        if self.must_park:
            self._parked_failed(failure)
            return
        if self.closed or self._done:
            return
        over = not failure.transport or failure.unreachable
        failure.partner = self.decode if failure.leg == "prefill" else self.prefill
        if not failure.transport:
            failure.after_s = time.monotonic() - self._started_s
        if failure.leg == "prefill":
            contacted = self.decode_call.sent and not self._decode_over
            failure.leaves_room = contacted and failure.refused
            self._never_taken = failure.unreachable or _refuses(failure)
            self._prefill_over = over
            if self.opened:
                return
        else:
            self._decode_over = over
        self._failure = failure
        self.abort()
        self._wake()

    def _parked_failed(self, failure: LegFailure) -> None:
        if failure.leg == "decode":
            if failure.transport:
                # The engine may not have noticed, and KV may be on its way, so the request stays
                # parked.
                self._in_flight.parking.limit(self)
            else:
                self.on_decode_ended()
        elif failure.unreachable:
            self._prefill_over = True
            self._in_flight.parking.release(self)
        else:
            # After an abort no status proves that nothing was sent.
            self._prefill_over = True
            self._in_flight.parking.limit(self)

    def prefill_came(self) -> None:
        """Handle that prefill's response has begun and is long: send decode's request if it is
        still delayed, and report prefill as done before the response is parsed."""
        self.decode_call.let_go()
        if not self.closed:
            self._book(self._in_flight.dispatcher.prefill_done)

    def _book(self, what: Callable[..., None], *more: Any) -> None:
        """Call ``what`` in the next turn of the event loop, after the received data has been passed
        on, so that accounting does not delay first bytes."""
        self._pool.loop.call_soon(what, self.rid, *more)

    def prefill_finished(self, reply: PrefillReply) -> None:
        self._prefill_over = self._all_sent = True
        if not self.closed:
            self.decode_call.let_go()
        if self.must_park:
            self._in_flight.parking.release(self)
        if self.closed:
            return
        self.prefill_reply = reply
        self._waits_for_prefill = False
        self._book(self._in_flight.prefill_replied, reply, time.monotonic())
        held, self._held = self._held, b""
        if held:
            self.decode_data(held)
        self._read_on()
        if self._decode_over:
            self._complete()

    def decode_data(self, data: bytes) -> None:
        if self._waits_for_prefill:
            self.decode_spoke = True
            self._held += data
            self.decode_call.set_paused(True)
            return
        pieces = self._reader.feed(data)
        self.decode_spoke = self.decode_spoke or self._reader.opened
        self._pass_on(pieces)
        if not (self.opened or self.closed) and self._waits_unopened:
            self.decode_call.set_paused(True)

    def _pass_on(self, pieces: Sequence[Payload]) -> None:
        reader = self._reader
        if not self.opened and reader.failure is not None:
            self.leg_failed(reader.failure)
            return
        if not self.opened and reader.opened:
            self._open()
        if reader.failed and self._fails_silently:
            self._fails_silently = False
            pieces = self._with_cause(pieces)
        try:
            if self._sink is not None:
                for piece in pieces:
                    self._sink(piece)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            # A sink that edits events parses them; invalid JSON counts as decode's failure.
            why = repr(error)  # the log record must not keep the frames
            logger.warning("unreadable event in the stream of %s: %s", self.decode, why)
            self._decode_broke("unreadable event in its stream")
        if isinstance(reader.broken, EventTooLarge):
            self.leg_failed(answer_too_large("decode", self.decode, str(reader.broken)))
        elif reader.broken is not None:
            self._decode_broke(str(reader.broken))

    def _with_cause(self, pieces: Sequence[Payload]) -> Sequence[Payload]:
        """Return a failed stream's last pieces with an error event inserted that names the likely
        cause (a refused retraction)."""
        data = b"".join(pieces)
        error = RouterError(500, "retraction_refused", _WHY_RETRACTION_FAILS)
        event = error.sse_event(self.answers.error_style)
        if self._edits_events:
            return [*pieces, event[6:-2]]
        head, mark, end = data.rpartition(self.answers.end_event)
        if not mark and not data.endswith(b"\n\n"):
            return pieces  # an event that is still incomplete cannot be interrupted
        return [head + event + mark + end] if mark else [data, event]

    def _open(self) -> None:
        self.opened = True
        self._book(self._in_flight.decode_started, time.monotonic())
        self._wake()

    def _decode_broke(self, detail: str) -> None:
        self.leg_failed(transport_failure("decode", self.decode, detail))

    def decode_finished(self, body: Body) -> None:
        """Finish decode's response; ``body`` is empty if it was streamed."""
        self._decode_over = self.decode_spoke = True
        self.body = body
        if not self._waits_for_prefill or (self.stream and not self._held):
            self._complete()  # prefill may never respond after an empty stream

    def _complete(self) -> None:
        if self._failure is not None:
            return
        if self.stream:
            self._pass_on(self._reader.end())
            if self._failure is not None:
                return
            if not self._reader.opened:
                self._decode_broke("the stream ended before its first event")
                return
            if not self._reader.done:
                self._decode_broke(f"the stream ended without {self._reader.kind.end_name}")
                return
        else:
            self._open()
        self._done = True
        self._sink = None
        if not self._prefill_over and not self.closed:
            self._pool.loop.call_later(_SETTLE_S, self._give_up_prefill)
        self._wake()

    def _give_up_prefill(self) -> None:
        if not self._prefill_over:
            self.abort()


_NOT_STREAMED = EventReader(ANSWER_KINDS["generate"], "")
"""Stands for the reader of any response that is not streamed; it never gets data."""


def _refuses(failure: LegFailure) -> bool:
    """Return whether a failure's status shows that prefill never accepted the request: 4xx, but 408
    and 499 can also come later."""
    return 400 <= failure.status < 500 and failure.status not in (408, 499)
