"""What the router finds out about a prompt before it asks the scheduler: tokens and block names.

Owns the order of attempts (ids given, tokenizer, estimate). Must not know requests in flight,
instances or how anything is placed.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, Protocol

from sglang_sbs.plain_words import counted
from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.lanes import LONG_BYTES, Lanes
from sglang_sbs.router.prompts.block_names import TEXT_BYTES_PER_TOKEN, BlockFormat, BlockNamer
from sglang_sbs.router.prompts.chat_template import TemplateError
from sglang_sbs.router.prompts.chat_tokenizer import ChatTokenizer, PromptIds
from sglang_sbs.router.prompts.known_text import TooLong, TooManyTokens
from sglang_sbs.router.prompts.length_estimate import PromptLength, PromptLengths, chat_bytes
from sglang_sbs.router.requests.body_fields import Namespace
from sglang_sbs.router.requests.plan import Plan
from sglang_sbs.router.requests.raw_json import json_of_ids
from sglang_sbs.router.requests.splitting import Prompt

logger = logging.getLogger(__name__)

_QUICK_CHARS = 512
_QUICK_PAGES = 256
_QUICK_PROMPTS = 32
"""Tokenizing so much text, naming so many pages, or estimating so many prompts takes no longer than
handing it to a thread."""
_MOST_BACKLOG_BYTES = 16 << 20
"""With so much text waiting, a long one is not tokenized: its length is estimated."""
_MOST_BYTES_PER_TOKEN = 64
"""No tokenizer makes fewer tokens of a long text, unless it is mostly white space."""

_NO_BLOCKS = array("q")
"""One for all: a batch has a thousand prompts."""

PromptKind = Literal["text", "chat"]
Counted = Literal["given", "tokenized", "estimated"]
"""Where a prompt's length is from: its token ids were given, made here, or nobody knows them."""


class LongestPrompt(NamedTuple):
    """The longest prompt that some engine takes (its ``max_req_input_len``)."""

    tokens: int
    cuts: bool = False
    """Longer ones are cut (``--allow-auto-truncate``), not refused."""

    def check(self, tokens: int, *, at_least: bool = False) -> None:
        """Raises: RouterError (400), every engine would refuse a prompt of so many tokens."""
        if tokens <= self.tokens or self.cuts:
            return
        raise RouterError(
            400,
            "prompt_too_long",
            f"the prompt has {'at least ' if at_least else ''}{counted(tokens, 'token')}; no "
            f"engine takes more than {self.tokens:,}",
        )


class Engines(Protocol):
    """What the engines make of prompts, as far as it is known."""

    def block_format(self) -> BlockFormat | None:
        """How prefill instances cut prompts into blocks; ``None``: names are of no use."""

    def agrees(self, kind: PromptKind) -> bool:
        """False: some engine is known to come to other token ids than the tokenizer here."""

    def takes_ids(self, kind: PromptKind) -> bool:
        """Whether token ids may be sent in place of such prompts, to some engine at least."""

    def serves(self, model: str) -> bool:
        """Whether this is a model's whole name, though it looks like ``model:adapter``."""

    def longest_prompt(self) -> LongestPrompt | None:
        """``None``: it is not known of every engine."""


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    length: PromptLength
    blocks: array[int] = field(default_factory=lambda: _NO_BLOCKS)
    """Names of its full pages; none: its prefix cannot be looked for."""
    block_tokens: int = 0
    ids_json: bytes | None = None
    """Its token ids as JSON, where engines may get them instead of the text."""
    counted: Counted = "estimated"


