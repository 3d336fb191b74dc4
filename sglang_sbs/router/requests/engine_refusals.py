"""Rejects requests that SGLang would answer with 400 regardless of load, before an engine gets
them.

Decode contacts prefill about a request at once. If prefill then refuses it, its ranks never free
the bootstrap room (sglang #39428). With SGLang before 0.5.21 the room also stays if both schedulers
refuse the request.

Only refusals common to all supported releases of SGLang (compared: 0.5.6 to 0.5.23) and those
implied by an engine's flags are here. The texts are those of 0.5.23. Sources in SGLang:
``sampling/sampling_params.py`` (``verify``), ``managers/tokenizer_manager.py``,
``managers/scheduler.py``, ``entrypoints/openai/protocol.py``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.requests.body_fields import (
    Fields,
    bad_request,
    is_list,
    is_text,
    is_true,
    shown,
)
from sglang_sbs.router.requests.raw_json import Raw, value_of

_Kind = Literal["generate", "completions", "chat"]
_GREEDY_BELOW = 1e-6
"""SGLang sets ``top_k`` to 1 for temperatures below this."""

# SGLang fault: refused-room-stays
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda value: value >= 0.0, "a non-negative finite number, got"),
    ("top_p", lambda value: 0.0 < value <= 1.0, "in (0, 1], got"),
    ("min_p", lambda value: 0.0 <= value <= 1.0, "in [0, 1], got"),
    ("frequency_penalty", lambda value: -2.0 <= value <= 2.0, "in [-2, 2], got"),
    ("presence_penalty", lambda value: -2.0 <= value <= 2.0, "in [-2, 2], got"),
    # SGLang refuses 0 only from 0.5.14 on.
    ("repetition_penalty", lambda value: 0.0 <= value <= 2.0, "in (0, 2] (1.0 = no penalty), got"),
)
_GRAMMARS = {
    "generate": ("json_schema", "regex", "ebnf"),
    "completions": ("json_schema", "regex", "ebnf"),
    "chat": ("regex", "ebnf"),
}
_OUTPUT_LIMITS = {
    "generate": ("max_new_tokens",),
    "completions": ("max_tokens",),
    "chat": ("max_completion_tokens", "max_tokens"),
}
"""Fields with a limit on output tokens, by kind of request."""
_CHECKED = frozenset({"top_k", *(name for name, _, _ in _RANGES)}.union(*_GRAMMARS.values()))
"""Fields that :func:`check_sampling` checks in addition to the limits."""
_RESPONSE_SAMPLING = (*(name for name, _, _ in _RANGES), "top_k")
_OUTPUT_LOGPROBS = "message.output_text.logprobs"
_MOST_INCLUDE_BYTES = 4096
_NO_STORE = (
    "Response store is disabled. Stateful Responses require --enable-response-store on a "
    "standalone server; response storage is unavailable in PD mode."
)
LOGPROB_FIELDS = ("return_logprob", "logprob_start_len")
_BY_FLAGS = {
    "input_embeds": "input_embeds is provided while disable_radix_cache is False. Please add "
    "`--disable-radix-cache` when you launch the server if you want to use input_embeds as inputs.",
    "custom_logit_processor": "The server is not configured to enable custom logit processor. "
    "Please set `--enable-custom-logit-processor` to enable this feature.",
    "return_hidden_states": "The server is not configured to return hidden states. Please set "
    "`--return-hidden-states-mode last`, `--return-hidden-states-mode full`, or the legacy "
    "`--enable-return-hidden-states` flag.",
    "lora_path": "LoRA adapter '{}' was requested, but LoRA is not enabled. Please launch the "
    "server with --enable-lora flag and preload adapters using --lora-paths or "
    "/load_lora_adapter endpoint.",
}


def check_sampling(kind: _Kind, fields: Fields) -> int | None:
    """Check the sampling parameters of ``/generate`` or the body of an OpenAI request, and return
    the client's limit on output tokens (see :func:`asked_tokens`). Values that are neither numbers
    nor text are left to the engine. Raises: RouterError (400), SGLang would refuse a value."""
    if _CHECKED.isdisjoint(fields):  # as in most requests
        return _check_limits(kind, fields)
    for name, is_right, wanted in _RANGES:
        value = _number(fields, name)
        if value is not None and not is_right(value):
            # OpenAI's endpoints convert these values to floats.
            shown_as = value if kind == "generate" else float(value)
            raise bad_request(f"{name} must be {wanted} {shown_as}.")
    _check_top_k(kind, fields)
    asked = _check_limits(kind, fields)
    if sum(is_true(fields.get(name)) and is_text(fields.get(name)) for name in _GRAMMARS[kind]) > 1:
        raise bad_request("Only one of json_schema, regex, ebnf, or structural_tag can be set.")
    return asked


def store_disabled(param: str) -> RouterError:
    """Return SGLang's refusal of stored responses, which it does not support under PD."""
    return RouterError(400, "invalid_request", _NO_STORE, param=param)


