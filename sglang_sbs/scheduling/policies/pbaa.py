"""Algorithm 2 of the paper, Prioritized Batch Allocation (PBAA), basic and cache-aware: assigns the
requests of a batch to the DP ranks of one instance. Pure. Must not know time, or why a batch leaves
now."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from sglang_sbs.scheduling.paging import paged
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.request import Request, uncached_tokens_of

PrefixHit = Callable[[Request, int], int]
"""L_hit(r, d): tokens of the prompt the rank's cache already holds."""


class Allocation(NamedTuple):
    """M and Q_next of Algorithm 2."""

    placed: list[tuple[Request, int]]
    left: list[Request]


PrefixHits = Callable[[Request], Sequence[int] | None]
"""L_hit(r, d) for all ranks d of the instance; None if no rank has any of the prompt."""


RankOf = Callable[[Request, Sequence[int]], int | None]


def no_hits(_request: Request) -> None:
    """The basic mode."""
    return


def no_hit(_request: Request, _rank: int) -> int:
    """Basic mode."""
    return 0


class Room:
    """What the next pass still takes on each rank of an instance: tokens, and requests where the
    engine limits their number."""

    __slots__ = ("_page", "_places", "_tokens", "free", "hits_of")

    def __init__(
        self,
        c_avail: Sequence[int],
        places: Sequence[int] | None,
        page: int,
        hits_of: PrefixHits = no_hits,
    ) -> None:
        self._tokens = list(c_avail)
        unlimited: Sequence[float] = [math.inf] * len(c_avail)
        self._places = list(places or unlimited)
        self._page = page
        self.hits_of = hits_of
        self.free = list(c_avail)
        """Tokens for one more request."""
        for rank in range(len(c_avail)):
            self._limit(rank)

    def need(self, request: Request, rank: int) -> int:
        """Tokens that a request is charged on a rank."""
        hits = self.hits_of(request)
        return paged(request.prompt_tokens - (0 if hits is None else hits[rank]), self._page)

    def take(self, rank: int, tokens: int) -> None:
        self._tokens[rank] -= tokens
        self._places[rank] -= 1
        self._limit(rank)

    def _limit(self, rank: int) -> None:
        tokens = self._tokens[rank]
        self.free[rank] = tokens if self._places[rank] > 0 else min(0, tokens)


def pbaa(
    pending: Iterable[Request],
    new: Iterable[Request],
    c_avail: Sequence[int],
    prefix_hit_tokens: PrefixHit = no_hit,
    page: int = 1,
    places: Sequence[int] | None = None,
) -> Allocation:
    """Phases 1 and 2 of Algorithm 2: pending before new, each longest first.

    A request goes to the rank with the most capacity left after it, as long as that rank's
    ``C_avail`` is positive, so a rank may be overshot by at most one request. Phase 3 (counting
    ``r.wait``) belongs to the caller, who knows what a cycle is.

    Args:
        pending: unassigned requests of earlier cycles.
        new: requests that have not been through a cycle.
        c_avail: C_avail per DP rank, uncached tokens; not modified.
        prefix_hit_tokens: L_hit; the default is the basic mode.
        page: tokens per page. A request is charged whole pages.
        places: how many requests each rank still takes; None: any number.
    """
    room = Room(c_avail, places, page)
    ranks = range(len(c_avail))
    placed: list[tuple[Request, int]] = []
    left: list[Request] = []
    for queue in (pending, new):
        longest_first = sorted(queue, key=attrgetter("prompt_tokens"), reverse=True)
        for position, request in enumerate(longest_first):
            if max(room.free) <= 0:
                left += longest_first[position:]
                break
            after = [
                room.free[d] - paged(request.prompt_tokens - prefix_hit_tokens(request, d), page)
                for d in ranks
            ]
            best = max(ranks, key=after.__getitem__)
            if room.free[best] > 0:
                placed.append((request, best))
                room.take(best, room.free[best] - after[best])
            else:
                left.append(request)
    return Allocation(placed, left)


