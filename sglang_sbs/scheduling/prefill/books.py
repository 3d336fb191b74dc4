"""Accounting of one prefill instance: its ranks, its passes in flight, and derived values such as
C_avail and the next possible start of a pass. :mod:`.instance` updates it from reports."""

from __future__ import annotations

import math
from typing import Any, Literal

from sglang_sbs.scheduling.events import InstanceId, InstanceUp
from sglang_sbs.scheduling.paging import whole_pages
from sglang_sbs.scheduling.prefill.completion import NextPass
from sglang_sbs.scheduling.prefill.engine_pause import EnginePause
from sglang_sbs.scheduling.prefill.forward_model import ForwardModel
from sglang_sbs.scheduling.prefill.moves import Moves
from sglang_sbs.scheduling.prefill.passes import Pass, Sent
from sglang_sbs.scheduling.prefill.rank import PrefillRank
from sglang_sbs.scheduling.prefill.report_limits import DeviceTime
from sglang_sbs.scheduling.prefill.watchdog import Watchdog
from sglang_sbs.wire import EndForward

STALLED_S = 60.0
"""Expected further delay of an instance that takes nothing."""
Tier = Literal["none", "interval", "http", "load_poll", "endforward"]
"""Report source behind readiness, weakest first. ``none``: nothing received yet. ``interval``:
became silent, and is served at fixed intervals (paper section 4.1.2, graceful degradation)."""


