"""The model that predicts when a prompt will be computed.

Length of a pass
    All DP ranks wait for the slowest one (:class:`PassFormula`)::

        T = fixed_s + mean_s * mean_d(tokens_d) + max_d(token_s * tokens_d + pair_s * pairs_d)

    ``tokens_d`` are the extend tokens of rank d, and ``pairs_d`` its attention pairs
    (:func:`attention_pairs`). :mod:`.forward_model` learns the four coefficients.

Contents of a pass
    A rank computes its prompts first come first served, one chunk per pass (:class:`Chunk`).
    :func:`cut` is the same for one prompt over all of its passes.

Completion of a request
    It follows from what is ahead of the request at its rank (:class:`NextPass`).

Must not know instances, reports or policies. The belief, the policies, the explanations, the
dashboard and the simulator's engine use it; tests check it against a model of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from sglang_sbs.scheduling.paging import paged

_LEAST_PASS_S = 1e-3
_LEAST_SLOPE_S = 1e-9
_USUAL_IMBALANCE = 1.1
"""Assumed tokens of the heaviest rank in a pass, as a multiple of the ranks' mean."""


class PassFormula(msgspec.Struct, frozen=True, gc=False):
    """Length of a pass from its tokens and attention pairs, with learned coefficients:
    ``fixed_s + mean_s * mean(tokens) + max(token_s * tokens + pair_s * pairs)`` over DP ranks."""

    fixed_s: float
    """Time of an empty pass."""
    mean_s: float
    """Seconds per token of the mean over DP ranks."""
    token_s: float
    """Seconds per token on the slowest DP rank."""
    pair_s: float
    """Seconds per attention pair on the slowest DP rank."""

    def rank_s(self, tokens: float, pairs: float = 0.0) -> float:
        """Return the seconds that a rank with these tokens and attention pairs adds to a pass if
        the others wait for it."""
        return self.token_s * tokens + self.pair_s * pairs

    def pass_s(self, mean_tokens: float, slowest_s: float) -> float:
        """Return the length of a pass, at least 1 ms. ``slowest_s``: the largest
        :meth:`rank_s`."""
        length_s = self.fixed_s + self.mean_s * mean_tokens + slowest_s
        return length_s if length_s > _LEAST_PASS_S else _LEAST_PASS_S

    def of_ranks_s(self, tokens: Sequence[float], pairs: Sequence[float] = ()) -> float:
        """Return the length of a pass from the tokens and attention pairs of each rank, in
        seconds; empty ``pairs`` count as 0."""
        per_token, per_pair = self.token_s, self.pair_s
        slowest_s = per_token * max(tokens)
        if pairs:
            both = zip(tokens, pairs, strict=True)
            slowest_s = max([per_token * mine + per_pair * own for mine, own in both])
        return self.pass_s(sum(tokens) / len(tokens), slowest_s)

    def balanced_s(self, tokens: float) -> float:
        """Return the length of a pass with this many tokens on every rank, without attention."""
        return self.pass_s(tokens, self.rank_s(tokens))

    def spread_s(self, tokens: float, ranks: int, chunk_tokens: int) -> float:
        """Return the length of a pass with ``tokens`` in all spread evenly over ``ranks``, at most
        a chunk each."""
        return self.balanced_s(min(chunk_tokens, tokens / ranks))

    def slope_s(self) -> float:
        """Return the seconds that one more token on every rank adds to a pass, if the heaviest rank
        has as much more than the mean as usual."""
        return max(_LEAST_SLOPE_S, self.token_s * _USUAL_IMBALANCE + self.mean_s)


def attention_pairs(tokens: int, context: int) -> float:
    """Return the number of query-key pairs when the next ``tokens`` of a prompt are computed, with
    ``context`` tokens before them computed or cached. Pairs matter little for short prompts, and
    cost half of the time for the last chunk of a long one."""
    return tokens * (context + tokens / 2)


