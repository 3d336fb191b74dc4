"""Splits batches and ``n > 1`` into single prompts. Inside SGLang they would share one bootstrap
room and break PD. Prompts are counted before anything is built."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal

from sglang_sbs.router.options.config import RelayConfig
from sglang_sbs.router.requests.body_fields import (
    BESIDES_PROMPT,
    NAMESPACE_FIELDS,
    PLAIN,
    Body,
    Namespace,
    bad_request,
    is_alone,
    is_true,
    namespace_of,
    output_limit,
    positive,
    text_bytes_of,
    typed_fields,
)
from sglang_sbs.router.requests.engine_refusals import (
    LOGPROB_FIELDS,
    check_sampling,
    logprobs_from,
    response_tokens,
)
from sglang_sbs.router.requests.raw_json import (
    Raw,
    count_outside_strings,
    entries_of,
    first_byte,
    is_null,
    joined,
    list_of,
    members_of_entry,
    number_lists_of,
    token_ids_of,
    value_of,
)

_PER_PROMPT_FIELDS = (
    "text", "input_ids", "input_embeds", "image_data", "video_data", "audio_data",
    "mm_hashes", "mm_content_hashes", "sampling_params", "watermark", "return_logprob",
    "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_sampling_mask",
    "sampling_logprobs_mode", "return_hidden_states", "modalities", "lora_path",
    "custom_logit_processor", "extra_key", "cache_salt", "multi_item_delimiter_indices",
    "token_indices_to_pool",
)  # fmt: skip
"""Fields of ``GenerateReqInput`` that a batch may set per prompt (its ``__getitem__``)."""

_LIST_OF_LISTS = "token_ids_logprob"
"""Field whose value is a list itself, so only a list of lists has one value per prompt."""

_PROMPT_FIELDS = ("text", "input_ids", "input_embeds")
_NUMBER_STARTS = frozenset(b"%c" % digit for digit in b"-0123456789")
_MESSAGE_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens")
"""Sampling parameters of Anthropic's API; SGLang checks them as for a chat."""
_DEFAULT_MAX_TOKENS = {"generate": 128, "completions": 16, "chat": None}

_CHAT_MEMBERS = (
    "messages", "tools", "tool_choice", "chat_template_kwargs", "continue_final_message",
    "reasoning", "reasoning_effort", "thinking", "task",
)  # fmt: skip
"""Fields that form the prompt of a chat. Others stay JSON: ``logit_bias`` would be 15 times as
large as objects."""

_RESPONSE_MEMBERS = (
    "instructions", "input", "tools", "tool_choice", "reasoning", "chat_template_kwargs",
)  # fmt: skip
"""Fields that form the prompt of ``/v1/responses``."""
_NOT_REPEATED = frozenset({"input", "instructions", "tools"})
"""Fields of ``/v1/responses`` that ``MOST_REPEATED_BYTES`` does not limit: engines do not repeat
them in responses, or the context limit bounds them."""
MOST_REPEATED_BYTES = 1 << 20
"""Limit on the fields of a ``/v1/responses`` body except ``_NOT_REPEATED``: engines repeat them in
two events before the first token, in the last event, and in prefill's response."""

MOST_READ_BYTES = 4 << 20
"""Largest text that is tokenized. The length of a larger one, likely to be refused, is
estimated."""
_OF_CACHE = (*NAMESPACE_FIELDS, *sorted(BESIDES_PROMPT))
"""Fields that decide which cached prefixes a prompt may use, or that add to it beside its text.
Only these are read per prompt: a batch has up to a thousand, and a body many other fields."""
MOST_IDS_BYTES = 8 << 20
"""Largest list of token ids, as JSON, that is read. Longer ones (a million ids) are only
counted."""


@dataclass(slots=True)
class Prompt:
    value: Any
    """Value whose tokens are counted: a text, token ids (an ``array``), or the body of a chat or of
    Anthropic's messages. ``None``: not to be read; ``tokens`` or ``size_bytes`` is known
    instead."""
    tokens: int
    """Number of embeddings, or of ids in a list that is invalid or too long to read; otherwise
    0."""
    size_bytes: int
    """Bytes of a text, or of all texts of a chat, that is over ``MOST_READ_BYTES`` and therefore
    not tokenized; otherwise 0."""
    member: bytes | bytearray
    """The prompt as a JSON member for prefill and decode; empty for a chat (it spans the body)."""
    own: bytes | bytearray
    """JSON members that only this prompt of a batch has."""
    namespace: Namespace | None
    """Namespace in the KV cache; ``None`` if the body is unclear."""
    alone: bool
    """True if the engine's prompt contains nothing in addition to ``value``."""
    takes_ids: bool
    """True if token ids can replace the text without changing the response."""
    max_new_tokens: int | None = None
    asked_tokens: int | None = None
    """Limit on output tokens that the client set (``max_new_tokens`` may be a default)."""
    logprobs_from: int | None = None
    """First prompt token with logprobs; ``None``: none asked for."""


