"""Timelines of requests, from the scheduler's events, live or from a log; bounded, and without I/O.

A prefill rank reports the requests that start in a pass when it launches the pass, and the
completed ones when the pass ends. Older plugins do not report completed requests. Then the tokens
of each ended pass are attributed to the rank's launched prompts, first come first served, because
the engine computes them in that order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from sglang_sbs.scheduling.events import (
    ClientSide,
    Command,
    Dispatch,
    Event,
    ForwardEnded,
    InstanceId,
    PrefillDone,
    Refuse,
    RequestArrived,
    RequestEnded,
)

MOST_OVER = 4096
"""Limit on ended requests that are remembered, the most recent ones."""
MOST_OPEN = 100_000
PARTS = ("admission", "retries", "hold", "way", "queue", "pass", "decode")
"""Parts of the TTFT, in order: until the submission to the scheduler; failed earlier attempts; hold
in the scheduler; until the prefill rank accepted the request; until its first pass started; until
its last pass ended; KV transfer and the first decode step."""
ENGINE = "engine"
"""Part in place of ``way``, ``queue`` and ``pass``, if the engine does not report its passes."""


class Timeline(msgspec.Struct, omit_defaults=True, gc=False):
    """One attempt at a request. Times are on the scheduler's clock in seconds; None: not yet, or
    unknown."""

    rid: str
    arrived_s: float
    prompt_tokens: int
    priority: int = 0
    decision: Dispatch | None = None
    decided_s: float | None = None
    refusal: Refuse | None = None
    accepted_s: float | None = None
    """Time when the prefill rank accepted the request."""
    launched_s: float | None = None
    """Start of the request's first prefill pass."""
    computed_s: float | None = None
    """End of the request's last prefill pass."""
    prefilled_s: float | None = None
    """Time when prefill answered, or decode began."""
    ended_s: float | None = None
    outcome: str = ""
    completion_tokens: int | None = None
    client: ClientSide | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the client's request to the first byte of its answer; None: not known."""
        parts = self.parts()
        return sum(parts.values()) if "decode" in parts else None

    def parts(self, client: ClientSide | None = None) -> dict[str, float]:
        """Return the seconds spent in each of :data:`PARTS`, as far as known. ``client``: the
        relay's times of an attempt that has not ended."""
        parts: dict[str, float] = {}
        client = client or self.client
        first_s = None
        if client is not None:
            if client.admission_s is not None:
                parts["admission"] = client.admission_s
            if client.retries_s:
                parts["retries"] = client.retries_s
            if client.first_byte_s is not None:
                first_s = self.arrived_s + client.first_byte_s
        at_s = self.decided_s
        if at_s is None:
            return parts
        parts["hold"] = at_s - self.arrived_s
        steps: tuple[tuple[str, float | None], ...]
        if self.launched_s is None or self.computed_s is None:
            seen_s = self.prefilled_s if first_s is None else min(self.prefilled_s or 1e18, first_s)
            steps = ((ENGINE, seen_s), ("decode", first_s))
        else:
            steps = (
                ("way", self.accepted_s),
                ("queue", self.launched_s),
                ("pass", self.computed_s),
                ("decode", first_s),
            )
        for name, until_s in steps:
            if until_s is not None:
                # Times of engines depend on message delays, so they may be slightly off.
                end_s = max(at_s, until_s if first_s is None else min(until_s, first_s))
                parts[name], at_s = end_s - at_s, end_s
        return parts


class _Computing(msgspec.Struct):
    """A prompt that is being computed by a rank."""

    timeline: Timeline
    forward_id: int
    """Forward id of the prompt's first pass."""
    left_tokens: int
    cut: bool = False
    """The prompt continues after its first pass, even if its reported length fits in that pass."""
    last_end_s: float | None = None


