"""Rules for choosing decode DP ranks: Algorithm 3 of the paper, and the potential, which is the
default. They map requests to ranks given ⟨B_i, K_i⟩ and the room of each rank."""

from __future__ import annotations

import math
import random
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

from sglang_sbs.scheduling.request import Request

UNLIMITED = 1 << 62

STEP_PER_REQUEST_MS = 0.195
STEP_PER_TOKEN_MS = 2.7e-5
"""Decode step time per KV token (``STEP_PER_REQUEST_MS``: per running request), DeepSeek-V3 kernels
on H100 at EP32. Only their ratio matters here. Source: the decode fit in ``docs/simulator.md``."""
TOKENS_PER_REQUEST = STEP_PER_REQUEST_MS / STEP_PER_TOKEN_MS
"""KV tokens that cost a decode step as much as one more request."""
_B_TEMPERATURE = 0.5
"""Temperature of B in the :func:`potential`, in requests: a rank ahead of another by this much
counts e times as much. A higher value lets the largest B grow, a lower one the spread of K."""
_KV_EMPHASIS = 32.0
"""Factor w of the KV term in the :func:`potential`, where K counts in units of
:data:`TOKENS_PER_REQUEST` (measured: ``docs/lab/decode.md``)."""
TRANSFER_MS_PER_TOKEN = 70272 / 25e6
"""KV transfer time per token from prefill to decode (DeepSeek-V3 at 25 GB/s), which is saved where
the decode rank already holds the token."""
MOST_HIT_REQUESTS = 0.5
"""Limit on the value of a cache hit on decode, in requests (:func:`hit_requests`): one more request
slows down all others, while the hit helps only one."""


@dataclass(slots=True)
class DecodeLoad:
    """State vector V_i = ⟨B_i, K_i⟩ of one decode DP rank, our dispatches included."""

    running: int
    """B_i: running requests, those on their way included."""
    kv_tokens: int
    """K_i: KV tokens in use, with the prompts of requests on their way."""
    committed_tokens: int = 0
    """K_i, in tokens, once every own request here has reached its total length; for admission."""
    kv_capacity_tokens: int = UNLIMITED
    max_running: int = UNLIMITED
    awaited: bool = False
    """Own requests have not ended, so the rank is not empty even if its report is: the message that
    would have counted one of them may be lost."""

    def has_room(self, tokens: int) -> bool:
        """Return whether the rank has room for this total length; an empty rank always has."""
        return tokens <= self.room_tokens

    @property
    def room_tokens(self) -> int:
        """Largest total length, in tokens, that the rank can admit; unlimited if it is empty."""
        if self.running == 0 and not self.awaited:
            return UNLIMITED
        if self.running >= self.max_running:
            return 0
        return self.kv_capacity_tokens - max(self.kv_tokens, self.committed_tokens)

    def plus(self, request: Request) -> DecodeLoad:
        """Return the load with one more request: K_i grows by its prompt, the committed tokens by
        its total length. The cached part of the prompt counts, because reports leave out cached KV
        that no request uses."""
        return DecodeLoad(
            self.running + 1,
            self.kv_tokens + request.prompt_tokens,
            self.committed_tokens + request.total_tokens,
            self.kv_capacity_tokens,
            self.max_running,
        )