_Own = dict[str, Raw | bytes]

_Split = tuple[list[Prompt], int, bool]
"""Prompts, samples per prompt, and whether the response is a list. Members of the body that all
prompts share stay in it."""


def split_generate(body: Body, limits: RelayConfig) -> _Split:
    key = next((k for k in _PROMPT_FIELDS if body.typed.get(k) is not None), None)
    if key is None:
        raise bad_request("one of text, input_ids or input_embeds is required")
    prompt = body.pop(key)
    for name in _PROMPT_FIELDS:
        if name in body and body.typed[name] is None:
            del body[name]
    values = _batch_of(key, prompt, limits)
    batch = None if values is None else len(values)
    params = _params_of(body, batch)
    asked = [check_sampling("generate", sampling.typed) for sampling in params]
    samples = _samples_of(params)
    _check_units(batch or 1, samples, limits)
    if samples > 1:
        objects = [
            b"{%b}" % bytes(joined((sampling | {"n": Raw(b"1")}).items())) for sampling in params
        ]
        several = len(params) > 1
        body["sampling_params"] = Raw(list_of(objects) if several else objects[0])
    own: list[_Own] = [{} for _ in range(batch or 1)]
    if batch is not None:
        _move_own(body, own, batch)
    takes_ids = key == "text" and not any(name in body for name in _PROMPT_FIELDS)
    prompts = _prompts(key, values or [prompt], body, own, takes_ids=takes_ids)
    of_each = cycle(zip(params, asked, strict=True))
    for each, (sampling, limit), fields in zip(prompts, of_each, own, strict=False):
        each.max_new_tokens = _first_limit("generate", [sampling.typed.get("max_new_tokens")])
        each.asked_tokens = limit
        if "return_logprob" in body.typed:
            given = {name: body.typed[name] for name in LOGPROB_FIELDS if name in body}
            each.logprobs_from = logprobs_from(sampling.typed, given | typed_fields(fields))
    return prompts, samples, batch is not None or samples > 1


def _batch_of(key: str, raw: Raw, limits: RelayConfig) -> list[Raw] | list[bytes] | None:
    """Return the prompts of a batch as JSON; ``None`` for a single prompt. ``key``: the field.
    Raises: RouterError (400), the field is invalid."""
    first = first_byte(raw)
    if first == b'"':
        return None
    if first != b"[":
        raise bad_request(f"{key} must be a string or a list")
    inner = first_byte(raw, 1)
    if inner == b"]":
        if key == "text":
            raise bad_request("text must not be an empty list")
        return None
    if key == "text":
        _check_count(raw, limits)
        return entries_of(raw)
    depth = 1 if key == "input_ids" else 2
    if inner != b"[" or (depth == 2 and first_byte(raw, 2) != b"["):
        return None
    return number_lists_of(raw, depth, limits.max_units)


def _check_count(raw: Raw, limits: RelayConfig) -> None:
    """Check the number of texts in a list before building it. Raises: RouterError (400), too
    many."""
    view = memoryview(raw)
    if len(view) >= limits.max_units:
        _check_units(count_outside_strings(view, b'",')[ord(",")] + 1, 1, limits)


def _params_of(body: Body, batch: int | None) -> list[Body]:
    """Return the sampling parameters: one object for all prompts, or one per prompt of the
    ``batch``. Values stay JSON: a ``logit_bias`` of megabytes would be many times as large as
    objects."""
    raw = body.get("sampling_params")
    if raw is None or is_null(raw):
        return [Body({})]
    entries = [raw]
    if first_byte(raw) == b"[":
        if batch is None:
            raise bad_request("sampling_params must be an object: there is one prompt")
        entries = entries_of(raw)
        _check_entries("sampling_params", entries, batch)
    if not all(first_byte(entry) == b"{" or is_null(entry) for entry in entries):
        raise bad_request("sampling_params must be an object or a list of objects")
    return [Body(members_of_entry(entry)) for entry in entries]


