"""How far the prompts of one DP rank are computed, which decides what attention costs: the last
chunk of a long prompt costs far more than its first.

Ranks report tokens, not contexts; but they compute first come first served, so the tokens of each
pass tell where in which prompt it was. Drift ends with the requests it is about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PromptProgress:
    """The prompts that are not computed yet, oldest first."""

    __slots__ = ("_prompts",)

    def __init__(self) -> None:
        self._prompts: dict[str, list[int]] = {}
        """Request id to prompt tokens, how many of them are computed, and how many were cached when
        it was sent."""

    def add(self, rid: str, prompt_tokens: int, cached_tokens: int = 0) -> None:
        """A request was dispatched to the rank, which has the beginning of its prompt."""
        self._prompts[rid] = [prompt_tokens, cached_tokens, cached_tokens]

    def drop(self, rid: str) -> None:
        self._prompts.pop(rid, None)

    def clear(self) -> None:
        self._prompts.clear()

    def waiting(self) -> Iterable[Sequence[int]]:
        """Prompt tokens of each, how many of them are computed, and how many were cached."""
        return self._prompts.values()

    @property
    def longest_tokens(self) -> int:
        return max([prompt[0] for prompt in self._prompts.values()], default=0)

    def pairs(self, tokens: int) -> float:
        """Attention pairs of the next ``tokens`` tokens: chunk * (context + chunk / 2) summed."""
        pairs = 0.0
        for prompt_tokens, computed, _ in self._prompts.values():
            part = min(tokens, prompt_tokens - computed)
            pairs += part * (computed + part / 2)
            tokens -= part
            if tokens <= 0:
                break
        return pairs

    def compute(self, tokens: int) -> float:
        """A pass takes so many tokens. Returns their pairs."""
        pairs = 0.0
        done = []
        for rid, prompt in self._prompts.items():
            part = min(tokens, prompt[0] - prompt[1])
            pairs += part * (prompt[1] + part / 2)
            prompt[1] += part
            tokens -= part
            if prompt[1] == prompt[0]:
                done.append(rid)
            if tokens <= 0:
                break
        for rid in done:
            del self._prompts[rid]
        return pairs
