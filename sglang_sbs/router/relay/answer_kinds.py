"""Describes each API's responses: which events begin, end and break a stream, and where a response
has its counts and its abort status. An API with other formats is added here."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from sglang_sbs.router.errors import (
    ErrorStyle,
    Leg,
    LegFailure,
    leg_aborted,
    leg_status_failure,
    shown_message,
)
from sglang_sbs.router.limits import MAX_COUNT, clamped_count
from sglang_sbs.router.relay.event_reader import Sign, StreamKind
from sglang_sbs.router.requests.plan import RouteKind

ABORT_MARK_BYTES = 32
"""Longest match of the marks for which :meth:`AnswerKind.may_be_aborted` searches."""
_DONE = b"[DONE]"
_ERROR_START = b'{"error"'
_OUTPUT_TOKENS = re.compile(rb'"(?:completion|output)_tokens":\s*(\d+)')
_MOST_DIGITS = 18

Counts = tuple[int | None, int | None]
"""Prompt tokens and cached tokens; ``None`` if the response does not include them."""


class AnswerKind(StreamKind):
    """Responses of one API, streamed or whole."""

    error_style: ErrorStyle
    """Format of errors, before a stream and within it."""
    end_event: bytes
    """Bytes with which the last event of a failed stream begins, e.g. ``data: [DONE]``."""
    repeats_request = False
    """Whether streams begin with a copy of much of the request."""
    error_mark = re.compile(rb'"error": ?\{')

    def status_failure(self, leg: Leg, worker: str, status: int, body: bytes) -> LegFailure:
        """Return the failure described by a response with a status other than 200."""
        return leg_status_failure(leg, worker, status, body)

    @abstractmethod
    def may_be_aborted(self, body: bytes | bytearray, start: int, leg: Leg) -> bool:
        """Return whether a whole response may be that of an aborted request: search its bytes from
        ``start`` on for a mark of at most ``ABORT_MARK_BYTES``. :meth:`abort_of` decides."""

    @abstractmethod
    def abort_of(self, body: Any, leg: Leg) -> tuple[int, str] | None:
        """Return HTTP status and message if a parsed response shows an abort, else ``None``."""

    @abstractmethod
    def token_counts(self, body: dict[str, Any], *, asks_cached: bool) -> Counts:
        """Return prompt and cached tokens of prefill's parsed response. ``asks_cached``: the
        request asked for ``cached_tokens_details``."""

    @abstractmethod
    def output_tokens(self, data: bytes | bytearray) -> int | None:
        """Return the output tokens reported in a response or a stream's event; ``None``: none."""


# SGLang fault: abort-as-success
class TokenAnswers(AnswerKind):
    """Responses of ``/generate``, ``/v1/completions`` and ``/v1/chat/completions``. SGLang ends
    each stream with the same event, even after an error or an abort."""

    error_style = "openai"
    end_name = "[DONE]"
    end_event = b"data: " + _DONE
    signs = (end_event, b"data: " + _ERROR_START)
    needle = b'"abort"'
    mark = re.compile(rb'"(?:type|finish_reason)": ?"abort"')
    """Matches every response of an aborted request, and possibly others."""

    def sign(self, data: bytes, _name: bytes) -> Sign:
        if self.needle in data and self.mark.search(data) is not None:
            return Sign.FAILURE
        if data.startswith(_ERROR_START):
            return Sign.FAILURE
        return Sign.END if data == _DONE else Sign.CONTENT

    def failure(self, worker: str, data: bytes) -> LegFailure | None:
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:  # an excerpt
            if data.startswith(_ERROR_START):
                return leg_status_failure("decode", worker, 500, b"")
            return leg_aborted("decode", worker, 500, "")
        if isinstance(event, dict) and isinstance(event.get("error"), dict):
            code = event["error"].get("code")
            status = code if isinstance(code, int) and 400 <= code < 600 else 500
            return _reported(worker, status, event["error"])
        abort = self.abort_of(event, "decode")
        return leg_aborted("decode", worker, *abort) if abort is not None else None

    def may_be_aborted(self, body: bytes | bytearray, start: int, _leg: Leg) -> bool:
        return self.mark.search(body, start) is not None

    def abort_of(self, body: Any, _leg: Leg) -> tuple[int, str] | None:
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

    def token_counts(self, body: dict[str, Any], *, asks_cached: bool) -> Counts:
        """Return prompt and cached tokens, from ``meta_info`` or OpenAI's ``usage`` and SGLang's
        ``sglext``. ``usage`` has cached tokens only with ``--enable-cache-report``."""
        meta, usage = body.get("meta_info"), body.get("usage")
        if isinstance(meta, dict):
            prompt, cached = meta.get("prompt_tokens"), meta.get("cached_tokens")
        elif isinstance(usage, dict):
            prompt = usage.get("prompt_tokens")
            details = usage.get("prompt_tokens_details")
            cached = details.get("cached_tokens") if isinstance(details, dict) else None
            if asks_cached:
                extra = body.get("sglext")
                tiers = extra.get("cached_tokens_details") if isinstance(extra, dict) else None
                cached = sum(tokens for tokens in (tiers or {}).values() if isinstance(tokens, int))
        else:
            return None, None
        return (
            clamped_count(prompt) if isinstance(prompt, int) else None,
            clamped_count(cached) if isinstance(cached, int) else None,
        )

    def output_tokens(self, data: bytes | bytearray) -> int | None:
        return _last_count(b"completion_tokens", data)