class PrefillBooks:
    """Requests and passes assumed at one prefill instance with ``dp_size`` ranks."""

    def __init__(
        self,
        up: InstanceUp,
        *,
        t_default_s: float,
        default_chunk_tokens: int,
        worker: InstanceId = "",
    ) -> None:
        """Create the accounting; ``worker`` is the owner if each rank is an instance
        (:mod:`sglang_sbs.scheduling.lone_ranks`)."""
        self.id: InstanceId = up.instance
        self.worker = worker or up.instance
        self.dp_size = up.dp_size
        self.chunk_tokens = default_chunk_tokens
        self.ranks = [PrefillRank() for _ in range(up.dp_size)]
        self._set_room(up)
        self.model = ForwardModel(t_default_s=t_default_s, chunk_tokens=self.chunk_tokens)
        self.model.captured_tokens = up.captured_tokens
        self.passes: list[Pass] = []
        self.tier: Tier = "none"
        self.ready = True
        """EndForward (or quiescence) was received since the last dispatch."""
        self.watchdog = Watchdog(t_default_s)
        self._device = DeviceTime(t_default_s)
        self.pause = EnginePause()
        self.moves = Moves()
        self.free_since_s = float("-inf")
        self.last_dispatch_s = float("-inf")
        self.left_s = -math.inf
        """Time when all dispatched requests have left."""
        self.passes_ended = 0
        self._outstanding = 0
        self._batch: Sent | None = None
        """The newest batch."""
        self.backlog_tokens = 0
        """Tokens dispatched or queued and in no pass yet, on all ranks."""
        self.charged_tokens = 0
        """Tokens of future chunks that the backlog costs."""
        self.cached_share = 0.0
        """Smoothed cached share of recently sent prompts."""
        self.has_flight = False
        """Whether any request is dispatched and not yet accepted."""
        self._ahead_tokens: list[int] | None = None
        """Cached until the ledgers change, like the next ones."""
        self._least_ahead_tokens: int | None = None
        self._next_pass_s: float | None = None
        self._next: tuple[list[int], list[float]] | None = None
        """Tokens and attention pairs per rank of the next pass, except for ``_stale`` ranks."""
        self._stale: set[int] = set()
        self._longest_prompt_tokens: int | None = None
        self.version = 0
        """Grows with every change of the ledgers, the model or the limits."""
        self._presumed_id = -1
        """Newest pass reported by one rank for all ranks."""
        self._followers: list[set[Any]] = []

    def subscribe(self, changed: set[Any]) -> None:
        """Add this instance to ``changed`` whenever any of its state may have changed."""
        self._followers.append(changed)

    def unsubscribe(self, changed: set[Any]) -> None:
        self._followers = [one for one in self._followers if one is not changed]

    def set_limits(self, up: InstanceUp) -> None:
        """Set chunk, page, overlap scheduling and graphs from the engine."""
        self._set_room(up)
        self.model.captured_tokens = up.captured_tokens
        self._recount()

    def resize(self, up: InstanceUp) -> None:
        """DP ranks joined or left at runtime (elastic EP); the first ones stay as they are."""
        size = self.dp_size = up.dp_size
        del self.ranks[size:]
        self.ranks += [PrefillRank() for _ in range(size - len(self.ranks))]
        for running in self.passes:
            running.rids = {rid: at for rid, at in running.rids.items() if at[0] < size}
            for of_ranks in (running.tokens, running.queued, running.pairs):
                if of_ranks:
                    del of_ranks[size:]
                    of_ranks.extend([0] * (size - len(of_ranks)))
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

    def c_avail(self, passes: int = 1) -> list[int]:
        """Return C_avail per rank for the next pass to be launched (paper section 4.2.1) in charged
        tokens, like everything compared with it. For several passes: the room in all of them, at
        most one chunk. Zero where a pass is full by its number of requests."""
        chunks_tokens = passes * self.chunk_tokens
        room = [chunks_tokens - ahead for ahead in self.ahead_tokens]
        if passes == 1:
            return room  # ahead_tokens includes a full KV pool, up to a chunk
        pools = [rank.kv_room_tokens for rank in self.ranks]
        most = [self.chunk_tokens if pool is None else pool for pool in pools]
        return [min(self.chunk_tokens, *pair) for pair in zip(room, most, strict=True)]

    def places(self, passes: int = 1) -> list[int] | None:
        """Return the number of requests per rank that the pass can still take; None: unlimited."""
        most = self.prefill_max_requests
        if not most:
            return None
        return [max(0, min(most, passes * most - rank.backlog_requests)) for rank in self.ranks]

    def capacity_of(self, mean_tokens: float) -> float:
        """Return the tokens of a pass with the largest number of requests of this mean length."""
        if not self.prefill_max_requests:
            return self.capacity_tokens
        return min(self.capacity_tokens, self.dp_size * self.prefill_max_requests * mean_tokens)

    def full_pass(self, mean_tokens: float) -> tuple[float, float]:
        """Return the same and the predicted forward time of such a pass."""
        tokens = self.capacity_of(mean_tokens)
        return tokens, self.model.predict_s([round(tokens / self.dp_size)] * self.dp_size)

    @property
    def tokens_per_s(self) -> float:
        """Throughput without the fixed time of passes."""
        return self.dp_size / self.model.formula.slope_s()

    @property
    def longest_prompt_tokens(self) -> int:
        """Length of the longest prompt not computed yet, cached or not."""
        if self._longest_prompt_tokens is None:
            self._longest_prompt_tokens = max([rank.prompts.longest_tokens for rank in self.ranks])
        return self._longest_prompt_tokens

    @property
    def has_room(self) -> bool:
        """Whether C_avail is positive on some rank."""
        return self.has_room_in(1)

    def has_room_in(self, passes: int) -> bool:
        """Return whether C_avail over this many passes is positive on some rank."""
        if self._least_ahead_tokens is None:
            self._least_ahead_tokens = min(self.ahead_tokens)
        return self._least_ahead_tokens < passes * self.chunk_tokens

    @property
    def ahead_tokens(self) -> list[int]:
        """Tokens ahead of a new request on each rank, see :attr:`.PrefillRank.ahead_tokens`. Do not
        change them."""
        if self._ahead_tokens is None:
            self._ahead_tokens = [rank.ahead_tokens for rank in self.ranks]
        return self._ahead_tokens

    def has_room_beside(self, report: EndForward) -> bool:
        """Return whether another page would have fitted into the reported pass, for any sizes of
        its requests."""
        if 0 < self.prefill_max_requests <= report.batch_size:
            return False
        charged = report.extend_tokens + report.batch_size * (self.page - 1)
        return charged + self.page <= self.chunk_tokens

    @property
    def idle(self) -> bool:
        """Whether the instance is quiescent, and the engine's own pause after the last pass is
        over."""
        return self.quiescent and not self.pause.on

    @property
    def quiescent(self) -> bool:
        """Whether no pass runs and nothing waits for one (paper section 4.1.2)."""
        return not self.passes and self.backlog_tokens == 0

    @property
    def stage(self) -> tuple[Tier, bool, int, int]:
        """A summary of progress: report source, idleness, and newest pass."""
        newest_id = self.passes[-1].forward_id if self.passes else None
        newest_id = -1 if newest_id is None else newest_id
        return self.tier, self.idle, len(self.passes), newest_id

    @property
    def takes_nothing(self) -> bool:
        """Whether no rank would begin a request sent now."""
        first = self.ranks[0]  # nearly always the answer, and asked very often
        if not (first.unanswered or first.stalled.cause):
            return False
        return all(rank.takes_nothing for rank in self.ranks)

    @property
    def launching(self) -> bool:
        """Whether a pass is about to start without a report: there is a backlog, but no pass."""
        return not self.passes and self.backlog_tokens > 0

    @property
    def rests(self) -> bool:
        """Whether time changes nothing before the watchdog fires, unless a report arrives."""
        return not (self.launching or self.pause.on) and (
            self.tier == "endforward" or not self.passes
        )

    def free_at_s(self, now_s: float, latency_s: float) -> float:
        """Return the time when it could launch something new: the predicted end of all launched
        passes plus the usual pause, or the end of a pass about to start."""
        if self.takes_nothing:
            return now_s + STALLED_S
        if self.passes:
            return self.passes[-1].end_s + self.pause.mean_s
        if self.launching:
            return self.launches_s(latency_s) + self.next_pass_s()
        return max(now_s, self.pause.until_s)

    def launches_s(self, latency_s: float) -> float:
        """Return when an idle instance launches the requests on their way to it."""
        return max(self.free_since_s + self.pause.mean_s, self.last_dispatch_s + latency_s)

    @property
    def forms_ahead(self) -> bool:
        """Whether its next pass is formed when the previous one starts."""
        return self.overlap and len(self.passes) > 1 and self.backlog_tokens > 0

    def forms_at_s(self, now_s: float, latency_s: float) -> float:
        """Return the time when the batch is formed that could still include a request sent now.
        That is when the instance is free. Under overlap scheduling, with requests left over behind
        a queued pass, it is when that pass starts, at the end of the running one."""
        if self.forms_ahead:
            return self.passes[-1].start_s
        return self.free_at_s(now_s, latency_s)

    @property
    def has_outstanding(self) -> bool:
        """Whether any dispatched request is not prefilled yet."""
        return self._outstanding > 0

    @property
    def joins_batch(self) -> bool:
        """Whether the newest batch left while another was on its way."""
        return self._batch is not None and self._batch.joins

    # Inside -------------------------------------------------------------------------------

    def _changes(self) -> None:
        """Mark the instance as changed; called by every change, before or after it."""
        for changed in self._followers:
            changed.add(self)

    def _recount(self) -> None:
        """Update derived values after a change of a rank's ledgers."""
        self._forget_sums()
        self.backlog_tokens = sum([rank.flight.total + rank.queued_tokens for rank in self.ranks])
        self.charged_tokens = sum([rank.charged_tokens for rank in self.ranks])
        self._outstanding = sum([len(rank.outstanding.tokens) for rank in self.ranks])
        self.has_flight = any(rank.sent for rank in self.ranks)

    def _forget_sums(self, rank: int | None = None) -> None:
        """Drop the cached sums after a change of a rank's ledgers (None: of any rank). Callers keep
        the sums that are cheap to update."""
        self._changes()
        self.version += 1
        self._next_pass_s = self._longest_prompt_tokens = None
        self._ahead_tokens = self._least_ahead_tokens = None
        if rank is None:
            self._next = None
        else:
            self._stale.add(rank)

    def next_pass_s(self) -> float:
        """Return the predicted forward time of a pass with the requests now waiting for it."""
        if self._next_pass_s is None:
            if self._next is None:
                self._next = [0] * self.dp_size, [0.0] * self.dp_size
                self._stale = set(range(self.dp_size))
            tokens, pairs = self._next
            for number in self._stale:
                rank = self.ranks[number]
                tokens[number] = rank.next_tokens(self.chunk_tokens)
                pairs[number] = rank.prompts.pairs(tokens[number])
            self._stale.clear()
            self._next_pass_s = self.model.predict_s(tokens, pairs)
        return self._next_pass_s

    def next_pass(self, start_s: float = 0.0) -> NextPass:
        """Return the next pass that starts, with the requests that wait for it."""
        return NextPass(
            self.model.formula,
            self.chunk_tokens,
            self.ahead_tokens,
            page=self.page,
            length_s=self.next_pass_s(),
            start_s=start_s,
        )

    @property
    def known_pass_s(self) -> float | None:
        """:meth:`next_pass_s`, if it was computed since the last change."""
        return self._next_pass_s

    def _pairs(self, tokens: list[int]) -> list[float]:
        return [rank.prompts.pairs(mine) for rank, mine in zip(self.ranks, tokens, strict=True)]

    def _vector(self, report: EndForward) -> list[int]:
        if report.tokens_per_rank is not None:
            return list(report.tokens_per_rank)
        return [report.extend_tokens if n == report.dp_rank else 0 for n in range(self.dp_size)]

    def _compute(self, tokens: list[int]) -> list[float]:
        return [rank.prompts.compute(mine) for rank, mine in zip(self.ranks, tokens, strict=True)]

    def _is_over(self, forward_id: int) -> bool:
        """Return whether another rank has reported the end, so that this report of the launch is
        late by an unknown time."""
        return forward_id <= max([rank.last_forward_id for rank in self.ranks])

    def _rechain(self, start_s: float) -> None:
        """Shift passes behind one that just ended."""
        for running in self.passes:
            running.start_s = start_s
            running.end_s = start_s = start_s + self.model.predict_s(running.tokens, running.pairs)

    def _drop_presumed(self) -> None:
        """Replace presumed passes by a report; requests not acknowledged by any rank are in flight
        again."""
        presumed = [p for p in self.passes if p.forward_id is None]
        if not presumed:
            return
        self.passes = [p for p in self.passes if p.forward_id is not None]
        for index, rank in enumerate(self.ranks):
            rank.take_back(index, presumed)
