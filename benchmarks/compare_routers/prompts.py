"""Prompts of an exact number of tokens, as text or as token ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.demo.load import FIRST_TOKEN_ID

_LEAST_WORDS = 16


@dataclass(frozen=True, slots=True)
class Prompts:
    """The vocabulary of prompts. ``words`` empty: requests carry token ids instead of text."""

    ids: Sequence[int]
    words: Sequence[str] = ()

    def draw(self, tokens: int, seed: str) -> list[int]:
        """Indices of ``tokens`` words; the same for the same seed, and one the start of another."""
        rng = random.Random(seed)
        return [rng.randrange(len(self.ids)) for _ in range(tokens)]

    def token_ids(self, indices: Sequence[int]) -> list[int]:
        return [self.ids[index] for index in indices]

    def text(self, indices: Sequence[int]) -> str | None:
        """``None`` when requests carry token ids."""
        return "".join(self.words[index] for index in indices) if self.words else None


def id_prompts() -> Prompts:
    """Token ids above the special ones, of a small vocabulary."""
    return Prompts(range(FIRST_TOKEN_ID, 400))


def text_prompts(model: Path) -> Prompts:
    """Words that the model's tokenizer makes exactly one token of, wherever they stand.

    Raises:
        ValueError: no tokenizer there, or one without such words.
    """
    file = model / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{file} does not exist: name the model folder, or use --prompts ids")
    tokenizer = Tokenizer.from_file(str(file))
    found: dict[str, int] = {}
    for index in range(tokenizer.get_vocab_size()):
        word = tokenizer.decode([index], skip_special_tokens=True)
        if word.startswith(" ") and word[1:].isascii() and word[1:].isalpha():
            found[word] = index
    text = "".join(found)
    # A tokenizer may put a token of its own in front; the prompt is then longer by that one.
    if len(found) < _LEAST_WORDS or tokenizer.encode(text, add_special_tokens=False).ids != [
        *found.values()
    ]:
        raise ValueError(f"{file} has no words of one token each; use --prompts ids")
    return Prompts(list(found.values()), list(found))
