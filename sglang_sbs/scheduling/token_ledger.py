"""Tokens by request, with running totals."""

from __future__ import annotations

from itertools import islice

from sglang_sbs.scheduling.paging import paged


class TokenLedger:
    """An insertion-ordered map from request id to tokens with totals in constant time."""

    __slots__ = ("_page", "charged", "tokens", "total")

    def __init__(self, page: int = 1) -> None:
        self.tokens: dict[str, int] = {}
        """Tokens by request id; do not change them from outside."""
        self._page = page
        self.total = 0
        self.charged = 0
        """Total in whole pages per request."""

    def __len__(self) -> int:
        return len(self.tokens)

    def __contains__(self, rid: object) -> bool:
        return rid in self.tokens

    def __getitem__(self, rid: str) -> int:
        return self.tokens[rid]

    def set_page(self, page: int) -> None:
        """Charge pages of this many tokens from now on."""
        self._page = page
        self.charged = self._charge(self.tokens)

    def add(self, rid: str, tokens: int) -> None:
        if rid in self.tokens:
            self.pop(rid)
        self.tokens[rid] = tokens
        self.total += tokens
        self.charged += paged(tokens, self._page)

    def add_oldest(self, tokens: dict[str, int]) -> None:
        """Insert missing requests before all others."""
        self.tokens = {**tokens, **self.tokens}
        self.total += sum(tokens.values())
        self.charged += self._charge(tokens)

    def reduce(self, rid: str, tokens: int) -> None:
        before = self.tokens[rid]
        self.tokens[rid] = before - tokens
        self.total -= tokens
        self.charged += paged(before - tokens, self._page) - paged(before, self._page)

    def pop(self, rid: str) -> int | None:
        """Remove a request; return its tokens, or None if it is missing."""
        tokens = self.tokens.pop(rid, None)
        if tokens is not None:
            self.total -= tokens
            self.charged -= paged(tokens, self._page)
        return tokens

    def oldest(self, count: int | None = None) -> list[str]:
        """Return the first ``count`` requests inserted (all by default)."""
        return list(islice(self.tokens, count))

    def clear(self) -> None:
        self.tokens.clear()
        self.total = self.charged = 0

    def _charge(self, tokens: dict[str, int]) -> int:
        return sum([paged(one, self._page) for one in tokens.values()])
