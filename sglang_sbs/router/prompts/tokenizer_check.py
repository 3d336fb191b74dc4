"""Compares the router's tokenizer with each engine's (``POST /tokenize``).

The result decides whether block names and token counts made here are right, and whether token ids
may be sent instead of text.

An engine is asked once after each start. It gets texts and chats that distinguish any two real
tokenizers or templates: white space, digits, several scripts, composed and decomposed characters,
every special token, a sample of the vocabulary; system prompts, tools, tool calls and their
results, parts, the beginning of a response. Ids replace text only for engines that returned equal
ids for all of them (``--sbs-forward-token-ids auto``). If any differ, the router reports it,
lengths count as estimates, and blocks are not named."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import aiohttp
import orjson

from sglang_sbs.router.engines.control_requests import ask
from sglang_sbs.router.prompts.block_names import COARSE_TOKENS, BlockFormat
from sglang_sbs.router.prompts.chat_tokenizer import ChatTokenizer
from sglang_sbs.router.prompts.engine_limits import Known, LongestPrompt, PromptKind
from sglang_sbs.router.prompts.written_size import TemplateError
from sglang_sbs.router.requests.plan import RouteKind
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import WorkerInfo, parse_version
from sglang_sbs.router.workers.worker import Worker

logger = logging.getLogger(__name__)

Forwarding = Literal["auto", "on", "off"]

CHAT_IDS_VERSION = (0, 5, 23)
"""First SGLang release known to accept ``input_ids`` in a chat."""
_ANSWER_S = 10.0
_MAX_SPECIALS = 500
_SAMPLE = 400
_TEXTS = (
    "Hello, world! It's 12345.678 o'clock\tnow\n\n  indented\r\n",
    " leading and trailing spaces  ",
    "def f(x):\n    return {'a': [x**2, 0x1F]}  # käse \u00e9 e\u0301 \u212b",
    "漢字かな 한국어 русский العربية हिन्दी \U0001f600\U0001f1e9\U0001f1ea \u200b\ufeff",
)
_PLACE = {"city": {"type": "string"}, "days": {"type": "integer"}}
_WEATHER = {
    "name": "get_weather",
    "description": "Wetter, 天気 <now>",
    "parameters": {"type": "object", "properties": _PLACE, "required": ["city"]},
}
_TOOLS = [{"type": "function", "function": _WEATHER}]
_ASKED = {"role": "user", "content": " What's the weather in Köln? "}
_OF_KOELN = {"name": "get_weather", "arguments": '{"city": "Köln", "days": 2}'}
_CALL = {"id": "call_0", "type": "function", "function": _OF_KOELN}
_CALLED = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "tool_call_id": "call_0", "content": '{"sky": "grey"}'}
_BRIEF = {"role": "system", "content": "Be brief."}
_PARTS = [{"type": "text", "text": "And"}, {"type": "text", "text": "now?"}]
_AGAIN = [{"role": "assistant", "content": "Grey."}, {"role": "user", "content": _PARTS}]
_BEGUN = [_ASKED, {"role": "assistant", "content": "It is"}]
_CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [_ASKED]},
    {"messages": [_BRIEF, _ASKED, *_AGAIN]},
    {"messages": [_ASKED], "tools": _TOOLS},
    {"messages": [_ASKED, _CALLED, _RESULT], "tools": _TOOLS},
    {"messages": _BEGUN, "continue_final_message": True},
    {"messages": _BEGUN},
)


@dataclass(frozen=True, slots=True)
class TokenizerResult:
    """Whether an engine with this ``info`` has the router's token ids for text and for chats;
    ``None``: unknown."""

    info: WorkerInfo | None = None
    text: bool | None = None
    chat: bool | None = None
    takes_chat_ids: bool = False
    again_s: float = math.inf
    """Time of the next comparison (``time.monotonic()``); infinite: when ``info`` changes."""

    @property
    def wrong(self) -> list[PromptKind]:
        """Kinds of prompts for which the engine's token ids differ."""
        judged: list[tuple[PromptKind, bool | None]] = [("text", self.text), ("chat", self.chat)]
        return [kind for kind, agrees in judged if agrees is False]


_UNKNOWN = TokenizerResult()


class _Probes(NamedTuple):
    texts: list[str]
    text_ids: list[list[int]]
    chat_ids: list[list[int] | None]
    """The router's token ids of each of ``_CHATS``; ``None`` if the template refuses the chat."""


