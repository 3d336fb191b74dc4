"""Turns EndForward messages into the records of an event log. Sans-I/O.

Records of an observed log, in order of ``now_s`` (seconds of the observer's monotonic clock):

- ``InstanceUp`` with the first message of an instance, and again when its properties change.
- ``InstanceDown`` with the last message of an instance that then sent none for ``WINDOW_S``: it has
  ended or restarts. ``InstanceUp`` follows with its next message.
- ``RequestArrived`` with a ``Dispatch`` when a request reached a prefill instance (or one without
  disaggregation). ``Dispatch`` names instance and DP rank; ``decode`` is empty if it is unknown.
- ``ForwardEnded`` with every message about prefill work, at the time it was made. Of the other
  messages, one per second and rank is recorded. Launch, end and tokens of passes, and the first
  pass of each request (``started``), are in the message.
- ``PrefillDone`` at the end of the pass that computed the last prompt token. This stands for the
  first token: the KV transfer and the first decode step follow.

A message arrives later than the events that it reports, so records wait ``WINDOW_S`` to be sorted.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from sglang_sbs.scheduling import (
    Dispatch,
    Event,
    ForwardEnded,
    InstanceDown,
    InstanceUp,
    PrefillDone,
    RequestArrived,
)
from sglang_sbs.scheduling.eventlog import OBSERVED, LogRecord
from sglang_sbs.wire import EndForward
from sglang_sbs.wire.endforward import MAX_SPAN_S, Accepted

WINDOW_S = 10.0
"""Seconds that a record waits, so that events reported late can be sorted in before it. Longer than
any pass, because a busy rank reports accepted requests only with its next pass."""
_K = TypeVar("_K")
_V = TypeVar("_V")
_CLOCK_BUCKET_S = 10.0
_STATE_INTERVAL_S = 1.0
"""Seconds between records of a rank's state, because most messages of a large cluster are from
decode."""
_MAX_ENGINES = 1024
_MAX_RANKS = 65_536
_MAX_REQUESTS = 500_000
_MAX_RID_CHARS = 100
"""Limit on a rid here; an event log allows 128 characters, engines accept longer ones."""


@dataclass(slots=True)
class ObservedRequest:
    rid: str
    prompt_tokens: int
    arrived_s: float
    """Time of the request's arrival on the engine's clock, on which ``waited_s`` and ``prefill_s``
    are differences."""
    cached_tokens: int | None = None
    waited_s: float | None = None
    """Seconds from the request's arrival until its first pass began to compute; None: not known
    yet."""
    prefill_s: float | None = None
    """Seconds from the request's arrival until its last prompt token was computed; None: not known
    yet."""


class _EngineClock:
    """Maps an engine's clock to the observer's by the smallest delay of a message in the last
    ``_CLOCK_BUCKET_S`` to twice that, so that slow drift is followed."""

    def __init__(self) -> None:
        self._since_s = -math.inf
        self._least_s = self._before_s = math.inf

    def offset_s(self, sent_s: float, now_s: float) -> float:
        if now_s - self._since_s > _CLOCK_BUCKET_S:
            self._since_s, self._before_s, self._least_s = now_s, self._least_s, math.inf
        self._least_s = min(self._least_s, now_s - sent_s)
        return min(self._least_s, self._before_s)


@dataclass(slots=True)
class _ReportedRank:
    next_seq: int
    accepted_before: int
    """Number of requests that the engine accepted before the rank's first message."""
    accepted: int = 0
    state_s: float = -math.inf
    """Time when the rank's state was last recorded."""


@dataclass(slots=True)
class _Engine:
    instance: str
    clock: _EngineClock = field(default_factory=_EngineClock)
    ranks: dict[int, _ReportedRank] = field(default_factory=dict)
    open: OrderedDict[str, ObservedRequest] = field(default_factory=OrderedDict)
    """Accepted requests not yet computed, by the rid in messages."""
    starting: OrderedDict[tuple[int, int], list[ObservedRequest]] = field(
        default_factory=OrderedDict
    )
    """Requests in unfinished first passes, by DP rank and forward id."""


