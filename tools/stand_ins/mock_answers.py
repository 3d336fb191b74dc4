"""Answers of a scripted engine: SGLang's JSON of ``/generate``, of OpenAI's three endpoints and of
Anthropic's ``/v1/messages``.

Output tokens read t1, t2, …, those of a prompt p0, p1, …
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.stand_ins.mock_script import Behaviour, EngineRole, RecordedRequest

_RESPONSE_ENDS: dict[EngineRole, str] = {"prefill": "incomplete", "decode": "completed"}


def frame(record: RecordedRequest) -> dict[str, Any]:
    """Return the common part of OpenAI's answers and events."""
    chat = record.path.endswith("chat/completions")
    kind = "chat.completion" if chat else "text_completion"
    return {"id": record.rid, "object": kind, "created": 1, "model": "mock"}


def output(
    role: EngineRole,
    record: RecordedRequest,
    behaviour: Behaviour,
    tokens: int,
    *,
    last: bool,
    stream: bool,
) -> dict[str, Any]:
    """An answer, or the event that ends with output token number ``tokens``."""
    text = " ".join(f"t{i}" for i in range(1, tokens + 1))
    if record.path == "/generate":
        reason: Any = None
        if last:
            reason = {"type": "length", "length": tokens}
        if last and behaviour.abort:
            reason = {"type": "abort", "message": "scripted abort", "status_code": None}
        meta: dict[str, Any] = {
            "id": record.rid,
            "prompt_tokens": behaviour.prompt_tokens,
            "cached_tokens": behaviour.cached_tokens,
            "completion_tokens": tokens,
            "finish_reason": reason,
        }
        if record.body.get("return_logprob"):
            meta["input_token_logprobs"] = (
                [[-0.5, i, None] for i in range(behaviour.prompt_tokens)]
                if role == "prefill"
                else []
            )
            meta["output_token_logprobs"] = [[-0.1, i, None] for i in range(tokens)]
        return {"text": text, "meta_info": meta}
    if record.path.startswith("/v1/messages"):
        return _message(role, behaviour, text)
    if record.path.startswith("/v1/responses"):
        status = "failed" if behaviour.abort else _RESPONSE_ENDS[role]
        return response(record, behaviour, status, text, 1 if role == "prefill" else tokens)
    finish = None
    if last:
        finish = "abort" if behaviour.abort else "length"
    piece = f"t{tokens}" if stream else text
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    if record.path.endswith("chat/completions"):
        message = {"role": "assistant", "content": piece}
        choice["delta" if stream else "message"] = message
    else:
        choice["text"] = piece
        if record.body.get("logprobs"):
            choice["logprobs"] = _logprobs(role, record, behaviour, tokens, stream)
    answer = frame(record) | {"choices": [choice]}
    if not stream:
        answer["usage"] = usage_of(behaviour, 1 if role == "prefill" else behaviour.tokens)
    return answer


def _message(role: EngineRole, behaviour: Behaviour, text: str) -> dict[str, Any]:
    """Anthropic's form. SGLang ends prefill by length and writes an abort as ``end_turn``."""
    ended = behaviour.abort or role == "decode"
    usage = {"input_tokens": behaviour.prompt_tokens - behaviour.cached_tokens}
    if behaviour.cached_tokens:
        usage["cache_read_input_tokens"] = behaviour.cached_tokens
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": text}],
        "model": "mock",
        "stop_reason": "end_turn" if ended else "max_tokens",
        "usage": usage | {"output_tokens": behaviour.tokens if role == "decode" else 1},
    }


