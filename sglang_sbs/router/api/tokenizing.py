"""Serves ``/v1/tokenize`` and ``/v1/detokenize`` with the tokenizer of ``--tokenizer-path``, with
the responses of SGLang (``entrypoints/openai/serving_tokenize.py``, 0.5.5+). Engines are not
involved."""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
from aiohttp import web
from tokenizers import Tokenizer

from sglang_sbs.dashboard.pages import Handler
from sglang_sbs.router.api.bodies import json_answer, json_object
from sglang_sbs.router.client.answer_stream import send
from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.lanes import LONG_BYTES
from sglang_sbs.router.prompts.chat_tokenizer import ChatTokenizer
from sglang_sbs.router.relay.relay import Relay
from sglang_sbs.router.requests.body_fields import Body, bad_request, shown
from sglang_sbs.router.requests.raw_json import (
    JsonError,
    Raw,
    entries_of,
    first_byte,
    members_of,
    token_ids_of,
)

_MAX_BODY_BYTES = 4 << 20
"""Limit on a JSON body: reading a larger one would block the event loop."""
_MOST_BACKLOG_BYTES = 16 << 20
_MOST_TEXTS = 1024
_PART_IDS = 1 << 14
_AROUND_IDS = 8
"""Ids decoded on each side of a place where :func:`_decoded` may split a list of ids."""
_TRIES = 16
_MOST_IDS = 1 << 18
"""Largest number of ids in one request, above any model's context; decoding them is fast."""


class Tokenizing:
    def __init__(self, relay: Relay, path: str) -> None:
        """Serve with the relay's tokenizer, which was loaded from ``path``."""
        self._relay = relay
        self._path = path

    def routes(self) -> list[tuple[str, str, Handler]]:
        return [
            ("POST", "/v1/tokenize", partial(self._answered, self._tokens)),
            ("POST", "/tokenize", partial(self._answered, self._tokens)),
            ("POST", "/v1/detokenize", partial(self._answered, _text)),
            ("POST", "/detokenize", partial(self._answered, _text)),
            ("GET", "/v1/tokenizers", self.tokenizers),
        ]

    async def tokenizers(self, _request: web.Request) -> web.StreamResponse:
        """List the router's tokenizer in sglang_router's format."""
        tokenizer, path = self._relay.prompts.tokenizer, self._path
        if tokenizer is None:
            return json_answer({"tokenizers": []})
        known = {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, path)),
            "name": path,
            "source": path,
            "vocab_size": tokenizer.tokenizer.get_vocab_size(),
        }
        return json_answer({"tokenizers": [known]})

    async def _answered(
        self, work: Callable[[ChatTokenizer, bytes | bytearray], Any], request: web.Request
    ) -> web.StreamResponse:
        """Respond with the result of ``work``, run in a thread on the tokenizer and the request's
        body. Raises: RouterError: 400, the request is invalid or there is no tokenizer; 408, 413 or
        503, the body is late, too large or has no room."""
        relay, tokenizer = self._relay, self._relay.prompts.tokenizer
        if tokenizer is None:
            why = "this router has no tokenizer: start it with --tokenizer-path"
            raise RouterError(400, "tokenizer_not_found", why)
        with relay.bodies.share() as share:
            raw = await share.read(request, _MAX_BODY_BYTES)
            if relay.lanes.long_bytes > _MOST_BACKLOG_BYTES:
                detail = "too much text is waiting for the tokenizer"
                raise RouterError(503, "busy", detail, retry_after_s=1.0)
            # Always use the threads for long texts, so that prompts of requests do not wait.
            body = await relay.lanes.run(
                max(len(raw), LONG_BYTES), lambda: orjson.dumps(work(tokenizer, raw))
            )
            return await send(request, web.Response(body=body, content_type="application/json"))

    def _tokens(self, tokenizer: ChatTokenizer, raw: bytes | bytearray) -> dict[str, Any]:
        body = json_object(raw)
        prompt, messages = body.get("prompt"), body.get("messages")
        if (prompt is None) == (messages is None):
            raise bad_request("exactly one of prompt and messages must be given")
        special = body.get("add_special_tokens", True)
        if not isinstance(special, bool):
            raise bad_request("add_special_tokens must be true or false")
        try:
            encode = partial(tokenizer.pieces.encode, add_special_tokens=special)
            if messages is not None:
                ids: Any = _chat_ids(tokenizer, body)
            elif isinstance(prompt, str):
                ids = encode(prompt).tolist()
            elif isinstance(prompt, list) and all(isinstance(text, str) for text in prompt):
                _check_count("prompt", prompt)
                ids = [encode(text).tolist() for text in prompt]
            else:
                raise bad_request("prompt must be a string or a list of strings")
        except ValueError as error:  # template errors as well, or a text too long
            raise bad_request(str(error)) from error
        count = [len(some) for some in ids] if isinstance(prompt, list) else len(ids)
        return {"tokens": ids, "count": count, "max_model_len": self._longest(tokenizer)}

    def _longest(self, tokenizer: ChatTokenizer) -> int:
        """Return the model's longest context in tokens: from its files, else the engines' limit on
        a request; -1 if unknown."""
        if tokenizer.max_length is not None:
            return tokenizer.max_length
        known = (w.info.max_request_tokens for w in self._relay.attempts.registry if w.info)
        return max(known, default=0) or -1


