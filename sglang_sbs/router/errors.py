"""Errors returned to clients, with ``sglang_router``'s codes and the body format of the API
called."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Literal, TypeVar

import orjson
from aiohttp import web

from sglang_sbs.router.engine_secrets import text_without_secrets
from sglang_sbs.scheduling.events import RefuseCause

ERROR_CODE_HEADER = "X-SMG-Error-Code"

MAX_ERROR_BYTES = 64 * 1024
"""Bytes read of an engine's error body; the rest is dropped."""
MAX_MESSAGE_CHARS = 2048
"""Longest message of an engine in responses and logs."""

RETRYABLE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})

_MOST_MESSAGE_CHARS = 4096
_CLIENT_LEFT = 499
"""Status of SGLang's Rust server for any aborted request."""

Leg = Literal["prefill", "decode"]

_LEG_CODES = {
    400: "bad_request",
    404: "not_found",
    500: "internal_error",
    502: "bad_gateway",
    503: "unavailable",
}

TOO_LONG = "context_length_exceeded"
"""OpenAI's code for a prompt that no engine accepts, which LangChain checks."""

ErrorStyle = Literal["openai", "anthropic", "responses"]
"""Format of an error. sglang_router's own body is OpenAI's; the Responses API differs only in
streams."""

ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""``error.type`` of Anthropic's API by HTTP status. Unlike SGLang's server this distinguishes
timeouts, because clients may retry them."""

_REFUSALS: dict[RefuseCause, tuple[int, str]] = {
    "queue_full": (429, "queue_full"),
    "flow_control": (429, "flow_control"),
    "deadline": (503, "queue_timeout"),
    "no_prefill": (503, "no_prefill_servers"),
    "no_decode": (503, "no_decode_servers"),
    "too_long": (400, TOO_LONG),
    "slo": (429, "slo_unreachable"),
}


def reason_phrase(status: int) -> str:
    """Return HTTP's phrase for a status, or "Error" for an unknown one."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def error_style(path: str) -> ErrorStyle:
    """Return the error format for a request to ``path``."""
    return "anthropic" if path.startswith(ANTHROPIC_PATH) else "openai"


class RouterError(Exception):
    """An error that the client receives: as a JSON body, or as an event if the stream has begun."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        param: str | None = None,
    ) -> None:
        """Create an error. ``code``: value of ``X-SMG-Error-Code``; ``retry_after_s``: time for the
        ``Retry-After`` header; ``param``: the invalid field, for OpenAI's APIs."""
        if len(message) > _MOST_MESSAGE_CHARS:  # engines quote their input
            message = message[:_MOST_MESSAGE_CHARS] + "..."
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.param = param

    def _body(self, style: ErrorStyle, **more: int) -> bytes:
        if style == "anthropic":
            other = "invalid_request_error" if self.status < 500 else "api_error"
            kind = _ANTHROPIC_TYPES.get(self.status, other)
            inner = {"type": kind, "message": self.message}
            return orjson.dumps({"type": "error", "error": inner})
        kind = reason_phrase(self.status)
        error = {"type": kind, "code": self.code, "message": self.message, "param": self.param}
        return orjson.dumps({"error": error | more})

    def response(self, style: ErrorStyle = "openai") -> web.Response:
        headers = {"Content-Type": "application/json", ERROR_CODE_HEADER: self.code}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        return web.Response(status=self.status, body=self._body(style), headers=headers)

    def sse_event(self, style: ErrorStyle = "openai") -> bytes:
        """Return the error as an event for a stream whose status line was sent."""
        body = self._body(style, status=self.status)
        if style == "openai":
            return b"data: %b\n\n" % body
        if style == "responses":
            # This API's event, extended by the object that OpenAI's packages look for and raise.
            event = {"type": "error", "code": self.code, "message": self.message}
            body = orjson.dumps(event | {"param": self.param} | orjson.loads(body))
        return b"event: error\ndata: %b\n\n" % body


E = TypeVar("E", bound=BaseException)