class DecodeBoard:
    """All decode ranks while a batch is placed, in the orders that the rules need. Each order is
    built when first needed; then a lookup costs at most the number of distinct batch sizes."""

    def __init__(self, loads: list[DecodeLoad], first: int = 0) -> None:
        """``loads``: one per rank; :meth:`place` replaces its elements. ``first``: the rank that
        wins among equal ones; the others follow in turn. A fixed order would send all short
        requests to the first few ranks."""
        self.loads = loads
        self._first = first % max(1, len(loads))
        self._kv_sorted: list[int] | None = None
        self._totals: tuple[int, int] | None = None
        self._sizes: list[int] | None = None
        self._by_running: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._unsorted: set[int] = set()

    @property
    def sizes(self) -> list[int]:
        """Values of B_i that occur, ascending."""
        if self._sizes is None:
            for index, load in enumerate(self.loads):
                self._by_running[load.running].append((load.kv_tokens, self._turn(index)))
            self._unsorted.update(self._by_running)
            self._sizes = sorted(self._by_running)
        return self._sizes

    def means(self) -> tuple[float, float]:
        """Return the means of B_i and K_i."""
        if self._totals is None:
            kv_tokens = sum([load.kv_tokens for load in self.loads])
            self._totals = sum([load.running for load in self.loads]), kv_tokens
        running, kv_tokens = self._totals
        return running / len(self.loads), kv_tokens / len(self.loads)

    @property
    def kv_sorted(self) -> list[int]:
        if self._kv_sorted is None:
            self._kv_sorted = sorted([load.kv_tokens for load in self.loads])
        return self._kv_sorted

    def frontier(self, fits: Fits) -> Iterator[int]:
        """Yield the feasible rank with the smallest K for each batch size, smallest size first."""
        firsts = (self.first(size, fits) for size in self.sizes)
        return (index for index in firsts if index is not None)

    def first(self, running: int, fits: Fits) -> int | None:
        """Return the feasible rank with the smallest K among those with this B; None: no rank."""
        ranks = ((turn + self._first) % len(self.loads) for _, turn in self._sorted(running))
        return next(filter(fits, ranks), None)

    def _turn(self, index: int) -> int:
        """Return the position of a rank among equal ones: 0 for the rank that wins."""
        return (index - self._first) % len(self.loads)

    def place(self, index: int, request: Request) -> None:
        before = self.loads[index]
        load = self.loads[index] = before.plus(request)
        if self._kv_sorted is not None:
            del self._kv_sorted[bisect_left(self._kv_sorted, before.kv_tokens)]
            insort(self._kv_sorted, load.kv_tokens)
        if self._totals is not None:
            running, kv_tokens = self._totals
            self._totals = running + 1, kv_tokens + load.kv_tokens - before.kv_tokens
        if self._sizes is None:
            return
        bucket = self._sorted(before.running)
        del bucket[bisect_left(bucket, (before.kv_tokens, self._turn(index)))]
        if not bucket:
            del self._by_running[before.running]
            del self._sizes[bisect_left(self._sizes, before.running)]
        if load.running not in self._by_running:
            insort(self._sizes, load.running)
        insort(self._sorted(load.running), (load.kv_tokens, self._turn(index)))

    def _sorted(self, running: int) -> list[tuple[int, int]]:
        """Return (K_i, :meth:`_turn`) of the ranks with this batch size, ascending."""
        bucket = self._by_running[running]
        if running in self._unsorted:
            self._unsorted.remove(running)
            bucket.sort()
        return bucket


Fits = Callable[[int], bool]
"""Returns whether the rank with this index may get the request."""
DecodeRuleFunction = Callable[[Request, DecodeBoard, Fits], int | None]
"""Returns the index of the rank that gets the request; None: no rank is feasible."""


def percentile(ordered: Sequence[int], share: float) -> float:
    """Return the linear-interpolation percentile of sorted values, ``share`` in [0, 1]."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def outlier_threshold(kv_sorted: Sequence[int], k: float) -> float:
    """Return Algorithm 3's Th_outlier = Q3 + k (Q3 - Q1) over the sorted KV loads of all ranks."""
    q1, q3 = percentile(kv_sorted, 0.25), percentile(kv_sorted, 0.75)
    return q3 + k * (q3 - q1)


def hit_requests(request: Request, hit_tokens: int) -> float:
    """Return the value of ``hit_tokens`` cached at a decode rank, in running requests: with this
    many more than another rank, the answer ends as late as with the KV transfer there. At most
    ``MOST_HIT_REQUESTS``."""
    answer_tokens = max(1, request.total_tokens - request.prompt_tokens)
    spared_ms = hit_tokens * TRANSFER_MS_PER_TOKEN
    return min(MOST_HIT_REQUESTS, spared_ms / (answer_tokens * STEP_PER_REQUEST_MS))


def iqr_lexicographic(k: float) -> DecodeRuleFunction:
    """Return Algorithm 3 as a rule: mask ranks with an outlying K, then take the smallest ⟨B, K⟩.
    Two ranks of equal B are compared by K less the part of the prompt that they have cached."""

    def choose(request: Request, board: DecodeBoard, fits: Fits) -> int | None:
        threshold = outlier_threshold(board.kv_sorted, k)
        safe = (i for i in board.frontier(fits) if board.loads[i].kv_tokens <= threshold)
        index = next(safe, None)
        if index is None:
            return fewest_requests(request, board, fits)

        def order(at: int) -> tuple[int, int]:
            load = board.loads[at]
            return load.running, load.kv_tokens - request.decode_hits.get(at, 0)

        holders = (
            at for at in request.decode_hits if board.loads[at].kv_tokens <= threshold and fits(at)
        )
        return min((index, *holders), key=order)

    return choose