@dataclass(slots=True, eq=False)
class RankPrompt:
    """Progress of a prompt that a rank computes chunk by chunk."""

    rid: str
    left_tokens: int
    """Tokens still to compute."""
    context_tokens: int = 0
    """Tokens that are computed or cached."""

    def advance(self, tokens: int) -> None:
        """Record that a pass computes the next tokens."""
        self.left_tokens -= tokens
        self.context_tokens += tokens


AnyPrompt = TypeVar("AnyPrompt", bound=RankPrompt)


class Chunk:
    """The prompts that one rank computes in a pass: room left, tokens and attention pairs."""

    __slots__ = ("_page", "_places", "pairs", "requests", "room", "tokens")

    def __init__(self, room: int, page: int = 1, most_requests: int = 0) -> None:
        """``room``: size of the chunk in tokens. ``page``: a request is charged whole pages.
        ``most_requests``: limit of requests; 0: none."""
        self.room = room
        """Tokens that still fit, in whole pages per request."""
        self._places = most_requests or room  # each request has at least one token
        self._page = page
        self.requests = 0
        self.tokens = 0
        self.pairs = 0.0

    @property
    def full(self) -> bool:
        return self.room <= 0 or self.requests >= self._places

    def takes(self, tokens: int) -> bool:
        """Return whether a prompt with this many tokens to compute, or a page of it, fits."""
        return 0 < tokens <= self.room or 0 < self._page <= self.room < tokens

    def fill(self, prompts: Iterable[AnyPrompt]) -> list[tuple[AnyPrompt, int]]:
        """Take prompts in this order until the chunk is full; return each taken prompt with the
        tokens of it that are computed. The last one may be cut, after a whole page. Does not change
        the prompts."""
        taken: list[tuple[AnyPrompt, int]] = []
        if self.full:
            return taken
        room, page, pairs = self.room, self._page, self.pairs
        places = self._places - self.requests
        for prompt in prompts:
            left, context = prompt.left_tokens, prompt.context_tokens
            part = left if left <= room else room // page * page
            if part <= 0:
                break
            # attention_pairs in line, because this loop runs several times per report.
            pairs += part * (context + part / 2)
            taken.append((prompt, part))
            room -= part if page == 1 else paged(part, page)
            if part < left or room <= 0 or len(taken) >= places:
                break
        self.room, self.pairs = room, pairs
        self.tokens += sum([part for _, part in taken])
        self.requests += len(taken)
        return taken


def cut(
    ahead: int, tokens: int, context: int, chunk_tokens: int
) -> Iterator[tuple[int, int, float]]:
    """Cut a prompt into the parts of successive passes of its rank. Yields the position of each
    pass, the tokens in it and their attention pairs.

    Args:
        ahead: tokens that the rank computes before the prompt.
        tokens: tokens to compute.
        context: tokens of the prompt that are computed or cached.
        chunk_tokens: size of the chunk.
    """
    index, used = divmod(ahead, chunk_tokens)
    room = chunk_tokens - used
    while tokens > 0:
        part = tokens if tokens < room else room
        yield index, part, part * (context + part / 2)
        index, room = index + 1, chunk_tokens
        tokens -= part
        context += part


def likely_ranks(
    ahead_tokens: Sequence[int],
    hits: Sequence[int] | None = None,
    to_fetch: Sequence[int] | None = None,
) -> set[int]:
    """Return the ranks (one or two) that may complete a request first: the emptiest, and the
    emptiest of those with the longest cached prefix that needs no loading.

    Args:
        ahead_tokens: tokens ahead of the request per rank.
        hits: cached tokens of its prompt per rank; None: nothing is cached.
        to_fetch: part of these that the rank must load from shared storage first.
    """
    emptiest = ahead_tokens.index(min(ahead_tokens))
    if hits is None:
        return {emptiest}
    if to_fetch is not None:
        hits = [held - fetched for held, fetched in zip(hits, to_fetch, strict=True)]
        emptiest = min(range(len(hits)), key=lambda d: (ahead_tokens[d], to_fetch[d]))
    most = max(hits)
    holders = [d for d, held in enumerate(hits) if held == most]
    return {emptiest, min(holders, key=ahead_tokens.__getitem__)}


