"""Determines token count and block names of a prompt before it is submitted to the scheduler. Uses
token ids given by the client, else the tokenizer, else an estimate."""

from __future__ import annotations

import logging
import math
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from sglang_sbs.router.lanes import LONG_BYTES, Lanes
from sglang_sbs.router.prompts.block_names import TEXT_BYTES_PER_TOKEN, BlockFormat, BlockNamer
from sglang_sbs.router.prompts.chat_tokenizer import ChatTokenizer, PromptIds
from sglang_sbs.router.prompts.engine_limits import Known, LongestPrompt, PromptKind
from sglang_sbs.router.prompts.known_text import TooLong, TooManyTokens
from sglang_sbs.router.prompts.length_estimate import PromptLength, PromptLengths, chat_bytes
from sglang_sbs.router.prompts.message_chat import EngineChat, message_chat
from sglang_sbs.router.prompts.response_chat import response_chat
from sglang_sbs.router.prompts.tokenizer_check import EngineTokenizers
from sglang_sbs.router.prompts.written_size import TemplateError
from sglang_sbs.router.requests.body_fields import Namespace
from sglang_sbs.router.requests.engine_refusals import check_counted
from sglang_sbs.router.requests.plan import CONVERTED, RequestPlan, RouteKind
from sglang_sbs.router.requests.raw_json import json_of_ids
from sglang_sbs.router.requests.splitting import Prompt

logger = logging.getLogger(__name__)

_QUICK_CHARS = 512
_QUICK_PAGES = 256
_QUICK_PROMPTS = 32
"""Most prompts of a request that are read on the event loop, with at most ``_QUICK_CHARS`` to
tokenize and ``_QUICK_PAGES`` to name: handing less to a thread takes longer than the work."""
_MOST_BACKLOG_BYTES = 16 << 20
"""While more text than this waits to be tokenized, the lengths of long texts are estimated."""
_MOST_BYTES_PER_TOKEN = 64
"""Bytes per token that only text of mostly white space exceeds. A prompt that is too long even with
this ratio is refused before it is tokenized."""
_NO_BLOCKS = array("q")
"""Empty list of block names, shared by prompts without any: a request may have a thousand."""


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    length: PromptLength
    blocks: array[int] = field(default_factory=lambda: _NO_BLOCKS)
    """Names of the prompt's full blocks; empty if its prefix cannot be matched."""
    block_tokens: int = 0
    ids_json: bytes | None = None
    """Token ids as JSON, if engines may get them instead of the text."""