def place_fitting(
    requests: Iterable[Request],
    c_avail: Sequence[int],
    chunk_tokens: int,
    hits_of: PrefixHits = no_hits,
    rank_of: RankOf | None = None,
    received_tokens: Sequence[int] | None = None,
    page: int = 1,
    places: Sequence[int] | None = None,
) -> Allocation:
    """Longest first into the emptiest rank, but only where the whole request fits in the pass.

    A prompt longer than a chunk is cut anyway: it goes where it takes no more passes than it has
    chunks. This removes the overshoot of Algorithm 2 (its leftovers cost the next batch a pass).
    If a request is left out and one of lower priority is placed, or if it was left out of several
    batches before, all are placed anew, which packs less well: first those that were left out so
    often, then in the order of priority.

    Args:
        requests: in any order. The longest is the one with most uncached tokens.
        c_avail: C_avail per DP rank; not modified.
        chunk_tokens: C_chunk.
        hits_of: L_hit on these ranks.
        rank_of: chooses the rank of a request that has hits, given the capacities left. It returns
            None if the request should wait.
        received_tokens: tokens that each rank was ever sent. Of equally empty ranks the one with
            the fewest is taken, so that all caches fill alike.
        page: tokens per page. A request is charged whole pages, as C_avail and C_chunk are.
        places: how many requests each rank still takes; None: any number.
    """
    order = sorted(requests, key=lambda r: -r.uncached_tokens)
    more = chunk_tokens, rank_of, received_tokens
    room = Room(c_avail, places, page, hits_of)
    placed, left = _place(order, room, *more)
    highest = max([request.priority for request in left], default=-math.inf)
    lowest = min([request.priority for request, _ in placed], default=math.inf)
    if highest > lowest or any(_is_left_out(request) for request in left):
        order.sort(key=lambda r: (not _is_left_out(r), -r.priority))
        room = Room(c_avail, places, page, hits_of)
        placed, left = _place(order, room, *more)
    return Allocation(placed, left)


def _is_left_out(request: Request) -> bool:
    return request.waited_batches >= TUNING.left_out_batches


def _place(
    requests: Iterable[Request],
    room: Room,
    chunk_tokens: int,
    rank_of: RankOf | None,
    received_tokens: Sequence[int] | None,
) -> tuple[list[tuple[Request, int]], list[Request]]:
    """Place requests in the order given, and return those placed and those left. Changes
    ``room``."""
    placed: list[tuple[Request, int]] = []
    left: list[Request] = []
    rank: int | None
    for request in requests:
        if rank_of is None or room.hits_of(request) is None:
            rank = _emptiest(room.free, received_tokens)
            need = room.need(request, rank)
            if room.free[rank] < first_part(need, chunk_tokens):
                rank = None
        else:
            rank = rank_of(request, room.free)
            need = 0 if rank is None else room.need(request, rank)
        if rank is None:
            left.append(request)
        else:
            placed.append((request, rank))
            room.take(rank, need)
    return placed, left


def _emptiest(capacity: Sequence[int], received_tokens: Sequence[int] | None) -> int:
    room = max(capacity)
    if received_tokens is None or capacity.count(room) == 1:
        return capacity.index(room)
    equal = [d for d, free in enumerate(capacity) if free == room]
    return min(equal, key=received_tokens.__getitem__)


def first_part(tokens: int, chunk_tokens: int) -> int:
    """Tokens that must fit into this pass so that a prompt takes no more passes than it has to: all
    of it, or if it takes several the part that does not fill a chunk."""
    return tokens if tokens <= chunk_tokens else tokens % chunk_tokens or chunk_tokens


def top_up(
    allocation: Allocation,
    c_avail: Sequence[int],
    chunk_tokens: int,
    keep_tokens: float,
    hits_of: PrefixHits = no_hits,
    hole_share: float = TUNING.least_hole_share,
    page: int = 1,
    places: Sequence[int] | None = None,
) -> Allocation:
    """Fill what :func:`place_fitting` left free by splitting the oldest leftovers over two passes,
    low priority first. Only while more than ``keep_tokens`` uncached tokens are left over, and only
    holes of at least ``hole_share`` of a chunk: splitting costs the next pass."""
    remaining = uncached_tokens_of(allocation.left)
    if remaining <= keep_tokens:
        return allocation
    room = Room(c_avail, places, page, hits_of)
    for request, rank in allocation.placed:
        room.take(rank, room.need(request, rank))
    placed = list(allocation.placed)
    left: list[Request] = []
    for request in sorted(allocation.left, key=lambda r: (r.priority, r.order)):
        if remaining <= keep_tokens:
            left.append(request)
            continue
        hits = hits_of(request) or [0] * len(c_avail)
        after = [free + hit for free, hit in zip(room.free, hits, strict=True)]
        best = after.index(max(after))
        if room.free[best] > hole_share * chunk_tokens:
            placed.append((request, best))
            room.take(best, room.need(request, best))
            remaining -= request.uncached_tokens
        else:
            left.append(request)
    return Allocation(placed, left)
