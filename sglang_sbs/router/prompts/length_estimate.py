"""Estimates the tokens of prompts that cannot be counted: UTF-8 bytes times a ratio that follows
the ``prompt_tokens`` reported by engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec
import orjson

from sglang_sbs.router.prompts.chat_template import content_text

INITIAL_BYTES_PER_TOKEN = 4.0
_MEMORY_BYTES = 1_000_000.0
"""Amount of text after which an older prompt's weight in the ratio has dropped to 1/e."""
_MOST_BYTES = 20_000
"""Limit on one prompt's weight in the ratio, in bytes of text."""
_LEAST_BYTES_PER_TOKEN = 1.0
_MOST_BYTES_PER_TOKEN = 16.0
"""Bounds of a plausible ratio. Values beyond are unusual text or wrong reports; a tokenizer without
a vocabulary uses a token per byte."""
_TOKENS_PER_MESSAGE = 4
"""Estimated tokens of the role markers and separators that a template adds to a message."""


Counted = Literal["given", "tokenized", "estimated"]
"""Source of a prompt's length: ids given by the client, tokenized here, or estimated."""


class PromptLength(msgspec.Struct, frozen=True):
    tokens: int
    counted: Counted = "estimated"
    size_bytes: int = 0
    """UTF-8 size of the estimated text; 0 if the ratio must not be learned from this prompt."""

    @property
    def exact(self) -> bool:
        return self.counted != "estimated"


class PromptLengths:
    def __init__(self, observe_error: Callable[[float], None] | None = None) -> None:
        """Create the estimator. ``observe_error`` is called with the relative error of each
        estimated length: (estimated - reported) / reported."""
        self._observe_error = observe_error
        self._bytes = _MEMORY_BYTES / 10
        self._tokens = self._bytes / INITIAL_BYTES_PER_TOKEN
        self.contradicted = 0
        """Number of prompts with an exact length for which the engine reported another one."""

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
    """Return a chat's text in the order of most templates; ``None`` if it contains more than text.
    Used to recognize a continued conversation if no template can render the prompt."""
    pieces: list[bytes] = []
    for text, plain in _chat_texts(body):
        if not plain:
            return None
        pieces.append(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    return b"\x1e".join(pieces)


def _utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _chat_texts(body: dict[str, Any]) -> Iterator[tuple[str | bytes, bool]]:
    """Yield the text of each tool, message and tool call, and whether it has only text."""
    for tool in _list(body.get("tools")):
        yield _written(tool), True
    for message in _list(body.get("messages")):
        if isinstance(message, dict):
            yield content_text(message.get("content"))
            for call in _list(message.get("tool_calls")):
                yield _written(call), True


def _written(value: Any) -> bytes:
    """Serialize to JSON bytes. A string with one rare letter would take four bytes per letter."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:  # too deep for orjson
        return str(value).encode("utf-8", "surrogatepass")


def _list(value: Any) -> list[Any]:
    """Return ``value`` if it is a list, otherwise an empty list: the engine refuses the request."""
    return value if isinstance(value, list) else []
