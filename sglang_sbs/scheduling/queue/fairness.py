"""Shares the passes among tenants: weighted deficit round robin over the order of the queue.

A tenant's service is the number of tokens it was served over its weight. Its service divided by the
quantum is the tenant's round. Tenants of an earlier round go first; within a round, the tenant with
the most urgent next request does. So a request that exceeds the quantum is paid for in later
rounds, as in deficit round robin (Shreedhar and Varghese, 1995). Two tenants that both wait are
never further apart than a quantum and their largest request.

A tenant that had no waiting request starts at the round of the others (as in start-time fair
queueing), so turns cannot be saved up. When the queue is empty, all service is forgotten.

Clients choose the names of tenants, so at most :data:`MOST_TENANTS` are distinguished.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING

from sglang_sbs.scheduling.config import LEAST_WEIGHT, MOST_WEIGHT
from sglang_sbs.scheduling.events import MAX_TENANT_CHARS

if TYPE_CHECKING:
    from sglang_sbs.scheduling.request import Request

QUANTUM_TOKENS = 2048
"""Tokens that a tenant with weight 1 is served per turn."""
MOST_TENANTS = 1024
MOST_TENANT_CHARS = MAX_TENANT_CHARS
SHARED = ""
"""Tenant of requests without one, and of all tenants beyond the limit."""

Entry = tuple[float, int, "Request"]
"""A waiting request as (sort key, arrival number, request)."""


def parse_weights(text: str) -> dict[str, float]:
    """Return the weights by tenant in a text such as ``gold=3,free=0.5``. Raises: ValueError: the
    text is invalid; the message shows what to write instead."""
    weights: dict[str, float] = {}
    for word in text.split(","):
        name, equals, number = word.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        known = 0 < len(name) <= MOST_TENANT_CHARS and name not in weights
        if not equals or not known or not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            raise ValueError(
                f"{word!r}: write NAME=WEIGHT, each name once, with a weight between "
                f"{LEAST_WEIGHT:g} and {MOST_WEIGHT:g}, as in gold=3,free=0.5"
            )
        weights[name] = weight
    return weights


class TenantTurns:
    """Waiting requests by tenant, and the service each tenant has received."""

    def __init__(self, weights: Mapping[str, float] = MappingProxyType({})) -> None:
        """``weights``: by tenant name; 1 for all others."""
        self._weights = weights
        self._waiting: dict[str, list[Entry]] = {}
        """Entries by tenant in key order; no empty lists."""
        self._merged: list[Entry] | None = None
        """All entries in key order, from the arrival of a second tenant until the queue is empty;
        None otherwise. Decisions ask for the first few, and merging one list per tenant is slow."""
        self._served: dict[str, float] = {}
        """Service by tenant: served tokens divided by weight, since the queue was last empty."""
        self._now = 0.0
        """Service at which new tenants start: that of the tenant served last, before its turn."""

    def add(self, request: Request) -> None:
        """Add a waiting request, ordered by ``request.key``. If there are ``MOST_TENANTS`` already,
        its tenant becomes ``SHARED``."""
        if request.tenant not in self._served and len(self._served) >= MOST_TENANTS:
            self._forget_idle()
            if len(self._served) >= MOST_TENANTS:
                request.tenant = SHARED
        tenant = request.tenant
        waiting = self._waiting.get(tenant)
        if waiting is None:
            waiting = self._waiting[tenant] = []
            self._served[tenant] = max(self._now, self._served.get(tenant, 0.0))
        entry = request.key, request.order, request
        insort(waiting, entry)
        if self._merged is not None:
            insort(self._merged, entry)
        elif self.several:
            self._merged = sorted(chain.from_iterable(self._waiting.values()))

    def remove(self, request: Request) -> None:
        """Remove a request, which must still have the key it was added with."""
        waiting = self._waiting[request.tenant]
        del waiting[bisect_left(waiting, (request.key, request.order))]
        if self._merged is not None:
            del self._merged[bisect_left(self._merged, (request.key, request.order))]
        if not waiting:
            del self._waiting[request.tenant]
        if not self._waiting:
            self._merged = None
            self._served.clear()
            self._now = 0.0

    def sort(self) -> None:
        """Sort all waiting requests again after their keys have changed."""
        for tenant, waiting in self._waiting.items():
            self._waiting[tenant] = sorted(
                (request.key, request.order, request) for _, _, request in waiting
            )
        if self._merged is not None:
            self._merged = sorted(chain.from_iterable(self._waiting.values()))

    @property
    def active(self) -> bool:
        """Whether a request with a tenant has come since the queue was last empty."""
        return len(self._served) > (SHARED in self._served)

    def charge(self, request: Request) -> None:
        """Add the request's price to its tenant's service when it is served. Does nothing until a
        request with a tenant has come since the queue was last empty."""
        if not self.active:
            return
        served = self._served[request.tenant]
        self._now = max(self._now, served)
        self._served[request.tenant] = served + self._price(request)

    @property
    def tenants(self) -> int:
        """Number of tenants with waiting requests; 0 if no request has a tenant."""
        return len(self._waiting) if self.active else 0

    @property
    def several(self) -> bool:
        """Whether requests of more than one tenant are waiting."""
        return len(self._waiting) > 1

    def by_key(self) -> Iterable[Entry]:
        """Return all entries in key order, regardless of the tenants' turns."""
        if self._merged is not None:
            return self._merged
        return next(iter(self._waiting.values()), ())

    def in_turn(self) -> Iterator[Request]:
        """Yield all waiting requests in the order of the tenants' turns. Do not change the queue
        meanwhile; nothing is charged."""
        turns = [
            (self._served[tenant] // QUANTUM_TOKENS, *waiting[0][:2], tenant, 0)
            for tenant, waiting in self._waiting.items()
        ]
        heapq.heapify(turns)
        served = self._served.copy()
        while turns:
            _, _, _, tenant, position = turns[0]
            waiting = self._waiting[tenant]
            request = waiting[position][2]
            yield request
            served[tenant] += self._price(request)
            position += 1
            if position == len(waiting):
                heapq.heappop(turns)
                continue
            following = served[tenant] // QUANTUM_TOKENS, *waiting[position][:2], tenant, position
            heapq.heapreplace(turns, following)

    def ahead(self, request: Request) -> float:
        """Estimate how many waiting requests are served before this one, which need not be queued.
        All are assumed to have the same size."""
        if not self.several:
            queues = [*self._waiting.values()]
            return bisect_left(queues[0], (request.key, request.order)) if queues else 0
        waiting = self._waiting.get(request.tenant, ())
        own = bisect_left(waiting, (request.key, request.order))
        per_weight = own / self._weight_of(request.tenant)
        return own + sum(
            min(len(others), per_weight * self._weight_of(tenant))
            for tenant, others in self._waiting.items()
            if tenant != request.tenant
        )

    def _price(self, request: Request) -> float:
        return max(1, request.uncached_tokens) / self._weight_of(request.tenant)

    def _weight_of(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _forget_idle(self) -> None:
        """Drop tenants without waiting requests: those that would start at the same round as new
        ones, or all if there are none of these."""
        idle = [tenant for tenant in self._served if tenant not in self._waiting]
        behind = [tenant for tenant in idle if self._served[tenant] <= self._now]
        for tenant in behind or idle:
            del self._served[tenant]
