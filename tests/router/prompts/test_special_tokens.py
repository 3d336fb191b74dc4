"""A text is cut at its special tokens as one regular expression would, in bounded steps."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sglang_sbs.router.prompts import special_tokens
from sglang_sbs.router.prompts.known_text import TextPieces
from sglang_sbs.router.prompts.special_tokens import SpecialTokenCutter
from tools.cpu_engine.tiny_model import cached_tiny_model

TOKENS = st.text("<|ab>", min_size=1, max_size=5)


def straightforward(tokens: list[str], text: str) -> list[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
    return [piece for piece in pieces if piece]


@given(
    st.lists(TOKENS, min_size=1, unique=True), st.text("<|ab> ü", max_size=60), st.integers(1, 9)
)
def test_the_cut_is_that_of_one_regular_expression(
    tokens: list[str], text: str, window: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(special_tokens, "WINDOW_CHARS", window)
        assert list(SpecialTokenCutter(tokens).pieces(text)) == straightforward(tokens, text)


def test_many_tokens_with_one_beginning_are_cut_as_well() -> None:
    tokens = [f"<|reserved_special_token_{number}|>" for number in range(255)]
    text = "".join(f"word{token}<|reserved_special_token_" for token in tokens) * 300
    assert list(SpecialTokenCutter(tokens).pieces(text)) == straightforward(tokens, text)


class Watched:
    """A pattern that notes how much text it is given at once."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern, self.most, self.covered = pattern, 0, 0

    def finditer(self, text: str, start: int, end: int) -> Any:
        self.most = max(self.most, end - start)
        self.covered = max(self.covered, end)
        return self.pattern.finditer(text, start, end)


def test_no_call_goes_through_more_than_a_window() -> None:
    tokens = [f"<|reserved_special_token_{number}|>" for number in range(255)]
    cutter = SpecialTokenCutter(tokens)
    watched: Any = Watched(cutter._pattern)
    cutter._pattern = watched
    text = "<|reserved_special_token_" * 20_000
    assert list(cutter.pieces(text)) == [text]
    assert watched.most <= special_tokens.WINDOW_CHARS + max(map(len, tokens))


def test_the_pattern_tries_no_token_twice() -> None:
    """The common beginning of the tokens is in the pattern once."""
    tokens = [f"<|reserved_special_token_{number}|>" for number in range(255)]
    assert SpecialTokenCutter(tokens)._pattern.pattern.count("reserved") == 1


def test_tokens_of_a_text_are_one_string() -> None:
    pieces = list(SpecialTokenCutter(["<s>", "</s>"]).pieces("<s>" * 1000))
    assert len(pieces) == 1000
    assert len(set(map(id, pieces))) == 1


def test_tokens_of_which_each_begins_the_next_are_cut_as_well() -> None:
    tokens = ["a" * number for number in range(1, 1200)]
    text = "a" * 5000 + " b " + "a" * 7
    assert list(SpecialTokenCutter(tokens).pieces(text)) == straightforward(tokens, text)


def test_prompts_are_cut_in_windows() -> None:
    """The tokenizer of prompts cuts by this cutter, and by nothing that takes a whole text."""
    tokenizer = Tokenizer.from_file(str(cached_tiny_model() / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<|reserved_special_token_{n}|>" for n in range(255)])
    pieces = TextPieces(tokenizer)
    assert pieces._cut is not None
    watched: Any = Watched(pieces._cut._pattern)
    pieces._cut._pattern = watched
    text = "a word <|reserved_special_token_7|> <|reserved_special_token_" * 2_000
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    assert pieces.encode(text).tolist() == expected
    assert watched.covered >= len(text), "all of it went through the cutter"
    assert watched.most <= special_tokens.WINDOW_CHARS + len("<|reserved_special_token_254|>")