class TrafficRecorder:
    """Takes every message, and returns the records that are due."""

    def __init__(
        self,
        on_request: Callable[[ObservedRequest], None] = lambda request: None,
        on_pass: Callable[[str, EndForward, float], None] = lambda name, report, end_s: None,
    ) -> None:
        """Create a recorder. ``on_request`` is called up to three times per request: it arrived,
        its first pass ended (``waited_s`` is known), its prompt is computed (``prefill_s``).
        ``on_pass``: with instance, report and end (observer's clock) of a rank's prefill pass."""
        self._on_request = on_request
        self._on_pass = on_pass
        self.counts: Counter[str] = Counter()
        """``messages``, ``missing`` (gaps in the numbers of a rank's messages), ``repeated``,
        ``refused`` (messages of more ranks than an observer can follow); ``requests``, and how many
        requests the engines count as ``accepted`` in the same time."""
        self.instances: dict[str, InstanceUp] = {}
        self._last_s: dict[str, float] = {}
        """Time of the last message, by instance; those that fell silent are absent."""
        self._engines: OrderedDict[str, _Engine] = OrderedDict()
        self._ranks = 0
        self._heap: list[tuple[float, int, Event, list[Dispatch]]] = []
        self._number = 0
        self._decode_of_room: OrderedDict[int, tuple[str, int, int]] = OrderedDict()
        """Instance, DP rank and output limit at decode, by bootstrap room."""
        self._rooms: OrderedDict[int, int] = OrderedDict()
        """Bootstrap rooms of requests not written yet, by the number of their record."""
        self._names: OrderedDict[str, None] = OrderedDict()

    def receive(self, report: EndForward, now_s: float) -> None:
        """Handle a message received at ``now_s``."""
        engine = self._engine(report)
        if engine is None:
            self.counts["refused"] += 1
            return
        rank = engine.ranks.get(report.dp_rank)
        if rank is None:
            before = max(0, report.accepted_requests - len(report.rids))
            rank = engine.ranks[report.dp_rank] = _ReportedRank(report.seq, before)
        if report.seq < rank.next_seq:
            self.counts["repeated"] += 1
            return
        self.counts["messages"] += 1
        self.counts["missing"] += report.seq - rank.next_seq
        rank.next_seq = report.seq + 1
        offset_s = engine.clock.offset_s(report.sent_s, now_s) if report.sent_s else None
        made_s = now_s if offset_s is None else _bounded(report.sent_s + offset_s, now_s)
        self._describe(engine.instance, report, made_s, now_s)
        if report.role != "decode":
            accepted = report.accepted_requests - rank.accepted_before
            if accepted > rank.accepted:
                self.counts["accepted"] += accepted - rank.accepted
                rank.accepted = accepted
        logged = report
        if offset_s is not None:
            for request in report.accepted:
                self._accepted(engine, report, request, offset_s, now_s)
            logged = _with_names(report, engine)  # before requests that finished are forgotten
            self._passed(engine, report, offset_s, now_s)
        is_state = not (report.rids or _is_prefill_work(report))
        if not is_state or made_s - rank.state_s >= _STATE_INTERVAL_S:
            rank.state_s = made_s if is_state else rank.state_s
            self._put(made_s, ForwardEnded(instance=engine.instance, report=logged))

    def due(self, until_s: float) -> Iterator[LogRecord]:
        """Remove and yield the records up to and including ``until_s``, in order of time. The
        caller chooses it so that no message still to come belongs before it. A finite ``until_s``
        is ``WINDOW_S`` ago."""
        if until_s < math.inf:
            self._note_silent(until_s)
        while self._heap and self._heap[0][0] <= until_s:
            at_s, number, event, dispatches = heapq.heappop(self._heap)
            decode = self._decode_of_room.pop(self._rooms.pop(number, 0), None)
            if decode is not None and isinstance(event, RequestArrived):
                name, rank, most = decode
                replace = msgspec.structs.replace
                event = replace(event, max_new_tokens=most or None)
                dispatches = [
                    replace(dispatch, decode=name, decode_rank=rank) for dispatch in dispatches
                ]
            yield LogRecord(at_s, event, list(dispatches))

    def _engine(self, report: EndForward) -> _Engine | None:
        engine = self._engines.get(report.boot_id)
        if engine is None:
            if len(self._engines) >= _MAX_ENGINES:
                self._engines.popitem(last=False)
            alias = f"{report.role}-{report.boot_id[:8]}"
            name = report.instance_id or report.dist_init_addr or alias
            engine = self._engines[report.boot_id] = _Engine(name)
        if report.dp_rank not in engine.ranks:
            if self._ranks >= _MAX_RANKS:
                return None
            self._ranks += 1
        return engine

    def _describe(self, name: str, report: EndForward, at_s: float, now_s: float) -> None:
        known = self.instances.get(name)
        up = InstanceUp(
            instance=name,
            role="decode" if report.role == "decode" else "prefill",
            dp_size=report.dp_size,
            chunk_tokens=report.chunk_tokens,
            kv_capacity_tokens=report.kv_capacity_tokens,
            max_running_requests=report.max_running_requests,
            # A pass was launched before the previous one ended.
            overlap=report.inflight_passes > 0 or (known is not None and known.overlap),
            barrier=report.barrier,
        )
        if known is None and len(self.instances) >= _MAX_ENGINES:
            return
        if up != known or name not in self._last_s:
            self.instances[name] = up
            self._put(at_s, up)
        self._last_s[name] = now_s

    def _note_silent(self, until_s: float) -> None:
        """Record that the instances without a message since ``until_s`` are down. Idle ranks report
        every second."""
        for name, last_s in list(self._last_s.items()):
            if last_s <= until_s:
                del self._last_s[name]
                self._put(last_s, InstanceDown(instance=name))

    def _accepted(
        self, engine: _Engine, report: EndForward, accepted: Accepted, offset_s: float, now_s: float
    ) -> None:
        if report.role == "decode":
            if accepted.room:
                place = engine.instance, report.dp_rank, accepted.max_new_tokens
                _remember(self._decode_of_room, accepted.room, place)
            return
        if not accepted.rid or accepted.rid in engine.open:
            return
        name = accepted.rid[:_MAX_RID_CHARS]
        if name in self._names:  # Another attempt at it, or a client that reuses ids.
            name = f"{name}~{self._number}"
        _remember(self._names, name, None)
        self.counts["requests"] += 1
        by_engine_s = accepted.arrived_s or report.sent_s
        arrived_s = _bounded(by_engine_s + offset_s, now_s)
        request = ObservedRequest(name, accepted.prompt_tokens, by_engine_s)
        _remember(engine.open, accepted.rid, request)
        dispatch = Dispatch(
            rid=name,
            prefill=engine.instance,
            prefill_rank=report.dp_rank,
            decode=engine.instance if report.role == "null" else "",
            decode_rank=report.dp_rank if report.role == "null" else 0,
            batch=self._number,
            held_s=0.0,
            reason=OBSERVED,
            barrier=report.barrier,
        )
        if accepted.room:
            _remember(self._rooms, self._number, accepted.room)
        arrived = RequestArrived(
            rid=name,
            prompt_tokens=accepted.prompt_tokens,
            max_new_tokens=accepted.max_new_tokens or None,
        )
        self._put(arrived_s, arrived, dispatch)
        self._on_request(request)

    def _passed(self, engine: _Engine, report: EndForward, offset_s: float, now_s: float) -> None:
        key = (report.dp_rank, report.forward_id)
        if report.kind == "launch":
            starting = []
            for started in report.started:
                request = engine.open.get(started.rid)
                if request is not None and request.cached_tokens is None:
                    request.cached_tokens = min(started.cached_tokens, request.prompt_tokens)
                    starting.append(request)
            if starting:
                _remember(engine.starting, key, starting)
        elif report.kind == "forward" and _is_prefill_work(report):
            end_s = _bounded(report.end_s + offset_s, now_s)
            for request in engine.starting.pop(key, ()):
                begun_s = report.end_s - report.forward_s
                request.waited_s = min(max(0.0, begun_s - request.arrived_s), MAX_SPAN_S)
                self._on_request(request)
            for rid in report.finished:
                request = engine.open.pop(rid, None)
                if request is not None:
                    took_s = report.end_s - request.arrived_s
                    request.prefill_s = min(max(0.0, took_s), MAX_SPAN_S)
                    done = PrefillDone(rid=request.rid, cached_tokens=request.cached_tokens)
                    self._put(end_s, done)
                    self._on_request(request)
            self._on_pass(engine.instance, report, end_s)

    def _put(self, at_s: float, event: Event, *dispatches: Dispatch) -> None:
        heapq.heappush(self._heap, (at_s, self._number, event, list(dispatches)))
        self._number += 1


def _with_names(report: EndForward, engine: _Engine) -> EndForward:
    """Return the report with the log's names of its requests, because an id may have been used
    before, or be too long."""
    names = {
        rid: engine.open[rid].rid
        for rid in (*report.rids, *report.finished)
        if rid in engine.open and engine.open[rid].rid != rid
    }
    if not names:
        return report
    return msgspec.structs.replace(
        report,
        rids=[names.get(rid, rid) for rid in report.rids],
        finished=[names.get(rid, rid) for rid in report.finished],
    )


def _is_prefill_work(report: EndForward) -> bool:
    """Return whether the report is about a pass with prompt tokens, on this rank or another."""
    if report.kind not in ("launch", "forward"):
        return False
    return report.role == "prefill" or (report.role == "null" and report.mode != "decode")


def _bounded(at_s: float, now_s: float) -> float:
    """Clamp a time reported by an engine: not in the future, nor older than the limit on
    requests."""
    return min(max(at_s, now_s - MAX_SPAN_S), now_s)


def _remember(known: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    if len(known) >= _MAX_REQUESTS:
        known.popitem(last=False)
    known[key] = value