def _move_own(body: Body, own: list[_Own], batch: int) -> None:
    """Move fields of ``body`` with one entry per prompt to the ``own`` members of each prompt."""
    for name in _PER_PROMPT_FIELDS:
        raw = body.get(name)
        if raw is None or first_byte(raw) != b"[":
            continue
        if name == _LIST_OF_LISTS and first_byte(raw, 1) != b"[":
            continue
        entries = entries_of(raw)
        _check_entries(name, entries, batch)
        del body[name]
        for fields, entry in zip(own, entries, strict=True):
            fields[name] = entry


def _check_entries(name: str, entries: list[Any], batch: int) -> None:
    if len(entries) != batch:
        raise bad_request(f"{name} has {len(entries)} entries for a batch of {batch}")


def _samples_of(params: list[Body]) -> int:
    """Return ``n`` of ``/generate``'s sampling parameters, which is the same for all prompts; 1 for
    beam search, where ``n`` counts beams."""
    values = {positive("n", item.typed.get("n")) for item in params}
    if len(values) > 1:
        raise bad_request("sampling_params.n must be the same for all prompts of a batch")
    if any((output_limit(item.typed.get("beam_width")) or 1) > 1 for item in params):
        return 1
    return values.pop()


# SGLang fault: samples-share-a-room
def split_openai(
    kind: Literal["completions", "chat"], raw: bytes | bytearray, body: Body, limits: RelayConfig
) -> _Split:
    fields = body.typed
    samples = positive("n", fields.get("n"))
    _check_units(1, samples, limits)
    asked = check_sampling(kind, fields)
    if samples > 1:
        body["n"] = Raw(b"1")
    if kind == "chat":
        _messages_of(body)
        prompts = [_chat_prompt(raw, body)]
    else:
        values = _completion_prompts(body.pop("prompt", None), limits)
        _check_units(len(values), samples, limits)
        # The echo must be the text that was sent, not its decoded tokens.
        plain = not is_true(fields.get("echo"))
        own: list[_Own] = [{} for _ in values]
        prompts = _prompts("prompt", values, body, own, takes_ids=plain)
    limits_given = (fields.get(name) for name in ("max_completion_tokens", "max_tokens"))
    limit = _first_limit(kind, limits_given)
    for prompt in prompts:
        prompt.max_new_tokens, prompt.asked_tokens = limit, asked
    return prompts, samples, False


def _messages_of(body: Body) -> Raw:
    """Return the messages of a chat. Raises: RouterError (400), there are none."""
    messages = body.get("messages")
    if messages is None or first_byte(messages) != b"[" or first_byte(messages, 1) == b"]":
        raise bad_request("messages must be a non-empty list")
    return messages


def split_messages(raw: bytes | bytearray, body: Body) -> _Split:
    """Split a ``/v1/messages`` body: always one prompt, in SGLang without cache namespace."""
    messages, fields = _messages_of(body), body.typed
    sampling = {name: fields[name] for name in _MESSAGE_SAMPLING if name in fields}
    asked = check_sampling("chat", sampling)
    if len(raw) <= MOST_READ_BYTES:
        read = (value_of(raw), 0, 0)
    else:
        rest = len(memoryview(body["system"])) if fields.get("system") is not None else 0
        read = (None, 0, 1 + rest + text_bytes_of(messages))
    prompt = Prompt(*read, b"", b"", PLAIN, alone=True, takes_ids=False)
    prompt.max_new_tokens = output_limit(fields.get("max_tokens"))
    prompt.asked_tokens = asked
    return [prompt], 1, False


def split_responses(raw: bytes | bytearray, body: Body) -> _Split:
    """Split a ``/v1/responses`` body: always one prompt. SGLang supports no LoRA adapter for it."""
    texts = body.get("input")
    if texts is None or first_byte(texts) not in (b'"', b"["):
        raise bad_request("input must be a string or a list of items")
    echoed = sum(
        len(memoryview(value)) for name, value in body.items() if name not in _NOT_REPEATED
    )
    if echoed > MOST_REPEATED_BYTES:
        raise bad_request(f"fields that are not of the prompt are over {MOST_REPEATED_BYTES} bytes")
    if len(raw) <= MOST_READ_BYTES:
        of_prompt = ((name, body[name]) for name in _RESPONSE_MEMBERS if name in body)
        read = value_of(b"".join((b"{", joined(of_prompt), b"}"))), 0, 0
    else:
        is_text = first_byte(texts) == b'"'
        size = len(memoryview(texts)) if is_text else text_bytes_of(texts)
        read = None, 0, 1 + size + len(memoryview(body.get("instructions", b"")))
    salts = [name for name in NAMESPACE_FIELDS if name != "lora_path" and name in body]
    namespace = namespace_of({name: body.typed[name] for name in salts})
    prompt = Prompt(*read, b"", b"", namespace, alone=True, takes_ids=False)
    prompt.asked_tokens = response_tokens(body.typed)
    prompt.max_new_tokens = output_limit(prompt.asked_tokens)
    return [prompt], 1, False


