"""The requests assumed at one DP rank of a prefill instance.

Presumptions
------------
Under the barrier one rank's report of a pass shows that all ranks launched it, and its
``tokens_per_rank`` how many tokens each computes. Until a rank's own report of that pass arrives
(or forever, if it was lost) this many tokens are presumed to have left its queue and, first come
first served, its requests in flight. The rank's next report settles this: first
:meth:`PrefillRank.on_reported_id` reverts all presumptions, then the requests that the report names
or counts are acknowledged, and passes that it does not include are presumed again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sglang_sbs.scheduling.paging import paged
from sglang_sbs.scheduling.prefill.completion import Chunk, RankPrompt
from sglang_sbs.scheduling.prefill.passes import MOST_PASSES, Pass
from sglang_sbs.scheduling.prefill.requests import Flight, PrefillRequest, Sent
from sglang_sbs.scheduling.prefill.stalled_work import StalledWork
from sglang_sbs.scheduling.received.report_cursor import ReportCursor
from sglang_sbs.wire import EndForward

STALLED_CHUNKS = 1000
"""Backlog, in chunks, added to a rank that starts no requests, so that no policy prefers it."""
_REMEMBERED_PASSES = 16
"""Limit on presumed passes per rank. Older ones become permanent: the rank may never report."""
MOST_CHUNKS = 64
"""Limit on the queued tokens of a rank beyond those sent from here, in chunks."""
MOST_TAKEN = 64
"""Limit on :attr:`PrefillRank.taken`, because a rank may never report a launch."""


@dataclass(slots=True, repr=False)
class PrefillRank:
    """Requests and queue assumed at one DP rank. Tokens are uncached prompt tokens."""

    requests: dict[str, PrefillRequest] = field(default_factory=dict)
    """Requests dispatched here and not yet prefilled, in any state, oldest first."""
    outstanding_tokens: int = 0
    """Uncached prompt tokens of all ``requests``."""
    flight: Flight = field(default_factory=Flight)
    """Requests of U_flight: dispatched, and neither accepted by the rank nor presumed accepted."""
    presumed: dict[str, PrefillRequest] = field(default_factory=dict)
    """Requests presumed accepted, by id, oldest first; all are older than those in ``flight``. A
    request that has ended (not in ``requests``) stays, because the rank's counter and passes
    include it."""
    prompts: dict[str, PrefillRequest] = field(default_factory=dict)
    """Requests that reported passes have not fully computed, by id, oldest first. Ranks report
    tokens, not contexts. They compute first come first served, so the tokens of each pass show how
    far each prompt is. An error ends with its request."""
    taken: list[Sent] = field(default_factory=list)
    """Batch of each request that an idle rank has named and not launched, because it waits for the
    rest of the batch."""
    queued_tokens: int = 0
    """R_queued as last reported, minus tokens presumed taken by later passes."""
    queue_charge: float = 1.0
    """Charged tokens per queued token, at least 1: each request is charged whole pages."""
    queue_density: float = 0.0
    """Estimated requests per queued token; 0 if passes have no request limit."""
    page: int = 1
    """Page size, in tokens; a request is charged whole pages of the chunk."""
    chunk_tokens: int = 0
    most_requests: int = 0
    """Request limit of a pass (``PrefillAdder.add_one_req`` in SGLang's ``schedule_policy.py``: per
    rank, including the rest of a cut request); 0: no limit."""
    cursor: ReportCursor = field(default_factory=ReportCursor)
    clean: bool = False
    """The rank was cleared when its instance went down, and has not reported since. Requests sent
    meanwhile are for the engine's next boot, so a new boot id does not clear them."""
    received_tokens: int = 0
    """Uncached prompt tokens ever sent here, which fill its prefix cache."""
    has_cached: bool = False
    """Whether any request was sent here because of cached prefixes."""
    stalled: StalledWork = field(default_factory=StalledWork)
    """Whether the rank has waiting work that no pass takes, and why."""
    unanswered: bool = False
    """The instance became silent with unanswered prefill requests, so nothing is sent here."""
    kv_free_tokens: int | None = None
    """Free tokens of its KV pool as last reported; None: unknown."""
    idle: bool = True
    last_forward_id: int = -1
    """Id of the newest pass that the rank reported as ended."""
    launched_id: int = -1
    """Id of the newest pass that the rank's own reports include."""
    presumed_passes: dict[int, int] = field(default_factory=dict)
    """This rank's tokens in presumed passes, by forward id (after ``launched_id``, ascending)."""

    def __repr__(self) -> str:
        return (
            f"<PrefillRank {len(self.requests)} requests, {len(self.flight)} of them in flight, "
            f"tokens {self.flight.total} in flight + {self.queued_tokens} queued>"
        )

    def set_limits(self, page: int, chunk_tokens: int, most_requests: int) -> None:
        """Set the page size, and the tokens and requests (0: unlimited) of a pass."""
        self.page = page
        self.chunk_tokens = chunk_tokens
        self.most_requests = most_requests
        self.flight.set_page(page)

    def forget(self) -> None:
        """Forget all requests assumed at the rank, but keep its report counters and the progress of
        prompts: a rank that was only silent continues with them."""
        self.requests.clear()
        self.outstanding_tokens = 0
        self.flight.clear()
        self.taken.clear()
        self.presumed.clear()
        self.presumed_passes.clear()
        self.queued_tokens = 0
        self.queue_charge = 1.0
        self.queue_density = 0.0
        self.stalled.clear()
        self.unanswered = False
        self.kv_free_tokens = None
        self.idle = True

    def fell_silent(self) -> None:
        """Discard the rank's last report, because it was silent for long while others reported."""
        self.queued_tokens = 0
        self.kv_free_tokens = None
        self.idle = True

    def new_boot(self) -> None:
        self.last_forward_id = self.launched_id = -1
        self.presumed_passes.clear()
        self.taken.clear()

    @property
    def newest_id(self) -> int:
        return max(self.last_forward_id, self.launched_id)

    def add(self, rid: str, prompt_tokens: int, cached_tokens: int) -> PrefillRequest:
        """Enter a dispatched request and return its record. ``cached_tokens``: part of its prompt
        cached here. The caller adds it to ``flight`` unless the rank has accepted it."""
        if rid in self.requests:
            self.gone(rid)
        request = PrefillRequest.of(rid, prompt_tokens, cached_tokens)
        self.requests[rid] = request
        self.outstanding_tokens += request.tokens
        self.prompts[rid] = request
        self.has_cached = self.has_cached or cached_tokens > 0
        self.received_tokens += request.tokens
        return request

    def restore(self, requests: Iterable[PrefillRequest]) -> None:
        """Enter requests again after :meth:`forget`: in flight, and without latency samples."""
        for request in requests:
            request.sent = None
            self.requests[request.rid] = request
            self.outstanding_tokens += request.tokens
            self.flight.add(request)

    def gone(self, rid: str) -> bool:
        """Remove a request that is prefilled or has ended; return whether it was still here."""
        request = self.requests.pop(rid, None)
        if request is not None:
            self.outstanding_tokens -= request.tokens
        in_flight = self.flight.pop(rid)
        if rid in self.presumed:
            self.presumed[rid].sent = None
        waiting = self.prompts.pop(rid, None)
        return not (request is None and in_flight is None and waiting is None)

    def pairs(self, tokens: int) -> float:
        """Return the attention pairs of this rank's next ``tokens`` tokens (see
        :func:`.attention_pairs`)."""
        chunk = Chunk(tokens)
        chunk.fill(self.prompts.values())
        return chunk.pairs

    def compute(self, tokens: int) -> float:
        """Advance :attr:`prompts` by the tokens of a pass; return the tokens' attention pairs."""
        chunk = Chunk(tokens)
        for prompt, part in chunk.fill(self.prompts.values()):
            prompt.advance(part)
            if not prompt.left_tokens:
                del self.prompts[prompt.rid]
        return chunk.pairs

    def contradicts(self, report: EndForward) -> bool:
        """Return whether the report's forward id is below what an earlier report claimed. Ids only
        rise, so the earlier report was false."""
        if report.kind == "forward" and report.forward_id < self.last_forward_id:
            return True
        of_pass = report.kind in ("forward", "launch")
        return of_pass and report.forward_id + MOST_PASSES < self.launched_id

    def on_reported_id(self, launched_id: int) -> None:
        """Put presumed requests back in flight, before a report of the rank is applied that
        includes the passes up to ``launched_id``."""
        if self.presumed:
            self.flight.put_back(self.presumed)
            self.presumed.clear()
        self.launched_id = max(self.launched_id, launched_id)

    def on_queue(self, report: EndForward) -> None:
        """Apply the rank's queue (R_queued) and free KV tokens from its report."""
        most = self.outstanding_tokens + MOST_CHUNKS * self.chunk_tokens
        self.queued_tokens = min(self._uncached_queue(report), most)
        free = report.kv_capacity_tokens - report.kv_tokens
        self.kv_free_tokens = max(0, free) if report.kv_capacity_tokens else None
        self.queue_charge = 1.0
        cut = report.chunk_remainder_tokens > 0
        requests = report.waiting_requests + report.bootstrapping_requests + cut
        if self.most_requests and self.queued_tokens:
            most = len(self.requests) + MOST_CHUNKS * self.most_requests
            self.queue_density = max(1, min(requests, most)) / self.queued_tokens
        if self.page > 1 and self.queued_tokens:
            here = self._youngest(requests)
            unknown = (requests - len(here)) * (self.page // 2)
            more = unknown + sum([-request.tokens % self.page for request in here])
            self.queue_charge = min(self.page, 1.0 + more / self.queued_tokens)

    def on_load_poll(self, tokens: int) -> None:
        """Apply the queued tokens of a load poll, which may or may not count requests sent a moment
        ago."""
        queued = max(0, tokens - self.flight.total)
        self.queued_tokens = min(queued, MOST_CHUNKS * self.chunk_tokens)

    def _youngest(self, requests: int) -> list[PrefillRequest]:
        """Return the newest ``requests`` requests at the rank; fewer if unknown."""
        flight = self.flight.requests
        here = [request for rid, request in self.requests.items() if rid not in flight]
        return here[max(0, len(here) - requests) :]

    def _uncached_queue(self, report: EndForward) -> int:
        """Return the uncached tokens of a report's R_queued. SGLang counts whole prompts until it
        schedules a request, so the cached part is subtracted by our own accounting."""
        queued = report.queued_tokens
        requests = report.waiting_requests + report.bootstrapping_requests
        if not self.has_cached or not requests:
            return queued
        here = self._youngest(requests)
        if len(here) < requests:
            return queued
        uncached = sum([request.tokens for request in here])
        return min(queued, uncached + report.chunk_remainder_tokens)

    def give_up(self, before_s: float) -> None:
        """Drop requests from ``flight`` that were sent before this time and never reported. If one
        arrives after all, the rank's reported queue includes it."""
        for request in self.flight.oldest():
            if request.sent is not None and request.sent.at_s < before_s:
                self.flight.pop(request.rid)

    def has_room_beside(self, report: EndForward) -> bool:
        """Return whether another page would have fitted into the reported pass, whatever the sizes
        of its requests."""
        if 0 < self.most_requests <= report.batch_size:
            return False
        charged = report.extend_tokens + report.batch_size * (self.page - 1)
        return charged + self.page <= self.chunk_tokens

    def take_chunk(self, room: int) -> tuple[int, int, list[PrefillRequest]]:
        """Take the front of the backlog for a pass with ``room`` charged tokens. Returns the tokens
        of R_queued and of U_flight in the pass, and the requests of U_flight that it completes."""
        queued = min(self.queued_tokens, int(room / self.queue_charge))
        places = self.most_requests or room
        if self._requests_of(queued) > places:
            queued = round(places / self.queue_density)
        self.queued_tokens -= queued
        room -= round(queued * self.queue_charge)
        places -= self._requests_of(queued)
        oldest = self.flight.oldest(max(0, places))
        chunk = Chunk(room, self.page)
        landed = []
        for prompt, part in chunk.fill(RankPrompt(r.rid, r.flight_tokens) for r in oldest):
            request = self.flight.requests[prompt.rid]
            if part == request.flight_tokens:
                self.flight.pop(request.rid)
                landed.append(request)
            else:
                self.flight.reduce(request, part)
        return queued, chunk.tokens, landed

    def take_back(self, index: int, passes: Iterable[Pass]) -> None:
        """Revert presumed ``passes``: their tokens and requests of this rank (number ``index``)
        wait again."""
        for presumed in passes:
            self.queued_tokens += presumed.queued[index]
            for rid in presumed.requests.keys() & self.requests.keys():
                self.flight.add(self.requests[rid])
        # Restore whole requests with the oldest first, the order in which a lost report is healed.
        for rid, request in self.requests.items():
            if rid in self.flight:
                self.flight.add(request)

    def presume_again(self, full_tokens: int) -> None:
        """Presume again those presumed passes that a report does not include. Call this after the
        report was applied. ``full_tokens``: charged tokens of a full chunk."""
        passes, self.presumed_passes = self.presumed_passes, {}
        for forward_id, tokens in passes.items():
            self.presume(forward_id, tokens, full_tokens)
        for request in self.flight.oldest():
            if request.rid not in self.requests:
                self.flight.pop(request.rid)

    def presume(self, forward_id: int, tokens: int, full_tokens: int) -> None:
        """Presume that this rank computes ``tokens`` in the pass ``forward_id``, as another rank
        reported. A pass included in the rank's state, or older than a presumed one, changes
        nothing. ``full_tokens``: charged tokens of a full chunk; the last request of a full chunk
        may be cut, and those sent with it wait behind it."""
        newest = next(reversed(self.presumed_passes), self.launched_id)
        if self.clean or forward_id <= newest:
            return
        self.presumed_passes[forward_id] = tokens
        if len(self.presumed_passes) > _REMEMBERED_PASSES:
            # After a long silence the oldest presumption becomes permanent.
            oldest = next(iter(self.presumed_passes))
            del self.presumed_passes[oldest]
            later = [item for item in self.presumed.items() if item[1].presumed_id > oldest]
            self.presumed = dict(later)
        queued = min(tokens, self.queued_tokens)
        self.queued_tokens -= queued
        new = left = tokens - queued
        full = self._charge_of(queued, new) >= full_tokens
        taken = 0
        places = self.most_requests - self._requests_of(queued)
        sent_s: float | None = None
        for request in self.flight.oldest():
            if self.most_requests and places <= 0:
                full, left = True, 0
            places -= 1
            size, sent = request.flight_tokens, request.sent
            with_last = sent is not None and sent.at_s == sent_s
            if left <= 0 and not with_last:
                break
            # Lengths may be wrong, and part of a prompt cached: choose the closest number of
            # requests, but keep a batch whole unless too much is missing for that.
            together = with_last and 2 * new >= taken + size
            if taken and not full and 2 * left < size and not together:
                break
            self.flight.pop(request.rid)
            self.presumed[request.rid] = request
            request.presumed_id = forward_id
            if full and size > left:
                self._wait(size - left)
            left = max(0, left - size)
            taken += size
            sent_s = None if sent is None else sent.at_s

    def _charge_of(self, queued: int, new: int) -> int:
        """Return the tokens charged for ``queued`` tokens of the queue and the ``new`` oldest
        tokens in flight."""
        charge = round(queued * self.queue_charge)
        if self.page == 1:
            return charge + new
        for request in self.flight:
            part = min(new, request.flight_tokens)
            charge += paged(part, self.page)
            new -= part
            if new <= 0:
                break
        return charge + new

    def _wait(self, tokens: int) -> None:
        """Add a request, or the rest of a cut one, to the assumed queue."""
        requests = self._requests_of(self.queued_tokens) + 1
        self.queued_tokens += tokens
        if self.most_requests:
            self.queue_density = requests / self.queued_tokens

    def _requests_of(self, queued_tokens: int) -> int:
        """Return the estimated number of requests in this many queued tokens; 0 if passes have no
        request limit."""
        if not self.most_requests or not queued_tokens:
            return 0
        return max(1, round(queued_tokens * self.queue_density))

    def next_tokens(self, chunk_tokens: int) -> int:
        """Return the tokens of the backlog that fit into a pass of ``chunk_tokens`` charged
        tokens."""
        tokens, charged = self.backlog_tokens, self.charged_tokens
        most = tokens if charged <= chunk_tokens else chunk_tokens * tokens // charged
        if self.most_requests and self.backlog_requests > self.most_requests:
            return min(most, self.most_requests * tokens // self.backlog_requests)
        return most

    @property
    def backlog_tokens(self) -> int:
        """U_flight + R_queued: tokens ahead of a new request in future passes."""
        return self.flight.total + self.queued_tokens

    @property
    def backlog_requests(self) -> int:
        """Number of requests in flight and queued. Without a request limit of passes, only those in
        flight are counted."""
        return len(self.flight) + self._requests_of(self.queued_tokens)

    @property
    def ahead_tokens(self) -> int:
        """Charged tokens of future chunks that are not available to a new request. A pass that is
        full by its number of requests, or has no room in the KV pool, counts as a full chunk."""
        # Asked of every rank at every event, so nothing is asked that is not there.
        queued = self.queued_tokens
        ahead = self.flight.charged + (round(queued * self.queue_charge) if queued else 0)
        if self.most_requests:
            full = self.backlog_requests // self.most_requests
            ahead = max(ahead, full * self.chunk_tokens)
        if self.kv_free_tokens is not None and (kv_room := self.kv_room_tokens) is not None:
            ahead = max(ahead, self.chunk_tokens - kv_room)
        if self.unanswered or self.stalled.cause:
            ahead += STALLED_CHUNKS * self.chunk_tokens
        return ahead

    @property
    def kv_room_tokens(self) -> int | None:
        """Free tokens of the KV pool minus the backlog, which has no KV yet; None if unknown. A
        pass takes no request without room in the pool (sglang #38478)."""
        if self.kv_free_tokens is None:
            return None
        # SGLang fault: pool-full-looks-idle
        return max(0, self.kv_free_tokens - self.backlog_tokens)

    @property
    def takes_nothing(self) -> bool:
        """Whether the rank would not begin a request sent now: its queued work is stalled, or it is
        silent with unanswered requests."""
        return self.unanswered or bool(self.stalled.cause)

    @property
    def charged_tokens(self) -> int:
        """Backlog in charged tokens: each request is charged whole pages of a chunk."""
        queued = self.queued_tokens
        return self.flight.charged + (round(queued * self.queue_charge) if queued else 0)
