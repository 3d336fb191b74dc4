"""Assigns the requests of a batch to the DP ranks of one instance, for the default policy:
Algorithm 2 of the paper, Prioritized Batch Allocation (PBAA), without its overshoot. :mod:`.paper`
has the literal algorithm. Pure. Must not know time, or why a batch leaves now."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.paging import paged
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.request import Request, uncached_tokens_of

RankOf = Callable[[Request, Sequence[int]], int | None]
"""Function that chooses the rank of a request with cached tokens on the instance, from the capacity
left per rank; it returns None if the request should wait."""


class Allocation(NamedTuple):
    """M and Q_next of Algorithm 2: requests with their DP ranks, and requests that stay."""

    placed: list[tuple[Request, int]]
    left: list[Request]


class Room:
    """Capacity left in the next pass on each rank of an instance: tokens, and requests if the
    engine limits their number."""

    __slots__ = ("_places", "_tokens", "free")

    def __init__(self, c_avail: Sequence[int], places: Sequence[float]) -> None:
        self._tokens = list(c_avail)
        self._places = list(places)
        self.free = list(c_avail)
        """Tokens left per rank for one more request; at most 0 where no more requests may join."""
        for rank in range(len(c_avail)):
            self._limit(rank)

    def take(self, rank: int, tokens: int) -> None:
        self._tokens[rank] -= tokens
        self._places[rank] -= 1
        self._limit(rank)

    def _limit(self, rank: int) -> None:
        tokens = self._tokens[rank]
        self.free[rank] = tokens if self._places[rank] > 0 else min(0, tokens)


class Target(NamedTuple):
    """The DP ranks of the instance that a batch is placed on, and their room in the next pass."""

    instance: InstanceId
    c_avail: Sequence[int]
    """Room per rank (C_avail), in charged tokens."""
    places: Sequence[float]
    """Number of requests that each rank still takes; infinite without a limit."""
    chunk_tokens: int
    """Chunk of each rank (C_chunk), in tokens."""
    page: int
    """Tokens per page. A request is charged whole pages, as C_avail and C_chunk are."""
    ranks: Sequence[int]
    """All ranks, in the order in which equally empty ones are preferred."""

    def need(self, request: Request, rank: int) -> int:
        """Return the tokens that a request is charged on a rank: uncached ones in whole pages."""
        hit_tokens = request.hit_tokens(self.instance, rank)
        return paged(request.prompt_tokens - hit_tokens, self.page)


def place_fitting(requests: Iterable[Request], to: Target, rank_of: RankOf) -> Allocation:
    """Place the longest request first on the emptiest rank, but only where all of it fits.

    A prompt longer than a chunk is cut anyway, so it goes where it takes no more passes than it has
    chunks. This removes the overshoot of Algorithm 2, whose leftovers cost the next batch a pass.
    The requests are placed again in another order, which packs less well, in two cases:

    - A request is left out and one of lower priority is placed.
    - A request is left out that was left out of several batches before.

    The second time, requests left out of ``Tuning.left_out_batches`` go first, and the others by
    priority.

    Args:
        requests: in any order. The longest is the one with most uncached tokens.
        to: the ranks of the instance.
        rank_of: chooses the rank of a request with cached tokens on the instance.
    """
    order = sorted(requests, key=lambda r: -r.uncached_tokens)
    allocation = _place(order, to, rank_of)
    lowest = min([request.priority for request, _ in allocation.placed], default=math.inf)
    if any(_is_left_out(left) or left.priority > lowest for left in allocation.left):
        order.sort(key=lambda r: (not _is_left_out(r), -r.priority))
        allocation = _place(order, to, rank_of)
    return allocation


def _is_left_out(request: Request) -> bool:
    return request.waited_batches >= TUNING.left_out_batches


def _place(requests: Iterable[Request], to: Target, rank_of: RankOf) -> Allocation:
    """Place requests in the order given, each where it fits whole."""
    room = Room(to.c_avail, to.places)
    placed: list[tuple[Request, int]] = []
    left: list[Request] = []
    for request in requests:
        rank = _rank_for(request, room.free, to, rank_of)
        if rank is None:
            left.append(request)
        else:
            placed.append((request, rank))
            room.take(rank, to.need(request, rank))
    return Allocation(placed, left)


def _rank_for(request: Request, free: Sequence[int], to: Target, rank_of: RankOf) -> int | None:
    if to.instance in request.hits.by_instance:
        return rank_of(request, free)
    emptiest = max(to.ranks, key=free.__getitem__)
    first_tokens = first_part(to.need(request, emptiest), to.chunk_tokens)
    return emptiest if free[emptiest] >= first_tokens else None


def first_part(tokens: int, chunk_tokens: int) -> int:
    """Return the tokens of a prompt that must fit into this pass so that the prompt takes no extra
    pass: all of it or, for a prompt of several chunks, the part that does not fill a chunk."""
    return (tokens - 1) % chunk_tokens + 1


def _best_hole(request: Request, free: Sequence[int], to: Target) -> int:
    """Return the rank with the most free tokens and cached tokens of the prompt together."""
    return max(range(len(free)), key=lambda d: free[d] + request.hit_tokens(to.instance, d))


def top_up(allocation: Allocation, to: Target, keep_tokens: float) -> Allocation:
    """Fill the room that :func:`place_fitting` left free with parts of the requests left over:
    those of low priority and the oldest first. A split prompt takes room in the next pass as well.
    So prompts are split only while more than ``keep_tokens`` uncached tokens are left over, and
    only to fill a hole of more than ``Tuning.least_hole_share`` of a chunk."""
    remaining = uncached_tokens_of(allocation.left)
    if remaining <= keep_tokens:
        return allocation
    room, hole_tokens = Room(to.c_avail, to.places), TUNING.least_hole_share * to.chunk_tokens
    for request, rank in allocation.placed:
        room.take(rank, to.need(request, rank))
    placed = list(allocation.placed)
    left: list[Request] = []
    for request in sorted(allocation.left, key=lambda r: (r.priority, r.order)):
        best = _best_hole(request, room.free, to)
        if remaining > keep_tokens and room.free[best] > hole_tokens:
            placed.append((request, best))
            room.take(best, to.need(request, best))
            remaining -= request.uncached_tokens
        else:
            left.append(request)
    return Allocation(placed, left)