class PromptReader:
    def __init__(
        self,
        tokenizer: ChatTokenizer | None,
        lengths: PromptLengths,
        namer: BlockNamer,
        engines: Engines,
        *,
        names_text: bool,
        lanes: Lanes | None = None,
    ) -> None:
        """``names_text``: text nobody can tokenize gets block names too, good for the approximate
        index only."""
        self._tokenizer = tokenizer
        self._lengths = lengths
        self._namer = namer
        self._engines = engines
        self._names_text = names_text
        self._lanes = lanes or Lanes()
        self._template_warned = False
        self.counts: Counter[Counted] = Counter()

    def close(self) -> None:
        self._lanes.close()

    async def read(self, plan: Plan) -> list[ReadPrompt]:
        """One per prompt of the plan. What takes time is done off the loop.

        Raises:
            RouterError: 400, a prompt is longer than any engine takes. If it went there, others
                would wait for passes that never come.
        """
        format_ = self._engines.block_format()
        longest = self._engines.longest_prompt()
        if self._is_quick(plan, format_):
            prompts = self._read_all(plan, format_, longest)
        else:
            size = len(plan.common) + sum(len(prompt.member) for prompt in plan.prompts)
            busy = size >= LONG_BYTES and self._lanes.long_bytes > _MOST_BACKLOG_BYTES
            read = self._read_all
            prompts = await self._lanes.run(size, read, plan, format_, longest, tokenizes=not busy)
        self.counts.update(prompt.counted for prompt in prompts)
        return prompts

    def _is_quick(self, plan: Plan, format_: BlockFormat | None) -> bool:
        """Whether a thread would only cost time."""
        if len(plan.prompts) > _QUICK_PROMPTS:
            return False
        chars = tokens = 0
        for prompt in plan.prompts:
            if isinstance(prompt.value, array):
                tokens += len(prompt.value)
            elif prompt.value is not None:
                chars += len(prompt.member) or len(plan.common)
        if self._tokenizer is not None and chars > _QUICK_CHARS:
            return False
        if self._names_text:
            tokens += chars // TEXT_BYTES_PER_TOKEN
        return format_ is None or tokens // format_.page_tokens <= _QUICK_PAGES

    def _read_all(
        self,
        plan: Plan,
        format_: BlockFormat | None,
        longest: LongestPrompt | None,
        *,
        tokenizes: bool = True,
    ) -> list[ReadPrompt]:
        if longest is not None:
            for prompt in plan.prompts:
                _check_size(prompt, longest)
        read = partial(self._read, plan, format_=format_, longest=longest, tokenizes=tokenizes)
        prompts = [read(prompt) for prompt in plan.prompts]
        return prompts if longest is None else [_bounded(one, longest) for one in prompts]

    def _read(
        self,
        plan: Plan,
        prompt: Prompt,
        format_: BlockFormat | None,
        longest: LongestPrompt | None,
        tokenizes: bool,
    ) -> ReadPrompt:
        value = prompt.value
        ids: array[int] | None = None
        ids_json: bytes | None = None
        counted: Counted = "estimated"
        if isinstance(value, array):
            counted = "given"
            length = PromptLength(max(1, len(value)), exact=True)
            ids = value
        elif value is None and prompt.size_bytes:
            estimate = round(prompt.size_bytes / self._lengths.bytes_per_token)
            length = PromptLength(max(1, estimate), exact=False)
        elif value is None:
            counted = "given"
            length = PromptLength(max(1, prompt.tokens), exact=True)
        elif tokenizes and (read := self._tokenize(value, longest)) is not None:
            kind: PromptKind = "chat" if isinstance(value, dict) else "text"
            exact = read.exact and self._engines.agrees(kind)
            length = PromptLength(max(1, len(read.ids)), exact)
            if exact:
                counted = "tokenized"
                ids = read.ids
            if exact and read.certain and prompt.takes_ids and self._engines.takes_ids(kind):
                ids_json = json_of_ids(read.ids)
        else:
            length = self._lengths.estimate(value)
        if not prompt.alone:
            counted = "estimated"
            length = replace(length, exact=False, size_bytes=0)
        if format_ is None or not prompt.alone or prompt.namespace is None:
            return _without_blocks(length, ids_json, counted)
        namespace = self._with_adapter(prompt.namespace, plan.model)
        blocks = self._name(value, ids, format_, namespace)
        if not blocks:
            return _without_blocks(length, ids_json, counted)
        return ReadPrompt(length, blocks, format_.page_tokens, ids_json, counted)

    def _tokenize(self, value: Any, longest: LongestPrompt | None) -> PromptIds | None:
        """``None``: its length is to be estimated. Raises: RouterError, it is too long."""
        if self._tokenizer is None:
            return None
        agrees = self._engines.agrees("chat" if isinstance(value, dict) else "text")
        most = longest.tokens if longest is not None and agrees and not longest.cuts else math.inf
        try:
            if isinstance(value, str):
                return PromptIds(self._tokenizer.text_ids(value, most))
            return self._tokenizer.chat_ids(value, most)
        except TooManyTokens as found:
            assert longest is not None
            longest.check(found.args[0], at_least=True)
            raise
        except TooLong:
            return None
        except TemplateError as error:
            if not self._template_warned:
                self._template_warned = True
                logger.warning("chat template: %s; such prompts are estimated", error)
            return None

    def _name(
        self,
        value: Any,
        ids: array[int] | None,
        format_: BlockFormat,
        namespace: Namespace,
    ) -> array[int]:
        if ids is not None:
            try:
                return self._namer.names(ids, format_, namespace)
            except ValueError:  # embeddings, or nonsense the engine will refuse
                return _NO_BLOCKS
        if not self._names_text:
            return _NO_BLOCKS
        text = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else None
        if isinstance(value, dict):
            text = chat_bytes(value)
        if text is None:
            return _NO_BLOCKS
        return self._namer.text_names(text, format_.page_tokens, namespace)

    def _with_adapter(self, namespace: Namespace, model: str) -> Namespace:
        """``base-model:adapter-name`` comes before ``lora_path``."""
        _, colon, adapter = model.partition(":")
        if not colon or not adapter or self._engines.serves(model):
            return namespace
        return replace(namespace, lora=adapter.strip())


def _check_size(prompt: Prompt, longest: LongestPrompt) -> None:
    """Before anything is made of it. Raises: RouterError."""
    if isinstance(prompt.value, array):
        longest.check(len(prompt.value))
    size = len(prompt.value) if isinstance(prompt.value, str) else prompt.size_bytes
    longest.check(size // _MOST_BYTES_PER_TOKEN, at_least=True)


def _without_blocks(length: PromptLength, ids_json: bytes | None, counted: Counted) -> ReadPrompt:
    if ids_json is not None:
        return ReadPrompt(length, ids_json=ids_json, counted=counted)
    return _of_length(length, counted)


@lru_cache(maxsize=1024)
def _of_length(length: PromptLength, counted: Counted) -> ReadPrompt:
    """The same object for all alike: a batch has a thousand prompts."""
    return ReadPrompt(length, counted=counted)


def _bounded(read: ReadPrompt, longest: LongestPrompt) -> ReadPrompt:
    """What engines can make of it. Raises: RouterError."""
    if read.length.exact:
        longest.check(read.length.tokens)
    if read.length.tokens <= longest.tokens:
        return read
    return replace(read, length=PromptLength(longest.tokens, exact=False))
