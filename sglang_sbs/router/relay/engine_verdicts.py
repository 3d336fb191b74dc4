"""What engines say of a request in their answers: an abort, an error, how many tokens.

Reads SGLang's JSON (``managers/tokenizer_manager.py``, ``entrypoints/openai``).
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from sglang_sbs.router.errors import MAX_MESSAGE_CHARS, LegFailure, leg_aborted, leg_status_failure
from sglang_sbs.router.limits import MAX_COUNT, clamped_count

SSE_ERROR = b'data: {"error"'
"""An event that begins so reports an error."""
ABORT_MARK = re.compile(rb'"(?:type|finish_reason)":"abort"')
"""In an answer of an aborted request, and maybe in others."""
ABORT_MARK_BYTES = 23
"""No such mark is longer."""
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_MOST_DIGITS = 18


def abort_of(body: Any) -> tuple[int, str] | None:
    """Status and message if a response body says that the engine aborted the request."""
    if not isinstance(body, dict):
        return None
    meta = body.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    if isinstance(reason, dict) and reason.get("type") == "abort":
        status = reason.get("status_code")
        if not isinstance(status, int) or not 400 <= status < 600:
            status = 500
        return status, str(reason.get("message") or "")
    choices = body.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        if isinstance(choice, dict) and choice.get("finish_reason") == "abort":
            return 500, ""
    return None


def read_abort(body: bytes | bytearray) -> tuple[int, str] | None:
    """The same of an answer as it came."""
    try:
        return abort_of(orjson.loads(body))
    except orjson.JSONDecodeError:
        return None


def completion_tokens_of(data: bytes | bytearray) -> int | None:
    """By the last place where an answer, or the end of a stream, says so."""
    found = _COMPLETION_TOKENS.match(data, max(0, data.rfind(b'"completion_tokens"')))
    if found is None:
        return None
    digits = found[1]
    return MAX_COUNT if len(digits) > _MOST_DIGITS else clamped_count(int(digits))


def token_counts(body: dict[str, Any], asks_cached: bool) -> tuple[int | None, int | None]:
    """Prompt and cached tokens, from ``meta_info`` or OpenAI's ``usage`` and SGLang's ``sglext``.

    ``usage`` has cached tokens only of engines started with ``--enable-cache-report``.
    """
    meta, usage = body.get("meta_info"), body.get("usage")
    if isinstance(meta, dict):
        prompt, cached = meta.get("prompt_tokens"), meta.get("cached_tokens")
    elif isinstance(usage, dict):
        prompt = usage.get("prompt_tokens")
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if asks_cached:
            extra = body.get("sglext")
            tiers = (extra if isinstance(extra, dict) else {}).get("cached_tokens_details") or {}
            cached = sum(tokens for tokens in tiers.values() if isinstance(tokens, int))
    else:
        return None, None
    return (
        clamped_count(prompt) if isinstance(prompt, int) else None,
        clamped_count(cached) if isinstance(cached, int) else None,
    )


def sse_failure(worker: str, data: bytes) -> LegFailure | None:
    """The failure an SSE event of decode reports, if it does."""
    try:
        event = orjson.loads(data.split(b"\n\n", 1)[0].removeprefix(b"data:"))
    except orjson.JSONDecodeError:
        event = None
    if isinstance(event, dict) and isinstance(event.get("error"), dict):
        error = event["error"]
        code = error.get("code")
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        failure = leg_status_failure("decode", worker, status, b"")
        failure.message = str(error.get("message") or failure.message)[:MAX_MESSAGE_CHARS]
        return failure
    abort = abort_of(event)
    return leg_aborted("decode", worker, *abort) if abort is not None else None
