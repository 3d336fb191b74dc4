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
    """Dispatch of a batch; each of its requests refers to it."""

    at_s: float
    to_idle: bool = False
    """The instance was idle, so its next launch is caused by this batch alone."""
    joins: bool = False
    """Another batch was already on its way."""
    requests: int = 1
    left_s: float = -math.inf
    """Time when its last request has left, as they leave one after the other."""
    sampled: bool = False
    """Its latency was sampled."""

    def __post_init__(self) -> None:
        self.left_s = max(self.at_s, self.left_s)


@dataclass(slots=True, eq=False)
class PrefillRequest(RankPrompt):
    """A request dispatched to a DP rank, and the progress of its prompt by the reported passes. All
    records of the rank refer to the same object."""

    tokens: int = 0
    """Uncached tokens of the prompt at dispatch."""
    flight_tokens: int = 0
    """While it is in flight: tokens that no presumed pass computes."""
    sent: Sent | None = None
    """Its batch, while it is in flight or presumed launched. None: its launch gives no sample,
    because another scheduler sent it, or the instance was silent since."""
    presumed_id: int = -1
    """While its acceptance is presumed: the first pass presumed to contain part of it."""

    @classmethod
    def of(cls, rid: str, prompt_tokens: int, cached_tokens: int = 0) -> PrefillRequest:
        """Create the record of a dispatch. At least one token is computed, as in the engine."""
        tokens = max(1, prompt_tokens - cached_tokens)
        return cls(rid, tokens, prompt_tokens - tokens, tokens, tokens)


class Flight:
    """Requests in flight, oldest first, with totals in constant time."""

    __slots__ = ("_page", "charged", "requests", "total")

    def __init__(self) -> None:
        self.requests: dict[str, PrefillRequest] = {}
        """Do not change it from outside."""
        self._page = 1
        self.total = 0
        self.charged = 0
        """Total in whole pages per request."""

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, rid: object) -> bool:
        return rid in self.requests

    def __iter__(self) -> Iterator[PrefillRequest]:
        return iter(self.requests.values())

    def set_page(self, page: int) -> None:
        """Charge pages of this many tokens from now on."""
        self._page = page
        self.charged = self._charge(self)

    def add(self, request: PrefillRequest) -> None:
        """Add a whole request as the newest."""
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
