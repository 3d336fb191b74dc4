"""Records of one request at a prefill DP rank, and of all requests in flight to a rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from sglang_sbs.scheduling.paging import paged
from sglang_sbs.scheduling.prefill.completion import RankPrompt


@dataclass(slots=True)
class Sent:
    """Dispatch of a batch; all records of its requests refer to this object."""

    at_s: float
    to_idle: bool = False
    """Whether the instance was idle, so that this batch alone causes its next launch."""
    joins: bool = False
    """Whether another batch was already on its way to the instance."""
    requests: int = 1
    left_s: float = -math.inf
    """Time when its last request left the router; requests leave one after the other."""
    sampled: bool = False
    """Its dispatch latency was sampled."""
    missed: bool = False
    """A request of it missed a launch."""

    def __post_init__(self) -> None:
        self.left_s = max(self.at_s, self.left_s)


@dataclass(slots=True, eq=False)
class PrefillRequest(RankPrompt):
    """A request dispatched to a DP rank, and how far reported passes have computed its prompt. All
    collections of the rank share this object."""

    tokens: int = 0
    """Uncached tokens of the prompt at dispatch."""
    flight_tokens: int = 0
    """Tokens not taken by any presumed pass; only valid while the request is in flight."""
    sent: Sent | None = None
    """Its batch, while it is in flight or presumed launched. None: its launch gives no sample,
    because another scheduler sent it, or the instance was silent since."""
    presumed_id: int = -1
    """Forward id of the pass in which another rank's report implies that this request started (see
    :mod:`.rank`, Presumptions). Valid while it is in ``PrefillRank.presumed``; -1: never was."""

    @classmethod
    def of(cls, rid: str, prompt_tokens: int, cached_tokens: int = 0) -> PrefillRequest:
        """Create the record of a dispatch. At least one token is computed, as in the engine."""
        tokens = max(1, prompt_tokens - cached_tokens)
        return cls(rid, tokens, prompt_tokens - tokens, tokens, tokens)


class Flight:
    """Requests in flight to one rank, oldest first, with running totals of their tokens."""

    __slots__ = ("_page", "charged", "requests", "total")

    def __init__(self) -> None:
        self.requests: dict[str, PrefillRequest] = {}
        """The requests by id, oldest first. Do not change it from outside."""
        self._page = 1
        self.total = 0
        self.charged = 0
        """Total tokens, with each request rounded up to whole pages."""

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, rid: object) -> bool:
        return rid in self.requests

    def __iter__(self) -> Iterator[PrefillRequest]:
        return iter(self.requests.values())

    def set_page(self, page: int) -> None:
        """Set the page size in tokens, and recompute :attr:`charged`."""
        self._page = page
        self.charged = self._charge(self)

    def add(self, request: PrefillRequest) -> None:
        """Add a request as the newest, with all of its tokens in flight."""
        self.pop(request.rid)
        request.flight_tokens = request.tokens
        self.requests[request.rid] = request
        self.total += request.tokens
        self.charged += paged(request.tokens, self._page)

    def put_back(self, requests: dict[str, PrefillRequest]) -> None:
        """Insert requests before all others, with the tokens that they had in flight."""
        self.requests = {**requests, **self.requests}
        self.total += sum([request.flight_tokens for request in requests.values()])
        self.charged += self._charge(requests.values())

    def reduce(self, request: PrefillRequest, tokens: int) -> None:
        before = request.flight_tokens
        request.flight_tokens = before - tokens
        self.total -= tokens
        self.charged += paged(before - tokens, self._page) - paged(before, self._page)

    def pop(self, rid: str) -> PrefillRequest | None:
        """Remove a request and return it; None if it is missing."""
        request = self.requests.pop(rid, None)
        if request is not None:
            self.total -= request.flight_tokens
            self.charged -= paged(request.flight_tokens, self._page)
        return request

    def oldest(self, count: int | None = None) -> list[PrefillRequest]:
        """Return the first ``count`` requests (all by default)."""
        return list(islice(self.requests.values(), count))

    def clear(self) -> None:
        self.requests.clear()
        self.total = self.charged = 0

    def _charge(self, requests: Iterable[PrefillRequest]) -> int:
        return sum([paged(request.flight_tokens, self._page) for request in requests])
