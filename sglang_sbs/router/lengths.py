"""How many tokens a prompt has: exact where possible, else an estimate that learns.

Owns counting and the calibration of the estimate. Must not know requests in flight. Exact for token
ids, and for text and chat with a tokenizer; otherwise UTF-8 bytes times a ratio that follows the
``prompt_tokens`` engines report.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sglang_sbs.router.chat_tokenizer import ChatTokenizer, TemplateError, content_text
from sglang_sbs.router.requests import RouteKind

logger = logging.getLogger(__name__)

INITIAL_BYTES_PER_TOKEN = 4.0
_MEMORY_BYTES = 1_000_000.0
"""Prompts older than about this much text no longer count in the ratio."""
_TOKENS_PER_MESSAGE = 4
"""Role markers and separators of a chat message, roughly, in any template."""
_THREADS = 2


@dataclass(frozen=True, slots=True)
class PromptLength:
    tokens: int
    exact: bool
    size_bytes: int = 0
    """Of the text the estimate rests on; 0 where there is nothing to learn from."""


class PromptLengths:
    def __init__(
        self,
        tokenizer: ChatTokenizer | None = None,
        observe_error: Callable[[float], None] | None = None,
    ) -> None:
        """``observe_error`` gets (counted - reported) / reported of each inexact prompt."""
        self._tokenizer = tokenizer
        self._observe_error = observe_error
        self._threads = (
            ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize") if tokenizer else None
        )
        self._bytes = _MEMORY_BYTES / 10
        self._tokens = self._bytes / INITIAL_BYTES_PER_TOKEN
        self._template_warned = False

    @property
    def bytes_per_token(self) -> float:
        return self._bytes / self._tokens

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def count(self, kind: RouteKind, prompts: Sequence[Any]) -> list[PromptLength]:
        """One length per prompt (text, ids, embeddings or chat body). Tokenizes off the loop."""
        if self._tokenizer is None or not any(_has_text(kind, prompt) for prompt in prompts):
            return [self._estimate(kind, prompt) for prompt in prompts]
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, lambda: [self._tokenized(kind, prompt) for prompt in prompts]
        )

    def learn(self, length: PromptLength, reported_tokens: int) -> None:
        """An engine said how many tokens that prompt really had."""
        if reported_tokens <= 0:
            return
        if self._observe_error is not None and not length.exact:
            self._observe_error((length.tokens - reported_tokens) / reported_tokens)
        if length.exact or length.size_bytes == 0:
            return
        keep = _MEMORY_BYTES / (_MEMORY_BYTES + length.size_bytes)
        self._bytes = self._bytes * keep + length.size_bytes
        self._tokens = self._tokens * keep + reported_tokens

    def _estimate(self, kind: RouteKind, prompt: Any) -> PromptLength:
        if kind == "chat":
            texts, messages, only_text = _chat_texts(prompt)
            size = sum(map(_utf8_size, texts))
            tokens = round(size / self.bytes_per_token) + _TOKENS_PER_MESSAGE * messages
            return PromptLength(max(1, tokens), False, size if only_text else 0)
        if isinstance(prompt, str):
            size = _utf8_size(prompt)
            return PromptLength(max(1, round(size / self.bytes_per_token)), False, size)
        return PromptLength(max(1, len(prompt)) if isinstance(prompt, list) else 1, True)

    def _tokenized(self, kind: RouteKind, prompt: Any) -> PromptLength:
        """Runs in a thread."""
        assert self._tokenizer is not None
        if kind == "chat":
            try:
                tokens = self._tokenizer.count_chat(prompt)
            except TemplateError as error:
                if not self._template_warned:
                    self._template_warned = True
                    logger.warning("chat template: %s; such prompts are estimated", error)
                return self._estimate(kind, prompt)
            return PromptLength(max(1, tokens), _chat_texts(prompt)[2])
        if isinstance(prompt, str):
            return PromptLength(max(1, self._tokenizer.count_text(prompt)), True)
        return self._estimate(kind, prompt)


def _has_text(kind: RouteKind, prompt: Any) -> bool:
    return kind == "chat" or isinstance(prompt, str)


def _utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _chat_texts(body: dict[str, Any]) -> tuple[list[str], int, bool]:
    """All text of a chat request, the number of messages, and whether text is all there is."""
    texts: list[str] = []
    only_text = True
    messages = body.get("messages") or []
    for message in messages:
        if not isinstance(message, dict):
            continue
        text, plain = content_text(message.get("content"))
        texts.append(text)
        only_text = only_text and plain
        texts += map(str, _list(message.get("tool_calls")))
    texts += map(str, _list(body.get("tools")))
    return texts, len(messages), only_text


def _list(value: Any) -> list[Any]:
    """What should be a list; anything else is the engine's to refuse."""
    return value if isinstance(value, list) else []