class _NamedEvents(AnswerKind):
    """Responses of an API whose events have a name, which is also the ``type`` in their data."""

    signs = (b'data: {"type"',)
    _signs: ClassVar[Mapping[bytes, Sign]]
    """Signs of events by name; all others are content."""
    _type = re.compile(rb'\{"type": ?"([\w.]+)"')

    def sign(self, data: bytes, name: bytes) -> Sign:
        if not name:
            found = self._type.match(data)
            name = b"" if found is None else found[1]
        return self._signs.get(name, Sign.CONTENT)


class MessageAnswers(_NamedEvents):
    """Responses of Anthropic's ``/v1/messages`` as SGLang serves it
    (``entrypoints/anthropic/serving.py``).

    SGLang sends ``message_start`` with decode's first token, or before an early error. That event
    therefore does not open the stream: the request can still be retried. Errors are also followed
    by ``message_stop``."""

    error_style = "anthropic"
    end_name = "message_stop"
    end_event = b"event: message_stop"
    needle = b'"error"'
    mark = re.compile(rb'"type": ?"error"')
    _signs = {  # noqa: RUF012 - never changed
        b"message_start": Sign.PREAMBLE,
        b"ping": Sign.PREAMBLE,
        b"message_stop": Sign.END,
        b"error": Sign.FAILURE,
    }
    _end_turn = re.compile(rb'"stop_reason": ?"end_turn"')
    _statuses = {  # noqa: RUF012 - never changed
        "invalid_request_error": 400,
        "authentication_error": 401,
        "permission_error": 403,
        "not_found_error": 404,
        "request_timeout_error": 408,
        "request_too_large": 413,
        "rate_limit_error": 429,
        "overloaded_error": 503,
    }
    """HTTP status by Anthropic error type (inverse of SGLang's ``ERROR_TYPE_MAP``); others: 500."""

    def failure(self, worker: str, data: bytes) -> LegFailure | None:
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:  # an excerpt
            event = None
        error = event.get("error") if isinstance(event, dict) else None
        if not isinstance(error, dict):
            return leg_status_failure("decode", worker, 500, b"")
        kind = error.get("type")
        status = self._statuses.get(kind, 500) if isinstance(kind, str) else 500
        return _reported(worker, status, error)

    def may_be_aborted(self, body: bytes | bytearray, start: int, leg: Leg) -> bool:
        """Return whether prefill's response has the stop reason ``end_turn``, SGLang's for an abort
        and a normal end in decode's. Prefill's success is ``max_tokens``: ``FINISH_LENGTH(0)``."""
        return leg == "prefill" and self._end_turn.search(body, start) is not None

    def abort_of(self, body: Any, leg: Leg) -> tuple[int, str] | None:
        aborted = isinstance(body, dict) and body.get("stop_reason") == "end_turn"
        return (500, "") if aborted and leg == "prefill" else None

    def token_counts(self, body: dict[str, Any], *, asks_cached: bool) -> Counts:
        """Return prompt and cached tokens. ``input_tokens`` excludes cached tokens, which engines
        report only with ``--enable-cache-report``."""
        usage = body.get("usage")
        if not isinstance(usage, dict) or type(usage.get("input_tokens")) is not int:
            return None, None
        cached = usage.get("cache_read_input_tokens")
        if type(cached) is not int:
            return clamped_count(usage["input_tokens"]), None
        return clamped_count(usage["input_tokens"] + cached), clamped_count(cached)

    def output_tokens(self, data: bytes | bytearray) -> int | None:
        return _last_count(b"output_tokens", data)