class Timelines:
    """Builds one :class:`Timeline` per attempt from scheduler events and the commands each event
    caused. Remembers the last ``most_over`` ended ones."""

    def __init__(self, most_over: int = MOST_OVER) -> None:
        self._most_over = most_over
        self.ended: Callable[[Timeline], object] = lambda timeline: None
        """Called with each timeline that ends."""
        self._open: dict[str, Timeline] = {}
        self._over: dict[str, Timeline] = {}
        self._order: deque[str] = deque()
        """Ids of ended timelines, oldest end first: finding the first key of a dict takes time."""
        self._computing: dict[tuple[str, int], dict[str, _Computing]] = {}
        """Prompts being computed, by (instance, DP rank) and request id."""
        self._names_finished: dict[tuple[str, int], str] = {}
        """Boot ids of the ranks whose engines report completed requests, by (instance, DP rank)."""
        self._on: dict[type, Callable[[object, float], None]] = {
            RequestArrived: self._arrived,  # type: ignore[dict-item]
            PrefillDone: self._prefilled,  # type: ignore[dict-item]
            RequestEnded: self._request_ended,  # type: ignore[dict-item]
            ForwardEnded: self._reported,  # type: ignore[dict-item]
        }

    def __len__(self) -> int:
        return len(self._open) + len(self._over)

    def get(self, rid: str) -> Timeline | None:
        return self._open.get(rid) or self._over.get(rid)

    def sent_to(self, rid: str) -> tuple[InstanceId, int] | None:
        """Return (prefill instance, DP rank) of a request; None: unknown, or not dispatched."""
        timeline = self.get(rid)
        decision = timeline.decision if timeline is not None else None
        return (decision.prefill, decision.prefill_rank) if decision is not None else None

    def observe(self, event: Event, commands: Sequence[Command], now_s: float) -> None:
        """Update the timelines of the requests that an event and the scheduler's commands for it
        concern."""
        on = self._on.get(type(event))
        if on is not None:
            on(event, now_s)
        for command in commands:
            if type(command) is Dispatch:  # faster than isinstance, and most are of neither
                timeline = self._open.get(command.rid)
                if timeline is not None:
                    timeline.decision = command
                    timeline.decided_s = now_s
            elif type(command) is Refuse:
                timeline = self._open.get(command.rid)
                if timeline is not None:
                    timeline.refusal = command
                    timeline.outcome = "refused"
                    self._end(timeline, now_s)

    def _arrived(self, event: RequestArrived, now_s: float) -> None:
        if len(self._open) >= MOST_OPEN:
            del self._open[next(iter(self._open))]
        tokens = max(1, event.prompt_tokens)
        self._open[event.rid] = Timeline(event.rid, now_s, tokens, event.priority)

    def _prefilled(self, event: PrefillDone, now_s: float) -> None:
        timeline = self._open.get(event.rid)
        if timeline is None or timeline.prefilled_s is not None:
            return
        timeline.prefilled_s = now_s
        here = self._computing_at(timeline)
        computing = here.get(event.rid)
        if computing is not None and computing.last_end_s is not None:
            timeline.computed_s = computing.last_end_s
            del here[event.rid]

    def _request_ended(self, event: RequestEnded, now_s: float) -> None:
        timeline = self._open.get(event.rid)
        if timeline is not None:
            timeline.outcome = event.outcome
            timeline.completion_tokens = event.completion_tokens
            timeline.client = event.client
            self._end(timeline, now_s)

    def _end(self, timeline: Timeline, now_s: float) -> None:
        del self._open[timeline.rid]
        self._computing_at(timeline).pop(timeline.rid, None)
        timeline.ended_s = now_s
        if len(self._over) >= self._most_over:
            del self._over[self._order.popleft()]
        if timeline.rid not in self._over:
            self._order.append(timeline.rid)
        self._over[timeline.rid] = timeline
        self.ended(timeline)

    def _computing_at(self, timeline: Timeline) -> dict[str, _Computing]:
        decision = timeline.decision
        if decision is None or not self._computing:
            return {}
        here = self._computing.get((decision.prefill, decision.prefill_rank), {})
        if timeline.rid in here or timeline.launched_s is None or timeline.computed_s is not None:
            return here
        # Engines may compute a request on another rank than it was sent to.
        return next((other for other in self._computing.values() if timeline.rid in other), here)

    def _reported(self, event: ForwardEnded, now_s: float) -> None:
        report = event.report
        if report.role != "prefill":
            return
        at_s = now_s - max(0.0, report.age_s)
        key = event.instance, report.dp_rank
        if report.kind == "launch":
            computing: _Computing | None = None
            for started in report.started:
                computing = None
                timeline = self._open.get(started.rid)
                if timeline is None or timeline.launched_s is not None:
                    continue
                timeline.launched_s = at_s
                if started.queued_s > 0:
                    timeline.accepted_s = at_s - max(0.0, report.launch_s - started.queued_s)
                decision = timeline.decision
                cached = 0 if decision is None else decision.cached_tokens
                left = max(1, timeline.prompt_tokens - cached)
                computing = _Computing(timeline, report.forward_id, left)
                self._computing.setdefault(key, {})[started.rid] = computing
            if computing is not None:  # the engine cuts the last one that it takes
                computing.cut = report.chunk_remainder_tokens > 0
        elif report.kind == "forward":
            if report.finished:
                self._names_finished[key] = report.boot_id
            here = self._computing.get(key)
            if not here:
                return
            if self._names_finished.get(key) != report.boot_id:
                self._pass_ended(here, event, at_s)
            for rid in report.finished:
                computing = here.pop(rid, None)
                if computing is not None:
                    computing.timeline.computed_s = at_s

    @staticmethod
    def _pass_ended(here: dict[str, _Computing], event: ForwardEnded, end_s: float) -> None:
        report = event.report
        tokens = report.extend_tokens
        for rid, computing in list(here.items()):
            if computing.forward_id > report.forward_id or tokens <= 0:
                break
            whole = computing.last_end_s is None and computing.left_tokens <= report.chunk_tokens
            taken = min(computing.left_tokens, tokens)
            tokens -= taken
            computing.left_tokens -= taken
            computing.last_end_s = end_s
            if computing.cut and computing.forward_id == report.forward_id:
                computing.left_tokens, whole = max(1, computing.left_tokens), False
            # Lengths may be estimates: a prompt within a chunk takes one pass, whatever was
            # counted.
            if computing.left_tokens <= 0 or whole or computing.timeline.prefilled_s is not None:
                computing.timeline.computed_s = end_s
                del here[rid]