@dataclass(eq=False, repr=False)
class EngineTokenizers:
    """Compares the router's tokenizer with all engines'. Several threads may read the results."""

    registry: Registry
    session: aiohttp.ClientSession
    tokenizer: ChatTokenizer | None
    forwarding: Forwarding
    api_key: str | None
    names_blocks: bool = False
    """True if prefix matching is on, so that block names are needed."""
    every_s: float = 1.0
    """Interval of looking for new engines, and largest age of :meth:`known`."""
    again_s: float = 10.0
    """Time until an engine that did not answer is asked again."""
    _verdicts: dict[str, TokenizerResult] = field(default_factory=dict)
    _disagreeing: frozenset[PromptKind] = frozenset()
    _known: Known = field(default_factory=Known)
    _looked_s: float = -math.inf
    _odd_pages: str = ""

    def known(self) -> Known:
        """Return facts about all engines, at most ``every_s`` old."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= self.every_s:
            self._looked_s = now_s
            blocks = self._common_format() if self.names_blocks else None
            models = frozenset(w.info.model_id for w in self.registry if w.info is not None)
            longest = longest_prompt(self.registry) or LongestPrompt()
            refused = refused_fields(self.registry)
            self._known = Known(blocks, longest, models, refused=refused)
        return self._known

    def agrees(self, kind: PromptKind) -> bool:
        """Return False if some engine's token ids for such prompts differ from the router's."""
        return kind not in self._disagreeing

    def takes_ids(self, kind: PromptKind) -> bool:
        """Return whether at least one engine may get token ids instead of this kind of prompt."""
        return self.forwarding == "on" or (
            self.forwarding == "auto"
            and any(_may_get_ids(verdict, kind) for verdict in self._verdicts.copy().values())
        )

    def may_get_ids(self, kind: RouteKind, *workers: Worker) -> bool:
        """Return whether all ``workers`` may get token ids instead of the text of such a
        request."""
        if self.forwarding != "auto":
            return self.forwarding == "on"
        asked: PromptKind = "chat" if kind == "chat" else "text"
        return all(_may_get_ids(self.verdict(worker), asked) for worker in workers) and not (
            kind == "completions" and any(w.info and w.info.completion_template for w in workers)
        )

    def verdict(self, worker: Worker) -> TokenizerResult:
        verdict = self._verdicts.get(worker.url, _UNKNOWN)
        return verdict if verdict.info == worker.info else _UNKNOWN

    def _common_format(self) -> BlockFormat | None:
        """Return the most common block format of prefill instances. A block is one page if any
        engine publishes KV events, otherwise the fewest pages with at least ``COARSE_TOKENS``.
        ``None`` if no engine has a prefix cache."""
        if not any(worker.known.radix_cache for worker in self.registry):
            return None
        least = 1 if any(map(self.registry.kv_events_of, self.registry)) else COARSE_TOKENS
        formats = Counter(
            BlockFormat(page * -(-least // page), info.bigram)
            for worker in self.registry
            if worker.role == "prefill" and (info := worker.info) is not None
            for page in (info.page_size,)
        )
        common = formats.most_common()
        if len(common) > 1:
            found = ", ".join(f"{n} with {_said(format_)}" for format_, n in common)
            if found != self._odd_pages:
                self._odd_pages = found
                logger.warning(
                    "prefill instances cut prompts into different blocks (%s): prefixes are found "
                    "only on the most common kind. Give all the same --page-size",
                    found,
                )
        return common[0][0] if common else None

    async def watch(self) -> None:
        """Compare the tokenizer with each engine after it starts. Runs until cancelled; returns at
        once without a tokenizer."""
        if self.tokenizer is None:
            return
        probes = await asyncio.to_thread(_probes_of, self.tokenizer)
        while True:
            try:
                await self._ask_all(probes)
            except Exception:
                logger.exception("comparing tokenizers failed")
            await asyncio.sleep(self.every_s)

    async def _ask_all(self, probes: _Probes) -> None:
        workers = {worker.url: worker for worker in self.registry}
        for url in self._verdicts.keys() - workers.keys():
            del self._verdicts[url]
        for worker in workers.values():
            info, known, now_s = worker.info, self.verdict(worker), time.monotonic()
            if info is None or not worker.healthy or (known.info and now_s < known.again_s):
                continue
            try:
                async with asyncio.timeout(_ANSWER_S):
                    verdict = await self._ask(worker.url, info, probes)
                self._tell(worker, verdict)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                verdict = TokenizerResult(info, again_s=now_s + self.again_s)
                logger.debug("worker %s: its tokenizer is not known: %s", worker.url, error)
            self._verdicts[worker.url] = verdict
        verdicts = self._verdicts.values()
        self._disagreeing = frozenset(kind for result in verdicts for kind in result.wrong)

    async def _ask(self, url: str, info: WorkerInfo, probes: _Probes) -> TokenizerResult:
        answer = await self._post(url, {"prompt": probes.texts, "add_special_tokens": True})
        text = None if answer is None else answer.get("tokens") == probes.text_ids
        answers = [await self._post(url, body) for body in _CHATS]
        # A chat refused by our template must be refused by the engine as well.
        ids = [None if answer is None else answer.get("tokens") for answer in answers]
        agrees = ids == probes.chat_ids
        known = answers[-1] is not None or any(ids is not None for ids in probes.chat_ids)
        chat = agrees if known and text is not None else None
        numbers = parse_version(info.version)
        new = numbers is not None and (numbers >= CHAT_IDS_VERSION or numbers == (0, 0, 0))
        takes = bool(chat) and new and not await self._sees(url)
        return TokenizerResult(info, text, chat, takes)

    async def _sees(self, url: str) -> bool:
        """Return whether the engine's model accepts images or sound (also if unknown): its
        processor may then need a chat's text."""
        url += "/model_info"
        status, data = await ask(self.session, "GET", url, key=self.api_key, timeout_s=_ANSWER_S)
        model = orjson.loads(data) if status == 200 else None
        names = ("has_image_understanding", "has_audio_understanding")
        return not isinstance(model, dict) or any(model.get(name) is not False for name in names)

    async def _post(self, url: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the response of ``/tokenize``; ``None`` if refused or not available. Raises:
        ValueError, the engine failed (status 500 or above), so ask again later."""
        url += "/tokenize"
        status, data = await ask(
            self.session, "POST", url, key=self.api_key, timeout_s=_ANSWER_S, json=body
        )
        if status >= 500:
            raise ValueError(f"status {status}")  # retried later
        if status != 200:
            return None
        answer = orjson.loads(data)
        return answer if isinstance(answer, dict) else None

    def _tell(self, worker: Worker, verdict: TokenizerResult) -> None:
        if not verdict.wrong:
            worker.problems.pop("tokenizer", None)
            text = "is tokenized the same" if verdict.text else "could not be compared"
            chats = "the same" if verdict.chat else "could not be compared"
            logger.info("worker %s: text %s, chats %s", worker.url, text, chats)
            return
        self.registry.report_problem(
            worker,
            "tokenizer",
            f"has other token ids for {' and '.join(verdict.wrong)} than --tokenizer-path, so "
            "that lengths are estimates and prefixes are not found: give the directory of the "
            "model it serves, and --chat-template as the engine has it",
        )


def _probes_of(tokenizer: ChatTokenizer) -> _Probes:
    vocabulary = tokenizer.tokenizer.get_vocab_size()
    sample = random.Random(1).choices(range(vocabulary), k=_SAMPLE)
    added = tokenizer.tokenizer.get_added_tokens_decoder().values()
    specials = [token.content for token in added][:_MAX_SPECIALS]
    all_specials = "".join(specials) + " " + " ".join(specials) + "\n"
    sampled = tokenizer.tokenizer.decode(sample, skip_special_tokens=False)
    texts = [*_TEXTS, all_specials, sampled]
    text_ids = [tokenizer.text_ids(text).tolist() for text in texts]
    chat_ids: list[list[int] | None] = [None] * len(_CHATS)
    for at, body in enumerate(_CHATS):
        with suppress(TemplateError):
            chat_ids[at] = tokenizer.chat_ids(body).ids.tolist()
    return _Probes(texts, text_ids, chat_ids)


def longest_prompt(workers: Iterable[Worker]) -> LongestPrompt | None:
    """Return the longest prompt that can be served: the smaller of the prefill engines' and the
    decode engines' largest limit. ``None``: a limit is unknown, or there is no engine."""
    most: dict[str, int] = {}
    contexts: dict[str, float] = {}
    cuts = False
    for worker in workers:
        info = worker.info
        if info is None or info.max_request_tokens <= 0:
            return None
        cuts = cuts or info.cuts_prompts
        most[worker.role] = max(info.max_request_tokens, most.get(worker.role, 0))
        # A completion template changes the prompt that was counted here.
        known = 0 if info.completion_template else info.context_tokens
        contexts[worker.role] = max(known or math.inf, contexts.get(worker.role, 0))
    return LongestPrompt(min(most.values()), cuts, min(contexts.values())) if most else None


def refused_fields(workers: Iterable[Worker]) -> frozenset[str]:
    """Return the request fields that all prefill engines or all decode engines refuse."""
    of_role: dict[str, frozenset[str]] = {}
    for worker in workers:
        refused = frozenset(worker.info.refused_fields if worker.info is not None else ())
        of_role[worker.role] = of_role.get(worker.role, refused) & refused
    return frozenset().union(*of_role.values())


def _may_get_ids(verdict: TokenizerResult, kind: PromptKind) -> bool:
    return verdict.text is True if kind == "text" else bool(verdict.chat) and verdict.takes_chat_ids


def _said(format_: BlockFormat) -> str:
    return f"{format_.page_tokens} tokens{' in pairs' if format_.bigram else ''}"