class NextPass:
    """The next pass of an instance, and when a request added to the instance would be computed."""

    __slots__ = (
        *("_held", "ahead_tokens", "chunk_tokens", "emptiest", "formula", "length_s", "page"),
        "start_s",
    )

    def __init__(
        self,
        formula: PassFormula,
        chunk_tokens: int,
        ahead_tokens: Sequence[int],
        *,
        page: int = 1,
        length_s: float | None = None,
        start_s: float = 0.0,
    ) -> None:
        """
        Args:
            chunk_tokens: size of the chunk.
            ahead_tokens: charged tokens per rank that are computed before a new request.
            page: a request is charged whole pages.
            length_s: length of the pass without a new request; None: from the tokens ahead.
            start_s: when the pass starts.
        """
        self.formula = formula
        self.chunk_tokens = chunk_tokens
        self.ahead_tokens = list(ahead_tokens)
        self.page = page
        self.start_s = start_s
        fills = [min(chunk_tokens, ahead) for ahead in ahead_tokens]
        self.length_s = formula.of_ranks_s(fills) if length_s is None else length_s
        self._held = sum(fills)
        self.emptiest = self.ahead_tokens.index(min(ahead_tokens))
        """The rank with the fewest tokens ahead."""

    def add(self, rank: int, tokens: int) -> None:
        """Put a request of ``tokens`` charged tokens on a rank, ahead of all later ones. It leaves
        :attr:`length_s` as it is: otherwise later requests would seem to cost nothing on the other
        ranks, and gather there."""
        chunk, before = self.chunk_tokens, self.ahead_tokens[rank]
        self._held += min(chunk, before + tokens) - min(chunk, before)
        self.ahead_tokens[rank] += tokens
        self.emptiest = self.ahead_tokens.index(min(self.ahead_tokens))

    def with_s(self, rank: int, tokens: int, context: int = 0) -> float:
        """Return the length of the pass, in seconds, with a request of ``tokens`` to compute and
        ``context`` cached on this rank; of a longer request, with its last chunk."""
        ahead, chunk = self.ahead_tokens[rank], self.chunk_tokens
        own = min(chunk, tokens)
        pairs = attention_pairs(own, context + tokens - own)
        return max(self.length_s, self._length_s(rank, min(chunk, ahead + tokens), pairs))

    def done_s(self, rank: int, tokens: int, context: int = 0, ahead: int | None = None) -> float:
        """Return the seconds from the start of the pass until a request on this rank is computed:
        passes with whole chunks on the rank, and one with the rest. All attention of the request is
        added to the last pass, because only the sum matters.

        Args:
            tokens: tokens to compute.
            context: tokens of the prompt that are cached.
            ahead: charged tokens ahead of it; None: those of :attr:`ahead_tokens`.
        """
        if ahead is None:
            ahead = self.ahead_tokens[rank]
        chunk, charged = self.chunk_tokens, ahead + paged(tokens, self.page)
        whole, last = divmod(max(1, charged) - 1, chunk)
        last_s = self._length_s(rank, last + 1, attention_pairs(tokens, context))
        if not whole:
            return last_s if last_s > self.length_s else self.length_s
        full_s = self._length_s(rank, chunk, 0.0)
        return max(self.length_s, full_s) + (whole - 1) * full_s + last_s

    def _length_s(self, rank: int, fill: int, pairs: float) -> float:
        """Return the length of a pass with ``fill`` tokens and ``pairs`` on one rank, while the
        other ranks have the tokens of their next pass."""
        mine, chunk = self.ahead_tokens[rank], self.chunk_tokens
        others = self._held - (mine if mine < chunk else chunk)
        formula = self.formula
        mean_tokens = (others + fill) / len(self.ahead_tokens)
        return formula.pass_s(mean_tokens, formula.rank_s(fill, pairs))