def message_events(behaviour: Behaviour) -> Iterator[dict[str, Any]]:
    """The events of a stream of ``/v1/messages``; token number n is event number n + 1."""
    usage = {"input_tokens": behaviour.prompt_tokens, "output_tokens": 0}
    start = _message("decode", behaviour, "") | {"content": [], "usage": usage}
    del start["stop_reason"]
    yield {"type": "message_start", "message": start}
    if behaviour.stream_error:
        yield anthropic_error(behaviour.message or "scripted error")
        yield {"type": "message_stop"}
        return
    block = {"type": "text", "text": ""}
    yield {"type": "content_block_start", "index": 0, "content_block": block}
    for number in range(1, behaviour.tokens + 1):
        delta = {"type": "text_delta", "text": f"t{number}"}
        yield {"type": "content_block_delta", "index": 0, "delta": delta}
    yield {"type": "content_block_stop", "index": 0}
    spent = {"output_tokens": behaviour.tokens}
    yield {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": spent}
    yield {"type": "message_stop"}


def response(
    record: RecordedRequest, behaviour: Behaviour, status: str, text: str, tokens: int | None
) -> dict[str, Any]:
    """The form of OpenAI's Responses API, its members in SGLang's order. ``tokens``: of the output;
    ``None``: there is no ``usage`` yet."""
    usage = None
    if tokens is not None:
        usage = {
            "input_tokens": behaviour.prompt_tokens,
            "input_tokens_details": {"cached_tokens": behaviour.cached_tokens},
            "output_tokens": tokens,
            "total_tokens": behaviour.prompt_tokens + tokens,
        }
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"id": "msg_1", "type": "message", "status": "completed", "content": content}
    error = {"code": "server_error", "message": behaviour.message or "Generation aborted"}
    return {
        "id": record.rid,
        "object": "response",
        "output": [message] if text else [],
        "status": status,
        "usage": usage,
        "tools": record.body.get("tools", []),
        "error": error if status == "failed" else None,
        "instructions": record.body.get("instructions"),
        "metadata": record.body.get("metadata", {}),
    }


def response_preamble(record: RecordedRequest, behaviour: Behaviour) -> list[dict[str, Any]]:
    """The events that come at once, before any KV."""
    begun = response(record, behaviour, "in_progress", "", None)
    names = ("response.created", "response.in_progress")
    return [{"type": name, "response": begun} for name in names]


def response_events(record: RecordedRequest, behaviour: Behaviour) -> Iterator[dict[str, Any]]:
    """The events after those, one per token in it."""
    if behaviour.stream_error:  # an exception in the engine's HTTP process
        failed = response(record, behaviour, "failed", "", None)
        yield {"type": "response.failed", "response": failed}
        return
    if behaviour.abort:
        failed = response(record, behaviour, "failed", "", 0)
        yield {"type": "response.failed", "response": failed}
        return
    yield {"type": "response.output_item.added", "item": {"type": "message", "id": "msg_1"}}
    for number in range(1, behaviour.tokens + 1):
        yield {"type": "response.output_text.delta", "delta": f"t{number}"}
    text = " ".join(f"t{i}" for i in range(1, behaviour.tokens + 1))
    whole = response(record, behaviour, "completed", text, behaviour.tokens)
    yield {"type": "response.completed", "response": whole}


def anthropic_error(message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": "api_error", "message": message}}


def _logprobs(
    role: EngineRole, record: RecordedRequest, behaviour: Behaviour, tokens: int, stream: bool
) -> dict[str, Any]:
    """OpenAI's form. The prompt's, with ``echo``, only prefill has."""
    names = [f"t{tokens}"] if stream else [f"t{number}" for number in range(1, tokens + 1)]
    if role == "prefill":
        names = ["t1"]
        if record.body.get("echo"):
            names = [f"p{number}" for number in range(behaviour.prompt_tokens)] + names
    return {
        "tokens": names,
        "token_logprobs": [-0.1] * len(names),
        "top_logprobs": [],
        "text_offset": [-1] * len(names),
    }


def usage_of(behaviour: Behaviour, completion_tokens: int) -> dict[str, Any]:
    """OpenAI's ``usage``."""
    return {
        "prompt_tokens": behaviour.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": behaviour.prompt_tokens + completion_tokens,
    }
