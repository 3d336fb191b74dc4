"""State of all DP ranks of one prefill instance: backlog, room, and the next pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from sglang_sbs.scheduling.prefill.forward_model import ForwardModel
from sglang_sbs.scheduling.prefill.passes import Pass
from sglang_sbs.scheduling.prefill.rank import PrefillRank
from sglang_sbs.scheduling.prefill.requests import Sent

T = TypeVar("T")


class Cached(Generic[T]):
    """``functools.cached_property`` without the lock that it takes before Python 3.12. The lock
    costs more than most of these sums."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        value: T = self._compute(instance)
        vars(instance)[self._name] = value
        return value


class Ranks(list[PrefillRank]):
    """The DP ranks of one instance, which take part in the same passes."""

    def __init__(self, dp_size: int) -> None:
        super().__init__(PrefillRank() for _ in range(dp_size))
        self.version = 0
        """Number that grows with every change of the accounting, the forward model or the limits.
        Cached properties are computed at most once per version."""
        self._next: dict[int, tuple[int, float]] = {}
        """Tokens and attention pairs in the next pass by rank, as cached by :meth:`next_pass`.
        Changed ranks are missing."""

    def changed(self, rank: int | None = None) -> None:
        """Begin a new version: forget cached values after a change of one rank (None: of any)."""
        version, unchanged = self.version + 1, self._next
        vars(self).clear()
        self.version, self._next = version, unchanged
        if rank is None:
            unchanged.clear()
        else:
            unchanged.pop(rank, None)

    def next_pass(self) -> tuple[list[int], list[float]]:
        """Return two lists, the tokens and the attention pairs per rank, of a pass with the
        requests that now wait for it."""
        for index, rank in enumerate(self):
            if index not in self._next:
                tokens = rank.next_tokens(rank.chunk_tokens)
                self._next[index] = tokens, rank.pairs(tokens)
        parts = [self._next[index] for index in range(len(self))]
        return [tokens for tokens, _ in parts], [pairs for _, pairs in parts]

    def resize(self, dp_size: int) -> None:
        """Add or remove ranks at the end."""
        del self[dp_size:]
        self += [PrefillRank() for _ in range(dp_size - len(self))]

    @Cached
    def backlog_tokens(self) -> int:
        """Tokens of all ranks that are in flight or queued, and in no pass yet."""
        return sum([rank.flight.total + rank.queued_tokens for rank in self])

    @Cached
    def charged_tokens(self) -> int:
        """Backlog of all ranks in charged tokens: each request is charged whole pages."""
        return sum([rank.charged_tokens for rank in self])

    @Cached
    def has_flight(self) -> bool:
        """Whether any request dispatched by this scheduler is not yet accepted by its rank."""
        return any(request.sent is not None for rank in self for request in rank.flight)

    @Cached
    def has_outstanding(self) -> bool:
        """Whether any dispatched request is not prefilled yet."""
        return any(rank.requests for rank in self)

    @Cached
    def longest_prompt_tokens(self) -> int:
        """Length of the longest prompt not fully computed, including cached tokens; 0 if none."""
        prompts = [prompt for rank in self for prompt in rank.prompts.values()]
        return max([prompt.left_tokens + prompt.context_tokens for prompt in prompts], default=0)

    @Cached
    def ahead_tokens(self) -> list[int]:
        """Charged tokens ahead of a new request per rank (:attr:`.PrefillRank.ahead_tokens`). Do
        not change the list."""
        return [rank.ahead_tokens for rank in self]

    @Cached
    def least_ahead_tokens(self) -> int:
        return min(self.ahead_tokens)

    @property
    def has_room(self) -> bool:
        """Whether the next pass has room for tokens (C_avail above 0) on some rank."""
        return self.least_ahead_tokens < self[0].chunk_tokens

    def has_room_in(self, passes: int) -> bool:
        """Return whether the next ``passes`` passes have room for tokens on some rank."""
        return self.least_ahead_tokens < passes * self[0].chunk_tokens

    @property
    def takes_nothing(self) -> bool:
        """Whether no rank would begin a request sent now: all are stalled or unanswered."""
        # The first rank is nearly always the answer, and this is asked very often.
        return self[0].takes_nothing and all(rank.takes_nothing for rank in self)

    def c_avail(self, passes: int = 1) -> list[int]:
        """Return C_avail per rank for the next pass to be launched (paper section 4.2.1), in
        charged tokens. Zero or less where the pass is full, also by its number of requests. For
        several passes: the room in all of them, at most one chunk."""
        chunk = self[0].chunk_tokens
        room = [passes * chunk - ahead for ahead in self.ahead_tokens]
        if passes == 1:
            return room  # ahead_tokens includes a full KV pool, up to a chunk
        pools = [rank.kv_room_tokens for rank in self]
        most = [chunk if pool is None else pool for pool in pools]
        return [min(chunk, *pair) for pair in zip(room, most, strict=True)]

    def places(self, passes: int = 1) -> Sequence[float]:
        """Return how many more requests each rank can take in the next ``passes`` passes, at most
        the limit of one pass; infinity if passes have no request limit."""
        most = self[0].most_requests
        if not most:
            return [math.inf] * len(self)
        return [max(0, min(most, passes * most - rank.backlog_requests)) for rank in self]

    def capacity_of(self, mean_tokens: float) -> float:
        """Return the most tokens that a pass over all ranks can have with requests of this mean
        length: full chunks, or fewer because of the request limit."""
        tokens, most = len(self) * self[0].chunk_tokens, len(self) * self[0].most_requests
        return min(tokens, most * mean_tokens) if most else tokens

    @property
    def ended_id(self) -> int:
        """Forward id of the newest pass whose end any rank has reported; -1 before the first."""
        return max([rank.last_forward_id for rank in self])

    def pairs(self, tokens: Sequence[int]) -> list[float]:
        """Return the attention pairs of the next ``tokens`` of each rank."""
        return [rank.pairs(mine) for rank, mine in zip(self, tokens, strict=True)]

    def compute(self, tokens: Sequence[int]) -> list[float]:
        """Advance the ranks' prompts by a pass with these tokens per rank; return its attention
        pairs per rank."""
        return [rank.compute(mine) for rank, mine in zip(self, tokens, strict=True)]

    def take_pass(self, model: ForwardModel, start_s: float, now_s: float, unknown: Sent) -> Pass:
        """Take requests first come first served, up to each rank's chunk, and return the pass that
        is presumed launched with them at ``start_s``. ``unknown``: the batch to record for requests
        without one."""
        parts = [rank.take_chunk(rank.chunk_tokens) for rank in self]
        tokens = [of_queue + of_flight for of_queue, of_flight, _ in parts]
        landed = {request.rid: request for _, _, requests in parts for request in requests}
        for request in landed.values():
            request.sent = request.sent or unknown
        pairs = self.pairs(tokens)
        end_s = max(now_s, start_s + model.predict_s(tokens, pairs))
        return Pass(start_s, end_s, tokens, None, landed, [queued for queued, _, _ in parts], pairs)
