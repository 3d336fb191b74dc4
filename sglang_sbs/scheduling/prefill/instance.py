"""The estimated state of one prefill instance: its requests by rank, its passes, and what follows
from them, such as C_avail and the time when it is free.

Reports correct it (:mod:`.reports`). Without reports (no plugin, or the instance became silent) the
same state is kept by assumption. A backlog is *presumed* launched after the usual latency, first
come first served up to the chunk, and the pass is presumed over when one of its requests is
answered. A later report overrides that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sglang_sbs.scheduling.events import InstanceId, InstanceUp
from sglang_sbs.scheduling.paging import whole_pages
from sglang_sbs.scheduling.prefill.completion import NextPass
from sglang_sbs.scheduling.prefill.forward_model import ForwardModel
from sglang_sbs.scheduling.prefill.moves import Moves, Stray
from sglang_sbs.scheduling.prefill.observation import NOTHING_SEEN, Observation
from sglang_sbs.scheduling.prefill.passes import Passes
from sglang_sbs.scheduling.prefill.ranks import Cached, Ranks
from sglang_sbs.scheduling.prefill.reports import Reports
from sglang_sbs.scheduling.prefill.requests import Sent
from sglang_sbs.scheduling.prefill.watchdog import HEARTBEATS_S, LOST_S, UNANSWERED_S, Watchdog
from sglang_sbs.scheduling.received.load_source import LoadSource, Source
from sglang_sbs.wire import EndForward

STALLED_S = 60.0
"""Assumed delay, from now, until an instance whose ranks start no requests is free."""
_CACHED_STEP = 0.05
"""Weight of one prompt in the smoothed :attr:`PrefillInstance.cached_share`."""


class PrefillInstance:
    """State of one prefill instance with ``dp_size`` ranks."""

    def __init__(
        self,
        up: InstanceUp,
        *,
        t_default_s: float,
        default_chunk_tokens: int,
        worker: InstanceId = "",
    ) -> None:
        """Create an idle instance. ``t_default_s``: forward time before the first measurement.
        ``default_chunk_tokens``: chunk if ``up`` has none. ``worker``: worker that the rank belongs
        to, if each rank is an instance (:mod:`sglang_sbs.scheduling.lone_ranks`)."""
        self.id: InstanceId = up.instance
        self.worker = worker or up.instance
        self.dp_size = up.dp_size
        self.chunk_tokens = default_chunk_tokens
        self.ranks = Ranks(self.dp_size)
        self._set_room(up)
        self.model = ForwardModel(t_default_s=t_default_s, chunk_tokens=self.chunk_tokens)
        self.model.captured_tokens = up.captured_tokens
        self.passes = Passes(self.model)
        self.pause = self.passes.pause
        self.moves = Moves()
        self._reports = Reports(self.ranks, self.passes, self.moves, t_default_s)
        self.source = LoadSource()
        self.ready = True
        """A pass has ended, or the instance was quiescent, since the last dispatch."""
        self.watchdog = Watchdog(t_default_s)
        self.last_dispatch_s = float("-inf")
        self.left_s = -math.inf
        """Time when the last dispatched request leaves the router; requests leave one by one."""
        self._batch: Sent | None = None
        """The newest batch dispatched here; None before the first."""
        self.cached_share = 0.0
        """Smoothed share of recently sent prompts that was cached, 0 to 1."""
        self._followers: list[set[Any]] = []

    def __repr__(self) -> str:
        state = f"{'' if self.ready else 'not '}ready by {self.source.name}"
        return f"<PrefillInstance {self.id} {state} {self.passes} {self.ranks}>"

    def subscribe(self, changed: set[Any]) -> None:
        """Add this instance to ``changed`` whenever any of its state may have changed."""
        self._followers.append(changed)

    def unsubscribe(self, changed: set[Any]) -> None:
        self._followers = [other for other in self._followers if other is not changed]

    def set_limits(self, up: InstanceUp) -> None:
        """Apply the engine's chunk and page size, request limit, overlap scheduling and captured
        graph sizes."""
        self._set_room(up)
        self.model.captured_tokens = up.captured_tokens
        self._on_change()

    def resize(self, up: InstanceUp) -> None:
        """Add or remove DP ranks at the end, for a DP size changed at runtime (elastic EP)."""
        self.dp_size = up.dp_size
        for rank in self.ranks[self.dp_size :]:
            for rid in rank.requests:
                self.passes.drop(rid)
        self.ranks.resize(self.dp_size)
        self.passes.resize(self.dp_size)
        self.set_limits(up)

    def _set_room(self, up: InstanceUp) -> None:
        self.page = max(1, up.charged_page or up.page_size)
        """Page size by which a request is charged tokens of the chunk."""
        self.chunk_tokens = whole_pages(up.chunk_tokens or self.chunk_tokens, self.page)
        self.capacity_tokens = self.chunk_tokens * self.dp_size
        """Tokens of a pass with a full chunk on every rank."""
        self.overlap = up.overlap
        # Ignore a limit that no chunk can reach.
        most = up.prefill_max_requests
        self.prefill_max_requests = most if 0 < most * self.page < self.chunk_tokens else 0
        """Limit on requests per rank and pass; 0: no limit."""
        for rank in self.ranks:
            rank.set_limits(self.page, self.chunk_tokens, self.prefill_max_requests)

    # Questions ----------------------------------------------------------------------------

    def full_pass(self, mean_tokens: float) -> tuple[float, float]:
        """Return the tokens of a pass with the largest number of requests of this mean length, and
        its predicted forward time."""
        tokens = self.ranks.capacity_of(mean_tokens)
        return tokens, self.model.predict_s([round(tokens / self.dp_size)] * self.dp_size)

    @property
    def tokens_per_s(self) -> float:
        """Predicted tokens per second of all ranks, without the fixed time of passes."""
        return self.dp_size / self.model.formula.slope_s()

    @property
    def joins_batch(self) -> bool:
        """Whether the newest batch left while another was on its way here."""
        return self._batch is not None and self._batch.joins

    @property
    def quiescent(self) -> bool:
        """Whether no pass runs and nothing waits for one (paper section 4.1.2)."""
        return not self.passes and self.ranks.backlog_tokens == 0

    @property
    def idle(self) -> bool:
        """Whether the instance is quiescent, and the engine's own pause after the last pass is
        over."""
        return self.quiescent and not self.pause.on

    @property
    def launching(self) -> bool:
        """Whether a pass is about to start: there is a backlog, but no known pass."""
        return not self.passes and self.ranks.backlog_tokens > 0

    @property
    def forms_ahead(self) -> bool:
        """Whether the engine forms its next pass when the previous one starts, not when it ends:
        overlap scheduling with a queued pass and a backlog behind it."""
        return self.overlap and len(self.passes) > 1 and self.ranks.backlog_tokens > 0

    @property
    def rests(self) -> bool:
        """Whether the state stays as it is until a report arrives or the watchdog fires."""
        return not (self.launching or self.pause.on) and (self.source.reports or not self.passes)

    @property
    def tier(self) -> Source:
        """Name of the report source that readiness is based on."""
        return self.source.name

    @property
    def stage(self) -> tuple[Source, bool, int, int]:
        """Summary of progress: report source, idleness, number of passes, and forward id of the
        newest one (-1: none, or presumed)."""
        newest_id = self.passes[-1].forward_id if self.passes else None
        newest_id = -1 if newest_id is None else newest_id
        return self.source.name, self.idle, len(self.passes), newest_id

    def next_pass_s(self) -> float:
        """Return the predicted forward time, in seconds, of the next pass with the requests that
        now wait for it."""
        return self._next_pass_s

    @Cached
    def _next_pass_s(self) -> float:
        return self.model.predict_s(*self.ranks.next_pass())

    @property
    def known_pass_s(self) -> float | None:
        """:meth:`next_pass_s` if it was computed since the last change, otherwise None."""
        return vars(self).get("_next_pass_s")

    def next_pass(self, start_s: float = 0.0) -> NextPass:
        """Return the next pass, which starts at ``start_s`` with the requests that wait for it."""
        return NextPass(
            self.model.formula,
            self.chunk_tokens,
            self.ranks.ahead_tokens,
            page=self.page,
            length_s=self.next_pass_s(),
            start_s=start_s,
        )

    def launches_s(self, latency_s: float) -> float:
        """Return when an instance without a pass launches its backlog. ``latency_s``: L_net."""
        ends_s = self.passes.free_since_s + self.pause.mean_s
        return max(ends_s, self.last_dispatch_s + latency_s)

    def free_at_s(self, now_s: float, latency_s: float) -> float:
        """Return when the instance could launch another pass: the predicted end of all launched
        passes plus the usual pause, or the end of a pass about to start; ``now_s`` or a little
        later if it is idle. ``latency_s``: L_net."""
        if self.ranks.takes_nothing:
            return now_s + STALLED_S
        if self.passes:
            return self.passes[-1].end_s + self.pause.mean_s
        if self.launching:
            return self.launches_s(latency_s) + self.next_pass_s()
        return max(now_s, self.pause.until_s)

    def forms_at_s(self, now_s: float, latency_s: float) -> float:
        """Return when the engine forms the next batch that could include a request sent now. That
        is when the instance is free. Under overlap scheduling, with requests left over behind a
        queued pass, it is when the queued pass starts."""
        if self.forms_ahead:
            return self.passes[-1].start_s
        return self.free_at_s(now_s, latency_s)

    def advance(self, now_s: float, latency_s: float) -> float:
        """Apply presumed launches and ends, and the watchdog, up to ``now_s``. Returns when to call
        it again if no report arrives; infinity: never."""
        if self.watchdog.due_s <= now_s:
            self._on_silence(now_s)
        if self.rests:
            return self.watchdog.due_s
        passes, reports = self.passes, self.source.reports
        if self.pause.until_s <= now_s and self.pause.on:
            self._changes()
            self.pause.end()
        while not reports and passes.ends_by_time_s <= now_s:
            self._changes()
            passes.free_since_s = passes.pop(0).end_s
            self.ready = True
        launch_s = self._presumed_launch_s(latency_s)
        if launch_s <= now_s:
            sends = self.ranks.has_flight
            unknown = Sent(self.last_dispatch_s, joins=True)
            passes.append(self.ranks.take_pass(self.model, launch_s, now_s, unknown))
            self._on_change()
            if sends:
                # Assumptions are not reports, so others' queued work does not delay the watchdog.
                self._watch(now_s)
            launch_s = math.inf
        next_s = min(self.watchdog.due_s, launch_s)
        if self.pause.on:
            next_s = min(next_s, self.pause.until_s)
        if not reports:
            next_s = min(next_s, passes.ends_by_time_s)
        return next_s

    # Requests -----------------------------------------------------------------------------

    def on_dispatched(
        self,
        rid: str,
        rank: int,
        prompt_tokens: int,
        now_s: float,
        cached_tokens: int = 0,
        serial_s: float = 0.0,
        *,
        fetches: bool = False,
    ) -> None:
        """Record a dispatch to a rank, and arm the watchdog if it is not armed. ``serial_s``: delay
        that it adds to later requests of its batch. ``fetches``: the rank loads part of it from
        storage first, so its launch gives no latency sample."""
        batch = self._batch
        if batch is None or batch.at_s != now_s:
            # A batch may hang on its way, so it is not followed for long.
            last_s = batch.at_s if batch is not None else -math.inf
            joins = self.ranks.has_flight and last_s > self.passes.free_since_s
            batch = self._batch = Sent(now_s, self.idle, joins, 0)
        batch.requests += 1
        self.left_s = batch.left_s = max(now_s, self.left_s) + serial_s
        sent = Sent(now_s, joins=True) if fetches else batch
        self.adopted(rid, rank, prompt_tokens, now_s, cached_tokens, sent)

    def adopted(
        self,
        rid: str,
        rank: int,
        prompt_tokens: int,
        now_s: float,
        cached_tokens: int = 0,
        sent: Sent | None = None,
    ) -> None:
        """Record a request dispatched by another scheduler; it gives no latency sample. ``sent``:
        its batch, if this scheduler dispatched it."""
        is_first = not self.ranks.has_outstanding
        request = self.ranks[rank].add(rid, prompt_tokens, cached_tokens)
        request.sent = sent
        self.ranks[rank].flight.add(request)
        self._on_change(rank)
        share = min(1.0, cached_tokens / max(1, prompt_tokens))
        self.cached_share += _CACHED_STEP * (share - self.cached_share)
        if is_first:
            self._watch(now_s)
        self.last_dispatch_s = now_s
        self.ready = False

    def on_prefilled(self, rid: str, rank: int, now_s: float) -> Observation:
        """Record that prefill has answered a request, or that it has ended. Without EndForward this
        also ends the pass it was presumed in, and the result has that pass's forward time."""
        positions = (at for at, running in enumerate(self.passes) if rid in running.requests)
        ended = next(positions, None)
        self.dropped(rid, rank)
        self._answered()
        if self.source.reports:
            return NOTHING_SEEN
        if self.ranks.has_outstanding:
            self._watch(now_s)
        if ended is None:
            return NOTHING_SEEN
        self.source.on_answer()
        return self._end_presumed(ended, now_s)

    def dropped(self, rid: str, rank: int) -> None:
        """Remove a request from the rank without concluding that a pass has ended."""
        if rank >= self.dp_size:
            return  # it was sent to a former instance of another size
        if self.ranks[rank].gone(rid):
            self._on_change(rank)
        self.moves.on_ended(rid)
        self.passes.drop(rid)
        self._changes()
        if not self.ranks.has_outstanding:
            self._answered()
        if not self._owes_signal:
            self.watchdog.due_s = math.inf
        if not self.ranks.has_outstanding and not self.source.reports and not self.passes:
            self.ready = True

    # Reports ------------------------------------------------------------------------------

    def on_report(
        self, report: EndForward, now_s: float, strays: Sequence[Stray] = ()
    ) -> Observation:
        """Apply a rank's report and return the samples in it. Old and duplicate messages change
        nothing. ``strays``: requests that the rank names and that are assumed elsewhere."""
        if not 0 <= report.dp_rank < self.dp_size:
            return NOTHING_SEEN
        taken = self.ranks[report.dp_rank].cursor.take(report, now_s)
        if taken is None:
            return NOTHING_SEEN
        self.source.on_report()
        if taken.restarted:
            self.cached_share = 0.0
        lost_s = max(LOST_S, self.watchdog.timeout_s)
        learned = self._reports.read(report, taken, now_s, lost_s=lost_s, strays=strays)
        if learned.ended:
            self.ready = True
        if learned.forward_s is not None:
            self.watchdog.on_pass(learned.forward_s)
        self._on_change()
        # With the new backlog, which decides about readiness.
        if report.kind in ("idle", "heartbeat") and all(rank.idle for rank in self.ranks):
            self._on_quiescent(now_s)
        self._watch(now_s)
        return learned

    def on_load_poll(self, queued_tokens: list[int], now_s: float) -> None:
        """Apply a load poll, a fallback for EndForward: tokens per rank, negative: unknown."""
        if len(queued_tokens) != self.dp_size or not self.source.on_load_poll():
            return
        for rank, tokens in zip(self.ranks, queued_tokens, strict=True):
            if tokens >= 0:
                rank.on_load_poll(tokens)
        self._on_change()
        if max(queued_tokens) > 0:
            self._watch(now_s)
            if not self.passes:
                # A queue means that an unreported pass runs until now at least.
                self.passes.free_since_s = now_s
        if not any(queued_tokens) and not self.ranks.has_outstanding:
            self._on_quiescent(now_s)

    def reset(self) -> None:
        """Forget all requests and passes assumed here."""
        for rank in self.ranks:
            rank.forget()
        self.moves.clear()
        self._on_change()
        self.passes.clear()
        self.watchdog.due_s = math.inf
        self.ready = True
        self.pause.end()
        self.left_s = -math.inf

    def down(self) -> None:
        """Reset the instance because it is unreachable, prompts included."""
        self.reset()
        for rank in self.ranks:
            rank.clean = True
            rank.prompts.clear()

    # Inside -------------------------------------------------------------------------------

    def _changes(self) -> None:
        """Add the instance to all subscribed sets; every change calls this, before or after."""
        for changed in self._followers:
            changed.add(self)

    def _on_change(self, rank: int | None = None) -> None:
        """Invalidate cached values after a change of one rank (None: of anything)."""
        self._changes()
        self.ranks.changed(rank)
        vars(self).pop("_next_pass_s", None)

    @property
    def _owes_signal(self) -> bool:
        """Whether the watchdog expects a sign of life: an answer, the end of a pass, or idleness.
        That is possible without outstanding requests, because the instance may have become silent
        after its last report."""
        return bool(
            self.ranks.has_outstanding or self.passes or self.ranks.backlog_tokens or not self.ready
        )

    def _watch(self, now_s: float) -> None:
        """Restart the watchdog after a report or a new assumption."""
        if not self._owes_signal:
            self.watchdog.due_s = math.inf
        elif self.passes:
            end_s, launched = self.passes[0].end_s, self.passes[0].forward_id is not None
            self.watchdog.arm(now_s, busy_until_s=end_s, launched=launched)
        else:
            # A rank without passes sends a heartbeat once a second.
            wait_s = 0.0 if self.ranks.has_outstanding else LOST_S
            if self.source.reports:
                wait_s = max(wait_s, HEARTBEATS_S - self.watchdog.timeout_s)
            self.watchdog.arm(now_s, busy_until_s=now_s + wait_s, launched=False)

    def _on_silence(self, now_s: float) -> None:
        """Reset predictions after T_timeout of silence (paper section 4.1.2). Unanswered requests
        stay, and nothing is sent until one is answered, a report arrives, or they may be lost."""
        self.watchdog.fires += 1
        lost_s = self.last_dispatch_s + UNANSWERED_S
        unanswered = [list(rank.requests.values()) for rank in self.ranks if now_s < lost_s]
        self.reset()
        self.source.on_silence()
        self.passes.free_since_s = now_s
        if any(unanswered):
            for rank, requests in zip(self.ranks, unanswered, strict=True):
                rank.restore(requests)
                rank.unanswered = True
            self._on_change()
            self.ready = False
            self.watchdog.due_s = lost_s

    def _answered(self) -> None:
        """Clear the ranks' ``unanswered`` flags: the instance has answered, so it works."""
        for rank in self.ranks:
            if rank.unanswered:
                rank.unanswered = False
                self._on_change()

    def _presumed_launch_s(self, latency_s: float) -> float:
        if not self.launching or self.ranks.takes_nothing:
            return math.inf
        start_s = self.launches_s(latency_s)
        # With a plugin, wait a little for the launch report before presuming it lost.
        grace_s = 0.5 * self.model.predict_s([0]) if self.source.reports else 0.0
        return start_s + grace_s

    def _end_presumed(self, position: int, now_s: float) -> Observation:
        """Presume that the pass at this position, and all before it, have ended. Returns its
        forward time."""
        self._on_change()
        ended = self.passes[position]
        forward_s = max(1e-3, now_s - ended.start_s)
        self.ready = True
        self.passes.end(self.passes[position + 1 :], now_s)
        self.passes.ended += 1
        self.model.observe(ended.tokens, forward_s, self.ranks.compute(ended.tokens))
        self.watchdog.on_pass(forward_s)
        return Observation(forward_s=forward_s)

    def _on_quiescent(self, now_s: float) -> None:
        self.passes.clear()
        self.passes.free_since_s = min(self.passes.free_since_s, now_s)
        # Requests sent a moment ago are not visible yet, so the instance is not free for another
        # batch.
        if self.ranks.backlog_tokens == 0:
            self.ready = True


Instances = Sequence[PrefillInstance]