def potential(request: Request, board: DecodeBoard, fits: Fits) -> int | None:
    """Return the rank where the potential grows least: the sum over all ranks of exp(2 (B - mean))
    + w exp(K - mean), with B and K both in requests (:data:`TOKENS_PER_REQUEST`).

    The potential is a smooth maximum. The largest B and the largest K determine how long a decode
    step takes, so the ranks that are ahead in either dimension dominate the sum. Two differences to
    Algorithm 3 follow:

    - No rank is masked.
    - A rank with a K far below the others gets more than its share of requests.

    If the rank has a part of the prompt in its prefix cache, K grows by the rest only. The transfer
    saved is subtracted from B and K as a number of requests (:func:`hit_requests`).
    """
    mean_b, mean_k = board.means()
    per_token = 1 / TOKENS_PER_REQUEST

    def k_step_of(tokens: int) -> float:
        return _log_expm1(max(1, tokens) * per_token) + _LOG_KV_EMPHASIS

    def log_growth_of(index: int, k_step: float, worth: float = 0.0) -> float:
        load = board.loads[index]
        by_b = (load.running - worth - mean_b) / _B_TEMPERATURE + _B_STEP
        by_k = (load.kv_tokens - mean_k) * per_token - worth + k_step
        return max(by_b, by_k) + math.log1p(math.exp(-abs(by_b - by_k)))

    chosen, least = None, math.inf
    for index, hit_tokens in request.decode_hits.items():
        if fits(index):
            worth = hit_requests(request, hit_tokens)
            log_growth = log_growth_of(index, k_step_of(request.prompt_tokens - hit_tokens), worth)
            if log_growth < least:
                chosen, least = index, log_growth
    k_step = k_step_of(request.prompt_tokens)
    # The increase grows with K, so for each batch size only the smallest K can win.
    for running in board.sizes:
        if (running - mean_b) / _B_TEMPERATURE + _B_STEP >= least:
            break  # the increase only grows with the batch
        smallest = board.first(running, fits)
        if smallest is not None:
            log_growth = log_growth_of(smallest, k_step)
            if log_growth < least:
                chosen, least = smallest, log_growth
    return chosen


def _log_expm1(x: float) -> float:
    """Return log(exp(x) - 1) for x > 0, also where exp(x) overflows."""
    return x + math.log(-math.expm1(-x))


_B_STEP = _log_expm1(1 / _B_TEMPERATURE)
_LOG_KV_EMPHASIS = math.log(_KV_EMPHASIS)


def fewest_requests(_request: Request, board: DecodeBoard, fits: Fits) -> int | None:
    return next(board.frontier(fits), None)


class RoundRobinDecode:
    """Chooses ranks in turn, as SGLang's decode does by itself (``round_robin``)."""

    def __init__(self) -> None:
        self._turns = count()

    def __call__(self, _request: Request, board: DecodeBoard, fits: Fits) -> int | None:
        turns = (turn % len(board.loads) for turn in islice(self._turns, len(board.loads)))
        return next(filter(fits, turns), None)


class PowerOfTwoDecode:
    """Chooses the one of two random ranks that has fewer requests (``power_of_two``)."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, _request: Request, board: DecodeBoard, fits: Fits) -> int | None:
        ranks = [index for index in range(len(board.loads)) if fits(index)]
        pair = self._random.sample(ranks, min(2, len(ranks)))
        return min(pair, key=lambda index: board.loads[index].running, default=None)


def schedule_decode(
    requests: Sequence[Request],
    loads: list[DecodeLoad],
    choose: DecodeRuleFunction,
    allowed: Callable[[Request, int], bool] = lambda _request, _rank: True,
    admit: bool = True,
    first: int = 0,
) -> dict[str, int]:
    """Place a batch on decode ranks, longest total length first (fill the valley).

    Args:
        requests: the batch; ``total_tokens`` must be set.
        loads: one per rank; those of chosen ranks are replaced.
        choose: the rule that picks among feasible ranks.
        allowed: whether a request may go to the rank with this index at all.
        admit: whether a rank without room is infeasible.
        first: the rank that wins among equal ones.

    Returns:
        rid -> index into ``loads``. Requests without a feasible rank are missing.
    """
    board = DecodeBoard(loads, first)
    chosen: dict[str, int] = {}
    for request in sorted(requests, key=lambda r: -r.total_tokens):

        def fits(index: int, request: Request = request) -> bool:
            has_room = not admit or loads[index].has_room(request.total_tokens)
            return has_room and allowed(request, index)

        best = choose(request, board, fits)
        if best is not None:
            board.place(best, request)
            chosen[request.rid] = best
    return chosen