def check_responses(fields: Fields) -> None:
    """Check a body of ``/v1/responses``. Raises: RouterError (400), it has an option that no engine
    supports under PD, or that only decode would refuse (prefill is not asked to stream)."""
    if fields.get("previous_response_id") is not None:
        raise store_disabled("previous_response_id")
    if is_true(fields.get("background")):
        raise store_disabled("background")
    include = fields.get("include")
    if isinstance(include, Raw) and len(memoryview(include)) > _MOST_INCLUDE_BYTES:
        raise bad_request(f"include is over {_MOST_INCLUDE_BYTES} bytes")
    names = value_of(include) if isinstance(include, Raw) else None
    if is_true(fields.get("stream")) and isinstance(names, list) and _OUTPUT_LOGPROBS in names:
        why = "logprobs are not supported in streaming mode"
        raise RouterError(400, "invalid_request", why, param="logprobs")
    params = {name: fields[name] for name in _RESPONSE_SAMPLING if name in fields}
    check_sampling("chat", params | {"max_tokens": response_tokens(fields)})


def response_tokens(fields: Fields) -> int | None:
    """Return SGLang's limit on the output tokens of ``/v1/responses``: two fewer than the client's
    (``ResponsesRequest.to_sampling_params``). ``None`` if the client sets no limit."""
    asked = _whole(fields, "max_output_tokens")
    return None if asked is None else asked - 2


def check_flags(kind: _Kind, fields: Fields, refused: Collection[str]) -> None:
    """Check a body for fields that all prefill or all decode engines refuse (``refused``, from
    ``WorkerInfo.refused_fields``). Raises: RouterError (400), it uses one."""
    for name in refused:
        value = fields.get(name)
        if value is None:
            continue
        if name == "input_embeds":
            # Engines ignore it next to text or ids, and OpenAI's endpoints always do.
            alone = all(fields.get(other) is None for other in ("text", "input_ids"))
            is_asked = kind == "generate" and alone and is_list(value)
        elif name == "return_hidden_states":
            is_asked = value is True
        else:
            is_asked = is_true(value) and is_text(value)
        if is_asked:
            raise bad_request(_BY_FLAGS[name].format(shown(value).strip('"')))


def check_counted(
    tokens: int, asked_tokens: int | None, logprobs_from: int | None, context_tokens: float
) -> None:
    """Check a tokenized prompt against the engines' limits. ``tokens``: the prompt's;
    ``asked_tokens``: limit on output; ``logprobs_from``: first prompt token with logprobs (each
    ``None`` if the client omits it); ``context_tokens``: longest context (``LongestPrompt``).
    Raises: RouterError (400), every engine would refuse it."""
    if asked_tokens is not None and tokens + asked_tokens > context_tokens:
        raise bad_request(
            f"Requested token count exceeds the model's maximum context length of "
            f"{context_tokens} tokens. You requested a total of {tokens + asked_tokens} tokens: "
            f"{tokens} tokens from the input messages and {asked_tokens} tokens for the "
            "completion. Please reduce the number of tokens in the input messages or the "
            "completion to fit within the limit."
        )
    if logprobs_from is not None and logprobs_from > tokens:
        raise bad_request(
            f"req.logprob_start_len={logprobs_from} is higher than the number of input tokens "
            f"len(req.origin_input_ids)={tokens}. Please use a smaller logprob_start_len."
        )


def asked_tokens(kind: _Kind, fields: Fields) -> int | None:
    """Return the client's limit on output tokens; ``None`` if it is missing, or SGLang's releases
    disagree on its meaning."""
    limits = [limit for name in _OUTPUT_LIMITS[kind] if (limit := _whole(fields, name)) is not None]
    if len(limits) != 1 or (kind == "chat" and not limits[0]):  # 0 means no limit for chats
        return None
    return limits[0]


def logprobs_from(params: Fields, fields: Fields) -> int | None:
    """Return ``logprob_start_len`` of a ``/generate`` request, the first prompt token with
    logprobs; ``None`` if SGLang ignores it. Old releases ignore it if nothing is generated."""
    wants, start = LOGPROB_FIELDS
    if not is_true(fields.get(wants)) or asked_tokens("generate", params) == 0:
        return None
    return _whole(fields, start)


def _check_top_k(kind: _Kind, fields: Fields) -> None:
    top_k, temperature = _number(fields, "top_k"), _number(fields, "temperature")
    if temperature is None:  # engines may override the default, except for completions
        temperature = 1.0 if kind == "completions" else 0.0
    if top_k is not None and top_k < 1 and top_k != -1 and temperature >= _GREEDY_BELOW:
        raise bad_request(f"top_k must be -1 (disable) or at least 1, got {top_k}.")


def _check_limits(kind: _Kind, fields: Fields) -> int | None:
    most = asked_tokens(kind, fields)
    least = _whole(fields, "min_new_tokens" if kind == "generate" else "min_tokens")
    if kind == "completions" and most is not None and most <= 0:
        raise bad_request("max_tokens must be positive")
    if least is not None and least < 0:
        raise bad_request(f"min_new_tokens must be in [0, max_new_tokens], got {least}.")
    if most is not None and most < 0:
        raise bad_request(f"max_new_tokens must be at least 0, got {most}.")
    if most is not None and least is not None and least > most:
        raise bad_request(f"min_new_tokens must be in [0, max_new_tokens({most})], got {least}.")
    return most


def _number(fields: Fields, name: str) -> int | float | None:
    """Return the number in a field; ``None`` if it is missing or is something else."""
    value = fields.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(fields: Fields, name: str) -> int | None:
    value = fields.get(name)
    return value if type(value) is int else None