def _first_limit(kind: str, values: Iterable[Any]) -> int | None:
    """Return the first valid limit on output tokens, else SGLang's default for this kind of request
    (``None``: no default). Later values are not read."""
    limits = (limit for limit in map(output_limit, values) if limit is not None)
    return next(limits, _DEFAULT_MAX_TOKENS[kind])


def _completion_prompts(raw: Raw | None, limits: RelayConfig) -> list[Raw] | list[bytes]:
    if raw is not None:
        first = first_byte(raw)
        inner = first_byte(raw, 1) if first == b"[" else b""
        if first == b'"' or inner in _NUMBER_STARTS:
            return [raw]
        if inner == b"[":
            return number_lists_of(raw, 1, limits.max_units)
        if inner == b'"':
            _check_count(raw, limits)
            entries = entries_of(raw)
            if all(first_byte(entry) == b'"' for entry in entries):
                return entries
    raise bad_request("prompt must be a string, a list of strings or token ids")


def _prompts(
    key: str, values: list[Raw] | list[bytes], rest: Body, own: list[_Own], *, takes_ids: bool
) -> list[Prompt]:
    """Build the prompts from their ``values`` in the field ``key``. ``rest``: fields shared by all
    prompts; ``own``: fields of each."""
    shared = {name: rest.typed[name] for name in _OF_CACHE if name in rest}
    alone, namespace = is_alone(shared), namespace_of(shared)
    prompts = []
    for raw, members in zip(values, own, strict=True):
        its_namespace, just_it = namespace, alone
        ids = members.get("input_ids", rest.get("input_ids")) if key == "text" else None
        # Engines take the ids if they get both.
        read = _read(key, raw) if ids is None else _read("input_ids", ids)
        if members:
            fields = shared | typed_fields({n: members[n] for n in _OF_CACHE if n in members})
            its_namespace, just_it = namespace_of(fields), is_alone(fields)
        may_be_ids = takes_ids and just_it and isinstance(read[0], str)
        both = joined([(key, raw)]), joined(members.items())
        prompts.append(Prompt(*read, *both, its_namespace, just_it, may_be_ids))
    return prompts


def _read(key: str, raw: Raw | bytes) -> tuple[Any, int, int]:
    """Return ``value``, ``tokens`` and ``size_bytes`` of a :class:`Prompt`."""
    size = len(memoryview(raw))
    if first_byte(raw) == b'"':
        return (value_of(raw), 0, 0) if size <= MOST_READ_BYTES else (None, 0, size)
    if first_byte(raw) == b"[":
        flat = first_byte(raw, 1) != b"[" and size <= MOST_IDS_BYTES
        ids = token_ids_of(raw) if flat else None
        if ids is not None:
            return ids, 0, 0
        separator = b"[" if key == "input_embeds" else b","
        separators = count_outside_strings(memoryview(raw), b'[,"')[ord(separator)]
        return None, max(1, separators + (separator == b",")), 0
    return None, 1, 0


def _chat_prompt(raw: bytes | bytearray, body: Body) -> Prompt:
    if has_ids := body.typed.get("input_ids") is not None:  # they replace the tokenized messages
        read = _read("input_ids", body["input_ids"])
    else:
        body.pop("input_ids", None)  # null
        if len(raw) <= MOST_READ_BYTES:
            of_prompt = ((name, body[name]) for name in _CHAT_MEMBERS if name in body)
            read = value_of(b"".join((b"{", joined(of_prompt), b"}"))), 0, 0
        else:
            read = None, 0, 1 + text_bytes_of(body["messages"])
    alone, namespace = is_alone(body.typed), namespace_of(body.typed)
    return Prompt(*read, b"", b"", namespace, alone, takes_ids=alone and not has_ids)


def _check_units(prompts: int, samples: int, limits: RelayConfig) -> None:
    if samples > limits.max_samples:
        most = f"more than {limits.max_samples} samples of a prompt at once (--sbs-max-samples)"
        raise bad_request(f"n is {samples}: {most}")
    if prompts * samples > limits.max_units:
        most = f"more than {limits.max_units} requests at once (--sbs-max-batch)"
        raise bad_request(f"{prompts} prompts x {samples} samples are {most}")