class ResponseAnswers(_NamedEvents):
    """Responses of OpenAI's ``/v1/responses`` as SGLang serves it
    (``openai/serving_responses.py``).

    ``response.created`` and ``response.in_progress`` are sent at once, before any KV exists. The
    last event contains the whole response. An abort is a ``response.failed`` event, or a whole
    response with HTTP status 200 and the status ``failed``."""

    error_style = "responses"
    repeats_request = True
    telling_end = True
    end_name = "response.completed"
    end_event = b"event: response.failed"
    needle = b'"output_tokens"'
    mark = re.compile(rb'"output_tokens": ?(\d{1,18})')
    """Finds the number of output tokens. The first match is the engine's: tools and metadata
    written by the client come later."""
    error_mark = re.compile(rb'"error": ?\{"code": ?"\w{1,20}", ?"message": ?"')
    _signs = {  # noqa: RUF012 - never changed
        b"response.created": Sign.PREAMBLE,
        b"response.in_progress": Sign.PREAMBLE,
        b"response.completed": Sign.END,
        b"response.incomplete": Sign.END,
        b"response.failed": Sign.FAILURE,
        b"error": Sign.FAILURE,
    }
    _failed = re.compile(rb'"status": ?"failed", ?"usage":')
    _without_usage = re.compile(rb'"status": ?"failed", ?"usage": ?null')
    _text = re.compile(rb'(?:[^"\\]|\\.)*')
    _status = re.compile(rb'"status": ?"(\w+)", ?"usage":')
    _http_status = re.compile(r"(408|429|5\d\d): ")

    def failure(self, worker: str, data: bytes) -> LegFailure | None:
        """Return the failure that a ``Sign.FAILURE`` event reports. SGLang calls each of them
        ``server_error``. With ``usage`` it is an abort; without, an exception in the engine's HTTP
        process, usually for a request that prefill rejects with 400."""
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            event = self._excerpted(data)
        event = event if isinstance(event, dict) else {}
        response = event.get("response")
        response = response if isinstance(response, dict) else {"usage": {}} | event
        if isinstance(response.get("usage"), dict):
            status, message = self.abort_of({"status": "failed"} | response, "decode") or (500, "")
            return leg_aborted("decode", worker, status, message)
        error = orjson.dumps({"error": response.get("error")})
        return self.status_failure("decode", worker, 400, error)

    def _excerpted(self, data: bytes) -> Any:
        """Return an event with the members that :meth:`failure` reads, from the excerpt of a long
        event (:meth:`.StreamKind.sign`)."""
        head, error, *_ = *data.split(b"\0"), b""
        begun = self.error_mark.match(error)
        found = None if begun is None else self._text.match(error, begun.end())
        text = b"" if found is None else found[0]
        try:
            message = orjson.loads(b'"%b"' % text.decode(errors="ignore").encode())
        except orjson.JSONDecodeError:
            message = ""
        usage = {} if self._without_usage.search(head) is None else {"usage": None}
        return {"response": {"usage": {}, "error": {"message": message}} | usage}

    def status_failure(self, leg: Leg, worker: str, status: int, body: bytes) -> LegFailure:
        """Return the failure, with the true status of an engine abort: for this API SGLang turns
        the abort's ``fastapi.HTTPException`` into a 400 whose message begins with the status."""
        failure = leg_status_failure(leg, worker, status, body)
        found = self._http_status.match(failure.message) if status == 400 else None
        if found is not None:
            message = failure.message[found.end() :]
            failure = leg_status_failure(leg, worker, int(found[1]), b"")
            failure.message = message
        return failure

    def may_be_aborted(self, body: bytes | bytearray, start: int, _leg: Leg) -> bool:
        if self._failed.search(body, start) is None:
            return False
        found = self._status.search(body)  # a client's own field can only follow the engine's
        return found is not None and found[1] == b"failed"

    def abort_of(self, body: Any, _leg: Leg) -> tuple[int, str] | None:
        if not isinstance(body, dict) or body.get("status") != "failed":
            return None
        error = body.get("error")
        return 500, str(error.get("message") or "") if isinstance(error, dict) else ""

    def token_counts(self, body: dict[str, Any], *, asks_cached: bool) -> Counts:
        usage = body.get("usage")
        if not isinstance(usage, dict) or type(usage.get("input_tokens")) is not int:
            return None, None
        details = usage.get("input_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        known = clamped_count(cached) if type(cached) is int else None
        return clamped_count(usage["input_tokens"]), known

    def output_tokens(self, data: bytes | bytearray) -> int | None:
        found = self.mark.search(data)
        return None if found is None else clamped_count(int(found[1]))


TOKEN_ANSWERS = TokenAnswers()
ANSWER_KINDS: dict[RouteKind, AnswerKind] = {
    "generate": TOKEN_ANSWERS,
    "completions": TOKEN_ANSWERS,
    "chat": TOKEN_ANSWERS,
    "messages": MessageAnswers(),
    "responses": ResponseAnswers(),
}


def _reported(worker: str, status: int, error: dict[str, Any]) -> LegFailure:
    """Return decode's failure with the message of the ``error`` object in a stream's event."""
    failure = leg_status_failure("decode", worker, status, b"")
    failure.message = shown_message(str(error.get("message") or failure.message))
    return failure


def _last_count(name: bytes, data: bytes | bytearray) -> int | None:
    """Return the last value of ``name`` (``completion_tokens`` or Anthropic's ``output_tokens``) in
    a response or at the end of a stream; ``None`` if it has none."""
    found = _OUTPUT_TOKENS.match(data, max(0, data.rfind(b'"%b"' % name)))
    if found is None:
        return None
    digits = found[1]
    return MAX_COUNT if len(digits) > _MOST_DIGITS else clamped_count(int(digits))