def _chat_ids(tokenizer: ChatTokenizer, body: dict[str, Any]) -> list[int]:
    if not isinstance(body["messages"], list):
        raise bad_request("messages must be a list")
    if body.get("add_generation_prompt") is not None:
        raise bad_request("add_generation_prompt is not supported here: ask an engine")
    prompt = tokenizer.chat_ids(body)
    if not prompt.exact:
        raise bad_request("messages with images, video or sound: only engines know their tokens")
    if not prompt.certain:
        raise bad_request("only an engine can tokenize these fields: ask one")
    return prompt.ids.tolist()


def _check_count(name: str, of: list[Any]) -> None:
    if len(of) > _MOST_TEXTS:
        most = f"at most {_MOST_TEXTS} are allowed per request"
        raise bad_request(f"{name} has {len(of)} entries; {most}")


def _text(tokenizer: ChatTokenizer, raw: bytes | bytearray) -> dict[str, Any]:
    try:
        body = Body(members_of(raw))
        skip, tokens = body.typed.get("skip_special_tokens"), body.get("tokens")
        if not isinstance(skip, bool | None):
            raise bad_request("skip_special_tokens must be true or false")
        if tokens is None or first_byte(tokens) != b"[":
            raise bad_request("tokens must be a list of ids, or of such lists")
        if first_byte(tokens, 1) == b"]":
            return {"text": ""}
        several = first_byte(tokens, 1) == b"["
        lists = entries_of(tokens) if several else [tokens]
    except JsonError as error:
        raise bad_request(str(error)) from error
    _check_count("tokens", lists)
    ids = [_ids(given) for given in lists]
    if sum(map(len, ids)) > _MOST_IDS:
        raise bad_request(f"tokens has over {_MOST_IDS} ids")
    texts = [
        _decoded(tokenizer.tokenizer, prompt_ids, skip=skip is not False) for prompt_ids in ids
    ]
    return {"text": texts if several else texts[0]}


def _decoded(tokenizer: Tokenizer, ids: array[int], *, skip: bool) -> str:
    """Decode ``ids``; ``skip`` omits special tokens. Long lists are decoded in parts if that gives
    the same text, because a decoder uses 60 bytes per id while it works."""

    def texts(*lists: array[int]) -> list[str]:
        # Unlike ``decode`` this releases the GIL.
        return tokenizer.decode_batch([given.tolist() for given in lists], skip_special_tokens=skip)

    parts, start = [], 0
    while len(ids) - start > _PART_IDS:
        for end in range(start + _PART_IDS, start + _PART_IDS - _TRIES, -1):
            left, right = ids[end - _AROUND_IDS : end], ids[end : end + _AROUND_IDS]
            whole, *halves = texts(left + right, left, right)
            if whole == "".join(halves):
                break
        else:  # e.g. decoders that strip a text's first space
            break
        parts += texts(ids[start:end])
        start = end
    return "".join((*parts, *texts(ids[start:])))


def _ids(raw: Raw) -> array[int]:
    """Parse a list of token ids into an array, as Python objects would take many times the memory.
    Raises: RouterError (400), it is not a list of ids."""
    if first_byte(raw) != b"[":
        raise bad_request(f"tokens: {shown(raw)} is not a list, unlike the first")
    # An array would accept true as 1.
    ids = None if b"e" in bytes(raw) else token_ids_of(raw)
    if ids is None:
        raise bad_request(f"tokens: {shown(raw)} contains something that is not a token id")
    return ids
