"""What the scheduler believes is at one DP rank of a prefill instance.

Presumed
--------
The barrier: the message of one rank about a pass says that all ranks launched it, and its
``tokens_per_rank`` how many tokens each of them computes. So until a rank's own message about that
pass comes (or for good, if it was lost) this many tokens are presumed to have left its queue and,
first come first served, its requests in flight. Its next message decides: :meth:`PrefillRank.heard`
takes all presumptions back, what the message names or counts is acknowledged then, and passes that
the message does not know of yet are presumed once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_sbs.scheduling.paging import paged
from sglang_sbs.scheduling.prefill.passes import Pass, Sent
from sglang_sbs.scheduling.prefill.report_limits import MOST_CHUNKS, MOST_PASSES
from sglang_sbs.scheduling.prefill.stalled_work import StalledWork
from sglang_sbs.scheduling.report_cursor import ReportCursor
from sglang_sbs.scheduling.token_ledger import TokenLedger
from sglang_sbs.wire import EndForward

STALLED_CHUNKS = 1000
"""A rank that takes nothing counts as if so many chunks were ahead: no policy prefers it."""
_REMEMBERED_PASSES = 16
"""Older ones are taken for facts: the rank may never be heard."""


MOST_TAKEN = 64
"""The newest ones: a rank may never tell of a launch."""


class Presumed(NamedTuple):
    """A request in flight that is presumed to be accepted."""

    tokens: int
    """As they were in flight."""
    sent: Sent | None
    forward_id: int
    """The first pass presumed to contain some of it."""


class PromptProgress:
    """The prompts of one rank that are not computed yet, oldest first: what attention costs depends
    on how far each is, as the last chunk of a long one costs far more than its first.

    Ranks report tokens, not contexts; but they compute first come first served, so the tokens of
    each pass tell where in which prompt it was. Drift ends with the requests it is about."""

    __slots__ = ("_prompts",)

    def __init__(self) -> None:
        self._prompts: dict[str, list[int]] = {}
        """Request id to prompt tokens, how many of them are computed, and how many were cached when
        it was sent."""

    def add(self, rid: str, prompt_tokens: int, cached_tokens: int = 0) -> None:
        """A request was dispatched to the rank, which has the beginning of its prompt."""
        self._prompts[rid] = [prompt_tokens, cached_tokens, cached_tokens]

    def drop(self, rid: str) -> bool:
        return self._prompts.pop(rid, None) is not None

    def clear(self) -> None:
        self._prompts.clear()

    def waiting(self) -> Iterable[Sequence[int]]:
        """Prompt tokens of each, how many of them are computed, and how many were cached."""
        return self._prompts.values()

    @property
    def longest_tokens(self) -> int:
        return max([prompt[0] for prompt in self._prompts.values()], default=0)

    def pairs(self, tokens: int) -> float:
        """Attention pairs of the next ``tokens`` tokens: chunk * (context + chunk / 2) summed."""
        pairs = 0.0
        for prompt_tokens, computed, _ in self._prompts.values():
            part = min(tokens, prompt_tokens - computed)
            pairs += part * (computed + part / 2)
            tokens -= part
            if tokens <= 0:
                break
        return pairs

    def compute(self, tokens: int) -> float:
        """A pass takes so many tokens. Returns their pairs."""
        pairs = 0.0
        done = []
        for rid, prompt in self._prompts.items():  # of thousands only the first few are looked at
            part = min(tokens, prompt[0] - prompt[1])
            pairs += part * (prompt[1] + part / 2)
            prompt[1] += part
            tokens -= part
            if prompt[1] == prompt[0]:
                done.append(rid)
            if tokens <= 0:
                break
        for rid in done:
            del self._prompts[rid]
        return pairs


@dataclass(slots=True)
class PrefillRank:
    """One DP rank. Tokens are uncached prompt tokens."""

    flight: TokenLedger = field(default_factory=TokenLedger)
    """U_flight by request: dispatched, and neither accepted by the rank nor presumed to be."""
    sent: dict[str, Sent] = field(default_factory=dict)
    """One for each request in flight."""
    taken: list[Sent] = field(default_factory=list)
    """Of those an idle rank has named and not launched: it waits for the rest of the batch."""
    queued_tokens: int = 0
    """R_queued as last reported, less what passes since then are presumed to have taken."""
    queue_charge: float = 1.0
    """What a token of the queue costs of the chunk, by the pages of the requests in it."""
    queue_density: float = 0.0
    """Requests per token of the queue; only kept where passes have a limit of requests."""
    page: int = 1
    """Tokens per page that a request is charged."""
    chunk_tokens: int = 0
    most_requests: int = 0
    """Of a pass (``PrefillAdder.add_one_req`` in SGLang's ``schedule_policy.py``: per rank, what is
    left of a cut request counted); 0: no limit."""
    outstanding: TokenLedger = field(default_factory=TokenLedger)
    """Everything dispatched here and not yet prefilled, whatever its state."""
    prompts: PromptProgress = field(default_factory=PromptProgress)
    """How far each of them is computed."""
    cursor: ReportCursor = field(default_factory=ReportCursor)
    clean: bool = False
    """Forgotten when the instance went down: whatever is here now was sent to the next boot."""
    received_tokens: int = 0
    """Uncached prompt tokens ever sent here, which is what fills its prefix cache."""
    has_cached: bool = False
    """Whether any request was sent here because of what the rank has cached."""
    stalled: StalledWork = field(default_factory=StalledWork)
    """Whether it takes what waits there."""
    unanswered: bool = False
    """It fell silent with requests that prefill has not answered."""
    kv_free_tokens: int | None = None
    """Room in its KV pool as last reported; None: unknown."""
    idle: bool = True
    left_waiting: bool = False
    """The last pass whose end it reported left something that the next one can start with."""
    last_forward_id: int = -1
    """Newest pass whose end the rank reported."""
    launched_id: int = -1
    """Newest pass whose launch is contained in what the rank said last."""
    presumed: dict[str, Presumed] = field(default_factory=dict)
    """Oldest first, and all older than those in flight. One that ended meanwhile (it is not in
    ``outstanding``) stays, as the rank's counter and passes contain it."""
    presumed_passes: dict[int, int] = field(default_factory=dict)
    """Tokens of this rank in passes after ``launched_id``, by forward id, ascending."""

    def set_limits(self, page: int, chunk_tokens: int, most_requests: int) -> None:
        """Requests are charged pages of so many tokens from now on, and passes end at these."""
        self.page = page
        self.chunk_tokens = chunk_tokens
        self.most_requests = most_requests
        self.flight.set_page(page)

    def forget(self) -> None:
        """Drop everything believed to be at the rank; its report counters stay, and so does how far
        each prompt is: if the rank was only silent, it goes on with them."""
        self.flight.clear()
        self.sent.clear()
        self.taken.clear()
        self.outstanding.clear()
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
        """Nothing was received of it for long while others spoke: what it reported is no fact."""
        self.queued_tokens = 0
        self.kv_free_tokens = None
        self.idle = True

    def new_boot(self) -> None:
        self.last_forward_id = self.launched_id = -1
        self.presumed_passes.clear()
        self.taken.clear()
        self.left_waiting = False

    @property
    def newest_id(self) -> int:
        return max(self.last_forward_id, self.launched_id)

    def land(self, rid: str) -> Sent | None:
        """The request is not in flight any more; how it was sent, if it was."""
        self.flight.pop(rid)
        return self.sent.pop(rid, None)

    def gone(self, rid: str) -> bool:
        """The request is prefilled or ended otherwise; whether it was here until now."""
        known = self.outstanding.pop(rid) is not None
        known |= self.prompts.drop(rid) | (self.flight.pop(rid) is not None)
        known |= self.sent.pop(rid, None) is not None
        if rid in self.presumed:
            self.presumed[rid] = self.presumed[rid]._replace(sent=None)
        return known

    def contradicts(self, report: EndForward) -> bool:
        """Whether the rank was believed to be further than it says now: that was no true message,
        as it counts upwards."""
        if report.kind == "forward" and report.forward_id < self.last_forward_id:
            return True
        of_pass = report.kind in ("forward", "launch")
        return of_pass and report.forward_id + MOST_PASSES < self.launched_id

    def heard(self, launched_id: int) -> None:
        """The rank speaks, of a state that contains passes up to this one: facts come now."""
        if self.presumed:
            self.flight.add_oldest({rid: one.tokens for rid, one in self.presumed.items()})
            back = {rid: one.sent for rid, one in self.presumed.items() if one.sent is not None}
            self.sent = {**back, **self.sent}
            self.presumed.clear()
        self.launched_id = max(self.launched_id, launched_id)

    def on_queue(self, report: EndForward, chunk_tokens: int) -> None:
        """R_queued of a report, in tokens and what they cost."""
        most = self.outstanding.total + MOST_CHUNKS * chunk_tokens
        self.queued_tokens = min(self._uncached_queue(report), most)
        free = report.kv_capacity_tokens - report.kv_tokens
        self.kv_free_tokens = max(0, free) if report.kv_capacity_tokens else None
        self.queue_charge = 1.0
        cut = report.chunk_remainder_tokens > 0
        requests = report.waiting_requests + report.bootstrapping_requests + cut
        if self.most_requests and self.queued_tokens:
            most = len(self.outstanding) + MOST_CHUNKS * self.most_requests
            self.queue_density = max(1, min(requests, most)) / self.queued_tokens
        if self.page > 1 and self.queued_tokens:
            here = self._youngest(requests)
            unknown = (requests - len(here)) * (self.page // 2)
            more = unknown + sum([-self.outstanding[rid] % self.page for rid in here])
            self.queue_charge = min(self.page, 1.0 + more / self.queued_tokens)

    def _youngest(self, requests: int) -> list[str]:
        """So many at the rank, those that came last; fewer if they are not known."""
        here = [rid for rid in self.outstanding.oldest() if rid not in self.flight]
        return here[max(0, len(here) - requests) :]

    def _uncached_queue(self, report: EndForward) -> int:
        """R_queued of a report. SGLang looks a prefix up when it schedules a request, so until then
        it counts the whole prompt; we count what is left of it by our books."""
        queued = report.queued_tokens
        requests = report.waiting_requests + report.bootstrapping_requests
        if not self.has_cached or not requests:
            return queued
        here = self._youngest(requests)
        if len(here) < requests:
            return queued
        uncached = sum(self.outstanding[rid] for rid in here)
        return min(queued, uncached + report.chunk_remainder_tokens)

    def give_up(self, before_s: float) -> None:
        """What was sent before this time and never heard of is lost on its way; should it come
        after all, the rank's own queue tells of it."""
        for rid in self.flight.oldest():
            sent = self.sent.get(rid)
            if sent is not None and sent.at_s < before_s:
                self.land(rid)

    def take_chunk(self, room: int) -> tuple[int, int, dict[str, Sent | None]]:
        """A pass of so many charged tokens takes the front of the backlog. Returns tokens of
        R_queued and of U_flight in it, and the requests of U_flight that it completes, with how
        they were sent."""
        queued = min(self.queued_tokens, int(room / self.queue_charge))
        places = self.most_requests or room
        if self._requests_of(queued) > places:
            queued = round(places / self.queue_density)
        self.queued_tokens -= queued
        room -= round(queued * self.queue_charge)
        places -= self._requests_of(queued)
        tokens = 0
        landed: dict[str, Sent | None] = {}
        for rid in self.flight.oldest(max(0, places)):
            if room <= 0:
                break
            part = min(room, self.flight[rid])
            room -= paged(part, self.page)
            tokens += part
            if part == self.flight[rid]:
                landed[rid] = self.land(rid)
            else:
                self.flight.reduce(rid, part)
        return queued, tokens, landed

    def take_back(self, index: int, passes: Iterable[Pass]) -> None:
        """They were not launched as presumed. ``index``: of this rank."""
        for one in passes:
            self.queued_tokens += one.queued[index]
            for rid, (at, sent) in one.rids.items():
                if at == index and rid in self.outstanding:
                    self.flight.add(rid, 0)
                    self.sent[rid] = sent
        # Whole again, and the oldest in front: that order is what a lost report is healed by.
        for rid in self.outstanding.oldest():
            if rid in self.flight:
                self.flight.add(rid, self.outstanding[rid])

    def presume_again(self, full_tokens: int) -> None:
        """After the facts of a message: the passes it does not know of yet."""
        passes, self.presumed_passes = self.presumed_passes, {}
        for forward_id, tokens in passes.items():
            self.presume(forward_id, tokens, full_tokens)
        for rid in self.flight.oldest():
            if rid not in self.outstanding:
                self.flight.pop(rid)

    def presume(self, forward_id: int, tokens: int, full_tokens: int) -> None:
        """Another rank says that this one computes ``tokens`` in the pass ``forward_id``. One that
        the rank's state contains already, or older than one presumed before, changes nothing.
        ``full_tokens``: charged so many, the chunk is full, so the last request in it may be cut,
        and what was sent together with it waits behind it."""
        newest = next(reversed(self.presumed_passes), self.launched_id)
        if self.clean or forward_id <= newest:
            return
        self.presumed_passes[forward_id] = tokens
        if len(self.presumed_passes) > _REMEMBERED_PASSES:
            # Nothing was heard of the rank for long: what is presumed of the oldest stays so.
            oldest = next(iter(self.presumed_passes))
            del self.presumed_passes[oldest]
            later = {rid: one for rid, one in self.presumed.items() if one.forward_id > oldest}
            self.presumed = later
        queued = min(tokens, self.queued_tokens)
        self.queued_tokens -= queued
        new = left = tokens - queued
        full = self._charge_of(queued, new) >= full_tokens
        taken = 0
        places = self.most_requests - self._requests_of(queued)
        sent_s: float | None = None
        for rid in self.flight.oldest():
            if self.most_requests and places <= 0:
                full, left = True, 0
            places -= 1
            size = self.flight[rid]
            sent = self.sent.get(rid)
            with_last = sent is not None and sent.at_s == sent_s
            if left <= 0 and not with_last:
                break
            # Lengths may be told wrongly, and part of a prompt be cached: what comes nearest, and
            # of those that were sent together all, unless too much is missing for that.
            together = with_last and 2 * new >= taken + size
            if taken and not full and 2 * left < size and not together:
                break
            self.land(rid)
            self.presumed[rid] = Presumed(size, sent, forward_id)
            if full and size > left:
                self._wait(size - left)
            left = max(0, left - size)
            taken += size
            sent_s = None if sent is None else sent.at_s

    def _charge_of(self, queued: int, new: int) -> int:
        """What these tokens of the queue and of the oldest in flight cost."""
        charge = round(queued * self.queue_charge)
        if self.page == 1:
            return charge + new
        for rid in self.flight.oldest():
            part = min(new, self.flight[rid])
            charge += paged(part, self.page)
            new -= part
            if new <= 0:
                break
        return charge + new

    def _wait(self, tokens: int) -> None:
        """A request, or what is left of one, waits at the rank for a pass to come."""
        requests = self._requests_of(self.queued_tokens) + 1
        self.queued_tokens += tokens
        if self.most_requests:
            self.queue_density = requests / self.queued_tokens

    def _requests_of(self, queued_tokens: int) -> int:
        """In so many tokens of the queue; 0 where nobody counts them."""
        if not self.most_requests or not queued_tokens:
            return 0
        return max(1, round(queued_tokens * self.queue_density))

    def next_tokens(self, chunk_tokens: int) -> int:
        """What of the backlog fits into a pass."""
        tokens, charged = self.backlog_tokens, self.charged_tokens
        most = tokens if charged <= chunk_tokens else chunk_tokens * tokens // charged
        if self.most_requests and self.backlog_requests > self.most_requests:
            return min(most, self.most_requests * tokens // self.backlog_requests)
        return most

    @property
    def backlog_tokens(self) -> int:
        """U_flight + R_queued: ahead of a new request in the passes to come."""
        return self.flight.total + self.queued_tokens

    @property
    def backlog_requests(self) -> int:
        """The same, where passes have a limit of requests."""
        return len(self.flight) + self._requests_of(self.queued_tokens)

    @property
    def ahead_tokens(self) -> int:
        """What a new request finds taken of the chunks to come: what is charged, and whole passes
        that hold as many requests as they may."""
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
        """Room in its KV pool beside what is on its way and what waits there, which has no KV yet.
        A pass takes no request that the pool has no room for (sglang #38478)."""
        if self.kv_free_tokens is None:
            return None
        # SGLang fault: pool-full-looks-idle
        return max(0, self.kv_free_tokens - self.backlog_tokens)

    @property
    def takes_nothing(self) -> bool:
        """Whatever is sent there would wait: for a pass that does not come, or for an answer."""
        return self.unanswered or bool(self.stalled.cause)

    @property
    def charged_tokens(self) -> int:
        """What the backlog costs of the chunks to come."""
        queued = self.queued_tokens
        return self.flight.charged + (round(queued * self.queue_charge) if queued else 0)
