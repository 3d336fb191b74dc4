"""The queue of waiting requests."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from sglang_sbs.scheduling.events import RequestArrived
from sglang_sbs.scheduling.prefix.index import PrefixIndex
from sglang_sbs.scheduling.queue.fairness import MOST_TENANT_CHARS, TenantTurns
from sglang_sbs.scheduling.queue.priority import clamped_priority, clamped_slo_s
from sglang_sbs.scheduling.request import Request


def arrived(event: RequestArrived, order: int, now_s: float, timeout_s: float) -> Request:
    """Build a request from its event, with its values clamped. ``order``: arrival number.
    ``timeout_s``: longest wait if the event has no deadline."""
    return Request(
        rid=event.rid,
        order=order,
        prompt_tokens=max(1, event.prompt_tokens),
        estimated=event.estimated,
        max_new_tokens=event.max_new_tokens,
        arrived_s=now_s,
        deadline_s=now_s + timeout_s if event.deadline_s is None else event.deadline_s,
        exclude=event.exclude,
        blocks=event.blocks if event.block_tokens > 0 else (),
        block_tokens=event.block_tokens,
        session=event.session,
        priority=clamped_priority(event.priority),
        ttft_slo_s=clamped_slo_s(event.ttft_slo_s),
        tenant=event.tenant[:MOST_TENANT_CHARS],
    )


@dataclass(slots=True)
class RequestQueue:
    """Requests waiting for a dispatch; iterates in arrival order. A request's cache hits are looked
    up again when it is visited. Its place in the policy's order changes when a longer part of its
    prompt is cached somewhere (:meth:`reorder`)."""

    key_of: Callable[[Request], float] = lambda request: request.arrived_s
    """Sort key of the policy's order; constant while a request waits and its hits stay the same."""
    prefix: PrefixIndex = field(default_factory=PrefixIndex)
    turns: TenantTurns = field(default_factory=TenantTurns)
    """Turns of the tenants, used while several have waiting requests."""
    tokens: int = 0
    """Uncached prompt tokens of all waiting requests."""
    _requests: dict[str, Request] = field(default_factory=dict)
    _deadlines: list[tuple[float, int, Request]] = field(default_factory=list)
    _lengths: list[tuple[int, int]] = field(default_factory=list)
    """(prompt tokens, arrival number) of each request, ascending."""
    _over_limit: set[str] = field(default_factory=set)
    _watches: dict[str, int] = field(default_factory=dict)
    """First block of the prompt that no rank holds, by request id; watched in the prefix index."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, rid: object) -> bool:
        return rid in self._requests

    def __iter__(self) -> Iterator[Request]:
        return map(self._looked_up, self._requests.values())

    def order_by(self, key_of: Callable[[Request], float]) -> None:
        """Sort all waiting requests by another policy's key; tenants keep their service counts."""
        self.key_of = key_of
        for request in self._requests.values():
            request.key = key_of(request)
        self.turns.sort()

    def look_at(self, request: Request) -> None:
        """Set cache hits and sort key of a request that is about to be added."""
        self.look_up(request)
        request.key = self.key_of(request)

    def add(self, request: Request) -> None:
        """Add a request; the order of calls is the arrival order."""
        self.look_at(request)
        self._requests[request.rid] = request
        self.turns.add(request)
        insort(self._deadlines, (request.deadline_s, request.order, request))
        insort(self._lengths, (request.prompt_tokens, request.order))
        self.tokens += request.uncached_tokens
        if request.blocks:
            self._watch(request)

    def remove(self, rid: str) -> Request | None:
        """Remove a request at any position and return it; None: it does not wait here."""
        request = self._requests.pop(rid, None)
        if request is not None:
            self.tokens -= request.uncached_tokens
            self._over_limit.discard(rid)
            if rid in self._watches:
                self.prefix.unwatch(self._watches.pop(rid), rid)
            order = request.order
            self.turns.remove(request)
            del self._deadlines[bisect_left(self._deadlines, (request.deadline_s, order))]
            del self._lengths[bisect_left(self._lengths, (request.prompt_tokens, order))]
        return request

    def dispatch(self, request: Request) -> None:
        """Remove a waiting request that is served now, and charge its tenant."""
        self.turns.charge(request)
        self.remove(request.rid)

    def ahead_tokens(self, request: Request) -> float:
        """Estimate the waiting tokens served before this request, which need not be queued."""
        if not self._requests:
            return 0.0
        return self.tokens * min(1.0, self.turns.ahead(request) / len(self._requests))

    @property
    def oldest(self) -> Request | None:
        return next(iter(self), None)

    def oldest_of(self, wanted: Callable[[Request], bool], most: int) -> Request | None:
        """Return the oldest ``wanted`` request among the ``most`` oldest; None: there is none."""
        return next(filter(wanted, islice(self, most)), None)

    def in_order(self) -> Iterator[Request]:
        """Yield all waiting requests in the policy's order; if several tenants wait, in their
        turns. Do not change the queue meanwhile."""
        if self.turns.several:
            yield from map(self._looked_up, self.turns.in_turn())
            return
        hits_version = self.prefix.changes.version
        upcoming_version = self.prefix.coming.version
        for _, _, request in self.turns.by_key():
            # Repeated here, because a call per request would dominate the cost of a decision.
            if request.blocks and not (
                request.hits_version == hits_version
                and request.upcoming_version == upcoming_version
            ):
                self._looked_up(request)
            yield request

    def first(self, count: int) -> Iterator[Request]:
        """Return the first ``count`` requests by sort key, regardless of tenants' turns, with the
        hits of their last lookup."""
        return (request for _, _, request in islice(self.turns.by_key(), count))

    def look_up(self, request: Request) -> None:
        """Look up the request's cache hits, if they may have changed since the last lookup."""
        prefix = self.prefix
        if not request.blocks:
            return
        changes = prefix.changes
        if request.hits_version != changes.version:
            if changes.concern(request.blocks, request.hits_version):
                request.hits = prefix.find(
                    request.blocks, request.block_tokens, request.prompt_tokens
                )
                request.uncached_tokens = request.prompt_tokens - request.hits.best_tokens
            request.hits_version = changes.version
        coming = prefix.coming
        if request.upcoming_version != coming.version:
            # Most prompts begin like no other, so this is asked first.
            begins_like = request.upcoming or coming.begins_like(request.blocks)
            if begins_like and coming.changed(request.blocks, request.upcoming_version):
                request.upcoming = prefix.upcoming(
                    request.blocks, request.block_tokens, request.prompt_tokens
                )
            request.upcoming_version = coming.version

    def reorder(self) -> None:
        """Move the requests that have more cached tokens than when they got their place."""
        for rid in self.prefix.take_appeared():
            request = self._requests.get(rid)
            if request is None:
                continue
            self._watches.pop(rid, None)
            self.turns.remove(request)
            self._looked_up(request)
            request.key = self.key_of(request)
            self.turns.add(request)
            self._watch(request)

    def _watch(self, request: Request) -> None:
        if not request.block_tokens:
            return
        held = request.hits.best_tokens // request.block_tokens
        if held < len(request.blocks):
            block = request.blocks[held]
            self._watches[request.rid] = block
            self.prefix.watch(block, request.rid)

    def _looked_up(self, request: Request) -> Request:
        if request.blocks:
            before = request.uncached_tokens
            self.look_up(request)
            self.tokens += request.uncached_tokens - before
        return request

    @property
    def longest_prompt_tokens(self) -> int:
        """Prompt tokens of the longest waiting request, including cached ones."""
        return self._lengths[-1][0] if self._lengths else 0

    def next_deadline_s(self) -> float:
        return self._deadlines[0][0] if self._deadlines else math.inf

    def expired(self, now_s: float) -> list[Request]:
        """Remove and return the requests past their deadline."""
        ends = bisect_left(self._deadlines, (now_s, math.inf))
        over = [request for _, _, request in self._deadlines[:ends]]
        for request in over:
            self.remove(request.rid)
        return over

    def count_batch(self, passed_over: Iterable[Request], instances: int, n_limit: int) -> None:
        """Count a batch for the requests that it passed over (Phase 3 of Algorithm 2). A cycle is
        one batch per instance: with 64 instances, a request that only waits for the next pass would
        otherwise exceed ``n_limit``."""
        cycle = 1 / instances
        for request in passed_over:
            request.waited_batches += 1
            request.waited_cycles += cycle
            if request.waited_cycles > n_limit and request.rid in self._requests:
                self._over_limit.add(request.rid)

    @property
    def over_limit(self) -> bool:
        """Whether a waiting request has waited more than N_limit cycles."""
        return bool(self._over_limit)
