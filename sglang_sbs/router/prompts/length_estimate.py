"""How many tokens a prompt has when nobody can count them: an estimate that learns. UTF-8 bytes
times a ratio that follows the ``prompt_tokens`` engines report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from sglang_sbs.router.prompts.chat_template import content_text

INITIAL_BYTES_PER_TOKEN = 4.0
_MEMORY_BYTES = 1_000_000.0
"""Prompts older than about this much text no longer count in the ratio."""
_MOST_BYTES = 20_000
"""A single prompt counts for no more, however long it is."""
_LEAST_BYTES_PER_TOKEN = 1.0
_MOST_BYTES_PER_TOKEN = 16.0
"""What is reported beyond these is odd text, or no truth: a tokenizer that knows no word takes
every byte for a token."""
_TOKENS_PER_MESSAGE = 4
"""Role markers and separators of a chat message, roughly, in any template."""


Counted = Literal["given", "tokenized", "estimated"]
"""Where a prompt's length is from: its token ids were given, made here, or nobody knows them."""


@dataclass(frozen=True, slots=True)
class PromptLength:
    tokens: int
    counted: Counted = "estimated"
    size_bytes: int = 0
    """Of the text the estimate rests on; 0 where there is nothing to learn from."""

    @property
    def exact(self) -> bool:
        return self.counted != "estimated"


class PromptLengths:
    def __init__(self, observe_error: Callable[[float], None] | None = None) -> None:
        """``observe_error`` gets (counted - reported) / reported of each inexact prompt."""
        self._observe_error = observe_error
        self._bytes = _MEMORY_BYTES / 10
        self._tokens = self._bytes / INITIAL_BYTES_PER_TOKEN
        self.contradicted = 0
        """Exact lengths that an engine reported otherwise."""

    @property
    def bytes_per_token(self) -> float:
        return self._bytes / self._tokens

    def learn(self, length: PromptLength, reported_tokens: int) -> None:
        if reported_tokens <= 0:
            return
        if length.exact:
            self.contradicted += length.tokens != reported_tokens
            return
        if self._observe_error is not None:
            self._observe_error((length.tokens - reported_tokens) / reported_tokens)
        if length.size_bytes == 0:
            return
        ratio = length.size_bytes / reported_tokens
        ratio = min(max(ratio, _LEAST_BYTES_PER_TOKEN), _MOST_BYTES_PER_TOKEN)
        size = min(length.size_bytes, _MOST_BYTES)
        keep = _MEMORY_BYTES / (_MEMORY_BYTES + size)
        self._bytes = self._bytes * keep + size
        self._tokens = self._tokens * keep + size / ratio

    def estimate(self, prompt: str | dict[str, Any]) -> PromptLength:
        if isinstance(prompt, dict):
            size, only_text = 0, True
            for text, plain in _chat_texts(prompt):
                size += len(text) if isinstance(text, bytes) else _utf8_size(text)
                only_text = only_text and plain
            messages = len(_list(prompt.get("messages")))
            tokens = round(size / self.bytes_per_token) + _TOKENS_PER_MESSAGE * messages
            return PromptLength(max(1, tokens), size_bytes=size if only_text else 0)
        size = _utf8_size(prompt)
        return PromptLength(max(1, round(size / self.bytes_per_token)), size_bytes=size)


def chat_bytes(body: dict[str, Any]) -> bytes | None:
    """The text of a chat in the order of most templates; ``None``: text is not all there is. For
    recognising a conversation that goes on, where no template says what the prompt really is."""
    pieces: list[bytes] = []
    for text, plain in _chat_texts(body):
        if not plain:
            return None
        pieces.append(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    return b"\x1e".join(pieces)


def _utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _chat_texts(body: dict[str, Any]) -> Iterator[tuple[str | bytes, bool]]:
    """Each text of a chat request, made when it is its turn, and whether text is all there is in
    that place."""
    for tool in _list(body.get("tools")):
        yield _written(tool), True
    for message in _list(body.get("messages")):
        if isinstance(message, dict):
            yield content_text(message.get("content"))
            for call in _list(message.get("tool_calls")):
                yield _written(call), True


def _written(value: Any) -> bytes:
    """As JSON: text of Python's takes four bytes a letter where a single one is rare."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:  # deeper than orjson goes
        return str(value).encode("utf-8", "surrogatepass")


def _list(value: Any) -> list[Any]:
    """What should be a list; anything else is the engine's to refuse."""
    return value if isinstance(value, list) else []
