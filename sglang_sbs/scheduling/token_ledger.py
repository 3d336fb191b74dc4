"""Tokens by request with their running total. Owns nothing else."""

from __future__ import annotations

from itertools import islice


class TokenLedger:
    """An insertion-ordered map from request id to tokens whose sum costs nothing to read."""

    __slots__ = ("_tokens", "total")

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self.total = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, rid: object) -> bool:
        return rid in self._tokens

    def __getitem__(self, rid: str) -> int:
        return self._tokens[rid]

    def add(self, rid: str, tokens: int) -> None:
        """Enter or replace a request."""
        self.pop(rid)
        self._tokens[rid] = tokens
        self.total += tokens

    def add_oldest(self, tokens: dict[str, int]) -> None:
        """Enter requests that are not there, before all others."""
        self._tokens = {**tokens, **self._tokens}
        self.total += sum(tokens.values())

    def reduce(self, rid: str, tokens: int) -> None:
        """Take some tokens off a request that stays."""
        self._tokens[rid] -= tokens
        self.total -= tokens

    def pop(self, rid: str) -> int | None:
        """Remove a request; its tokens, or None if it is not there."""
        tokens = self._tokens.pop(rid, None)
        if tokens is not None:
            self.total -= tokens
        return tokens

    def oldest(self, count: int | None = None) -> list[str]:
        """The first ``count`` requests entered (all by default)."""
        return list(islice(self._tokens, count))

    def clear(self) -> None:
        """Remove everything."""
        self._tokens.clear()
        self.total = 0