@dataclass(eq=False, repr=False)
class PromptReader:
    tokenizer: ChatTokenizer | None
    lengths: PromptLengths
    namer: BlockNamer
    engines: EngineTokenizers
    names_text: bool = False
    """Whether to name blocks of text that cannot be tokenized; only the approximate prefix index
    can use such names."""
    lanes: Lanes = field(default_factory=Lanes)
    counts: Counter[str] = field(default_factory=Counter)
    _template_warned: bool = False

    async def read(self, plan: RequestPlan) -> list[ReadPrompt]:
        """Return token count and block names of each prompt, read in a thread if that takes time.
        Raises: RouterError (400), a prompt is longer than any engine accepts. (Otherwise the
        scheduler would wait for passes that never happen.)"""
        known = self.engines.known()
        if self._is_quick(plan, known.blocks):
            prompts = self._read_all(plan, known)
        else:
            size = len(plan.common) + sum(len(prompt.member) for prompt in plan.prompts)
            if size >= LONG_BYTES and self.lanes.long_bytes > _MOST_BACKLOG_BYTES:
                known = known._replace(tokenizes=False)
            prompts = await self.lanes.run(size, self._read_all, plan, known)
        for prompt in prompts:
            self.counts[prompt.length.counted] += 1
        return prompts

    def _is_quick(self, plan: RequestPlan, format_: BlockFormat | None) -> bool:
        """Return whether the prompts are so small that a thread would only add latency."""
        if len(plan.prompts) > _QUICK_PROMPTS:
            return False
        chars = tokens = 0
        for prompt in plan.prompts:
            if isinstance(prompt.value, array):
                tokens += len(prompt.value)
            elif prompt.value is not None:
                chars += len(prompt.member) or len(plan.common)
        if self.tokenizer is not None and chars > _QUICK_CHARS:
            return False
        if self.names_text:
            tokens += chars // TEXT_BYTES_PER_TOKEN
        return format_ is None or tokens // format_.page_tokens <= _QUICK_PAGES

    def _read_all(self, plan: RequestPlan, known: Known) -> list[ReadPrompt]:
        for prompt in plan.prompts:
            _check_size(prompt, known.longest)
        prompts = []
        for prompt in plan.prompts:
            if plan.kind in CONVERTED:
                read = self._read_converted(plan, prompt, known)
            else:
                read = self._read(plan.model, prompt, known)
            length = read.length
            # SGLang before 0.5.23 ignores the ids of a chat.
            certain = length.exact and (plan.kind != "chat" or length.counted == "tokenized")
            if certain and prompt.value is not None and not known.longest.cuts:
                asked, start = prompt.asked_tokens, prompt.logprobs_from
                check_counted(length.tokens, asked, start, known.longest.context_tokens)
            prompts.append(_bounded(read, known.longest))
        return prompts

    def _chat_of(self, kind: RouteKind, body: Any) -> EngineChat | None:
        if not isinstance(body, dict):
            return None
        if kind == "messages":
            return message_chat(body)
        template = None if self.tokenizer is None else self.tokenizer.template
        return response_chat(body, inline_system=template is not None and template.inline_system)

    def _read_converted(self, plan: RequestPlan, prompt: Prompt, known: Known) -> ReadPrompt:
        """Read a prompt of ``/v1/messages`` or ``/v1/responses`` as the chat that engines make of
        it."""
        chat = self._chat_of(plan.kind, prompt.value)
        size = prompt.size_bytes or len(plan.common)
        chat_prompt = replace(prompt, value=chat and chat.body, size_bytes=0 if chat else size)
        if chat is not None and not chat.certain:
            # Do not refuse it for its length; its last blocks may have other names.
            known = known._replace(longest=known.longest._replace(cuts=True))
        # Responses cannot use a LoRA adapter.
        read = self._read(plan.model if plan.kind == "messages" else "", chat_prompt, known)
        if chat is not None and not chat.certain:
            read = replace(read, length=PromptLength(read.length.tokens))
        return read

    def _read(self, model: str, prompt: Prompt, known: Known) -> ReadPrompt:
        value, ids = prompt.value, None
        ids_json: bytes | None = None
        if isinstance(value, array):
            ids, length = value, PromptLength(max(1, len(value)), "given")
        elif value is None and prompt.size_bytes:
            length = PromptLength(max(1, round(prompt.size_bytes / self.lengths.bytes_per_token)))
        elif value is None:
            length = PromptLength(max(1, prompt.tokens), "given")
        elif known.tokenizes and (read := self._tokenize(value, known.longest)) is not None:
            kind = _kind_of(value)
            length = PromptLength(max(1, len(read.ids)))
            if read.exact and self.engines.agrees(kind):
                ids, length = read.ids, PromptLength(length.tokens, "tokenized")
                if read.certain and prompt.takes_ids and self.engines.takes_ids(kind):
                    ids_json = json_of_ids(ids)
        else:
            length = self.lengths.estimate(value)
        blocks = _NO_BLOCKS
        if not prompt.alone:
            length = PromptLength(length.tokens)
        elif known.blocks is not None and prompt.namespace is not None:
            namespace = prompt.namespace
            _, _, adapter = model.partition(":")  # ``base:adapter`` overrides ``lora_path``
            if adapter and model not in known.models:
                namespace = replace(namespace, lora=adapter.strip())
            blocks = self._name(value, ids, known.blocks, namespace)
        if not blocks and ids_json is None:
            return _of_length(length)
        page_tokens = known.blocks.page_tokens if blocks and known.blocks else 0
        return ReadPrompt(length, blocks, page_tokens, ids_json)

    def _tokenize(self, value: Any, longest: LongestPrompt) -> PromptIds | None:
        """Tokenize a text or chat; ``None`` if its length must be estimated. Raises: RouterError
        (400), it is longer than any engine accepts."""
        if self.tokenizer is None:
            return None
        counts = not longest.cuts and self.engines.agrees(_kind_of(value))
        most = longest.tokens if counts else math.inf
        try:
            if isinstance(value, str):
                return PromptIds(self.tokenizer.text_ids(value, most))
            return self.tokenizer.chat_ids(value, most)
        except TooManyTokens as found:
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
        self, value: Any, ids: array[int] | None, format_: BlockFormat, namespace: Namespace
    ) -> array[int]:
        if ids is not None:
            return self.namer.names(ids, format_, namespace)
        if not self.names_text or value is None:
            return _NO_BLOCKS
        text = value if isinstance(value, str) else chat_bytes(value)
        if text is None:
            return _NO_BLOCKS
        return self.namer.text_names(text, format_.page_tokens, namespace)


def _kind_of(value: Any) -> PromptKind:
    return "chat" if isinstance(value, dict) else "text"


def _check_size(prompt: Prompt, longest: LongestPrompt) -> None:
    """Check a prompt's length by its size alone, before tokenizing. Raises: RouterError (400), it
    is longer than any engine accepts."""
    if isinstance(prompt.value, array):
        longest.check(len(prompt.value))
    size = len(prompt.value) if isinstance(prompt.value, str) else prompt.size_bytes
    longest.check(size // _MOST_BYTES_PER_TOKEN, at_least=True)


@lru_cache(maxsize=1024)
def _of_length(length: PromptLength) -> ReadPrompt:
    """Return a prompt without block names. Equal lengths share one object, because a request may
    have a thousand prompts."""
    return ReadPrompt(length)


def _bounded(read: ReadPrompt, longest: LongestPrompt) -> ReadPrompt:
    """Return the prompt with its length limited as engines truncate it. Raises: RouterError (400),
    its exact length is more than any engine accepts."""
    if read.length.exact:
        longest.check(read.length.tokens)
    if read.length.tokens <= longest.tokens:
        return read
    return replace(read, length=PromptLength(int(longest.tokens)))