def without_frames(error: E) -> E:
    """Remove an error's traceback, cause and context, and return it. Frames that refer to the error
    would keep request bodies in memory until garbage collection."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


class Refused(RouterError):
    """The scheduler refused the request, which never reached an engine."""

    def __init__(self, cause: RefuseCause, message: str, retry_after_s: float) -> None:
        status, code = _REFUSALS[cause]
        later_s = None if status == 400 else retry_after_s
        super().__init__(status, code, message, retry_after_s=later_s)


class LegFailure(RouterError):
    """The prefill or decode request of an attempt failed on the instance ``worker``."""

    def __init__(
        self,
        leg: Leg,
        worker: str,
        status: int,
        code: str,
        message: str,
        *,
        transport: bool = False,
        unreachable: bool = False,
        broke_off: bool = False,
        blameless: bool = False,
    ) -> None:
        super().__init__(status, code, message, retry_after_s=1.0 if status == 503 else None)
        self.leg: Leg = leg
        self.worker = worker
        self.transport = transport
        """There was no usable connection or response; otherwise the engine returned an error."""
        self.unreachable = unreachable
        """The worker's address refuses connections."""
        self.broke_off = broke_off
        """The connection broke during the request, as when the engine exits; the request may be the
        cause."""
        self._blameless = blameless
        self.partner = ""
        """URL of the attempt's other engine; empty if nothing was sent. A failed KV transfer is
        often reported by the engine that works."""
        self.after_s: float | None = None
        """Seconds from the start of the attempt to the engine's error response; ``None`` without
        one."""
        self.refused = False
        """The engine refused the request with an HTTP error status."""
        self.leaves_room = False
        """Decode may have contacted the prefill engine that refused the request, and state of the
        bootstrap room then stays there (SGLang fault ``refused-room-stays``)."""

    def against_partner(self) -> LegFailure:
        """Return the same failure as one of the attempt's other engine."""
        leg: Leg = "decode" if self.leg == "prefill" else "prefill"
        return LegFailure(leg, self.partner, self.status, self.code, self.message)

    @property
    def retryable(self) -> bool:
        return self.status in RETRYABLE_STATUSES

    @property
    def counts_against_worker(self) -> bool:
        """Whether the failure may be the worker's fault: false for 4xx statuses and for failures of
        this router."""
        return self.status >= 500 and not self._blameless


def transport_failure(
    leg: Leg, worker: str, detail: str, *, unreachable: bool = False, broke_off: bool = False
) -> LegFailure:
    """Return the error for an engine that could not be reached or dropped the connection: 502
    ``prefill_server_error`` or ``decode_server_error``."""
    code, message = f"{leg}_server_error", f"{leg.capitalize()} server error: {detail} ({worker})"
    how = {"transport": True, "unreachable": unreachable, "broke_off": broke_off}
    return LegFailure(leg, worker, 502, code, message, **how)


def answer_too_large(leg: Leg, worker: str, detail: str) -> LegFailure:
    """Return the error for a response too large to pass on: 413 ``prefill_answer_too_large`` or
    ``decode_answer_too_large``. It is not retried, because every engine would respond the same."""
    # The engine is still working, as after a broken connection.
    return LegFailure(leg, worker, 413, f"{leg}_answer_too_large", detail, transport=True)


class EventTooLarge(ValueError):
    """An event of an engine's stream exceeds the limit for editing or merging events; the message
    names the limit."""


def own_failure(leg: Leg, worker: str, detail: str) -> LegFailure:
    """Return the error for a request that this router could not send, because it has no descriptors
    or ports left: 503 ``router_overloaded``."""
    return LegFailure(leg, worker, 503, "router_overloaded", detail, transport=True, blameless=True)


def leg_status_failure(leg: Leg, worker: str, status: int, body: bytes) -> LegFailure:
    """Return the error for an engine's status other than 200. The client gets the status and
    message of an HTTP error. A status below 400 becomes 502, because its body could be read as the
    next response."""
    if status < 400:
        detail = f"it responds {status}, which is not a valid response ({worker})"
        return LegFailure(leg, worker, 502, f"{leg}_bad_gateway", detail)
    if status == _CLIENT_LEFT:  # aborted on an engine; other servers return 500
        status = 500
    code = f"{leg}_{_LEG_CODES.get(status, 'error')}"
    message = engine_message(body) or reason_phrase(status)
    failure = LegFailure(leg, worker, status, code, message)
    failure.refused = True
    return failure


def leg_aborted(leg: Leg, worker: str, status: int, message: str) -> LegFailure:
    """Return the error for a request that the engine ended with finish reason ``abort``; ``status``
    comes from that reason."""
    code = f"{leg}_{_LEG_CODES.get(status, 'error')}"
    message = shown_message(message)
    return LegFailure(leg, worker, status, code, message or f"request aborted by {leg} worker")


def engine_message(body: bytes) -> str:
    """Return the message in SGLang's error bodies (several formats), or the beginning of the text,
    without secrets."""
    found = _message_in(body) if len(body) <= MAX_ERROR_BYTES else None
    if found is None:
        found = body[: 4 * MAX_MESSAGE_CHARS].decode("utf-8", "replace").strip()
    return shown_message(found)


def shown_message(message: str) -> str:
    """Truncate an engine's message and hide secrets, as it may quote launch flags or a model's
    storage."""
    return text_without_secrets(message[: 4 * MAX_MESSAGE_CHARS])[:MAX_MESSAGE_CHARS]


def _message_in(body: bytes) -> str | None:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    inner = value.get("error", value) if isinstance(value, dict) else None
    found = (
        [inner.get(key) for key in ("message", "detail")] if isinstance(inner, dict) else [inner]
    )
    return next((text for text in found if isinstance(text, str)), None)
