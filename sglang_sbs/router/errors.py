"""Errors a client can see, with the codes of ``sglang_router`` and the bodies of the API that was
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
"""Of an engine's error body; the rest is not kept."""
MAX_MESSAGE_CHARS = 2048
"""Of an engine's words, in answers and in the log."""

RETRYABLE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})

_MOST_MESSAGE_CHARS = 4096
_CLIENT_LEFT = 499
"""What SGLang's Rust server says of an aborted request, whoever aborted it."""

Leg = Literal["prefill", "decode"]

_LEG_CODES = {
    400: "bad_request",
    404: "not_found",
    500: "internal_error",
    502: "bad_gateway",
    503: "unavailable",
}

TOO_LONG = "context_length_exceeded"
"""OpenAI's code for a prompt that no engine takes; LangChain looks for it."""

ErrorStyle = Literal["openai", "anthropic", "responses"]
"""Whose clients read the error: sglang_router's own body is OpenAI's. The Responses API differs in
streams only."""

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
"""``error.type`` of Anthropic's API by HTTP status. Unlike SGLang's server it tells a timeout from
other errors, as clients may try that again."""

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
    """HTTP's own words for a status, also for one HTTP does not name."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def error_style(path: str) -> ErrorStyle:
    """The style of errors for a request to ``path``."""
    return "anthropic" if path.startswith(ANTHROPIC_PATH) else "openai"


def anthropic_type(status: int) -> str:
    """Anthropic's name for an error with this HTTP status."""
    return _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


class RouterError(Exception):
    """Becomes an error response; before the first byte a JSON body, after it an SSE event."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        param: str | None = None,
    ) -> None:
        """``param``: the field of the request that is wrong, where OpenAI's API names it."""
        if len(message) > _MOST_MESSAGE_CHARS:  # engines quote what they were sent
            message = message[:_MOST_MESSAGE_CHARS] + "..."
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.param = param

    def _body(self, style: ErrorStyle, **more: int) -> bytes:
        if style == "anthropic":
            inner = {"type": anthropic_type(self.status), "message": self.message}
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
        """Inside a stream whose status line has left."""
        body = self._body(style, status=self.status)
        if style == "openai":
            return b"data: %b\n\n" % body
        if style == "responses":
            # The event of that API, and in it what OpenAI's packages look for and raise.
            said = {"type": "error", "code": self.code, "message": self.message}
            body = orjson.dumps(said | {"param": self.param} | orjson.loads(body))
        return b"event: error\ndata: %b\n\n" % body


E = TypeVar("E", bound=BaseException)


def without_frames(error: E) -> E:
    """An error without the frames it came through: where one of them knows it too, the bodies they
    worked on would wait for the garbage collector."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


class Refused(RouterError):
    """The scheduler refused the request: it never reached an engine."""

    def __init__(self, cause: RefuseCause, message: str, retry_after_s: float) -> None:
        status, code = _REFUSALS[cause]
        later_s = None if status == 400 else retry_after_s
        super().__init__(status, code, message, retry_after_s=later_s)
        self.cause = cause


class LegFailure(RouterError):
    """One leg of a PD pair failed; ``worker`` is the instance to blame."""

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
        """The connection failed, as opposed to the engine answering with an error."""
        self.unreachable = unreachable
        """Nothing listens at the worker's address."""
        self.broke_off = broke_off
        """The connection went away under the request, as when its engine ends: of the request, for
        all that is known."""
        self._blameless = blameless
        self.after_s: float | None = None
        """How long the engine took to answer so; ``None``: it was not the engine's answer."""
        self.refused = False
        """The engine answered with an error status."""
        self.leaves_room = False
        """Decode may have announced the request to the prefill engine that refused it."""

    @property
    def retryable(self) -> bool:
        return self.status in RETRYABLE_STATUSES

    @property
    def counts_against_worker(self) -> bool:
        """Client errors (4xx) and this router's own say nothing about the worker's health."""
        return self.status >= 500 and not self._blameless


def transport_failure(
    leg: Leg, worker: str, detail: str, *, unreachable: bool = False, broke_off: bool = False
) -> LegFailure:
    """A leg could not be reached or broke off: 502 ``prefill_server_error`` or ``decode_…``."""
    code, message = f"{leg}_server_error", f"{leg.capitalize()} server error: {detail} ({worker})"
    how = {"transport": True, "unreachable": unreachable, "broke_off": broke_off}
    return LegFailure(leg, worker, 502, code, message, **how)


def answer_too_large(leg: Leg, worker: str, detail: str) -> LegFailure:
    """What was asked for is more than can be passed on: 413 ``prefill_answer_too_large`` or
    ``decode_…``. No engine is to blame, and another one would answer the same."""
    # The engine is still at it, as after a failure of its connection.
    return LegFailure(leg, worker, 413, f"{leg}_answer_too_large", detail, transport=True)


class EventTooLarge(ValueError):
    """An event of a stream is longer than what is edited or merged; the message says what is."""


def own_failure(leg: Leg, worker: str, detail: str) -> LegFailure:
    """This router could not even try: out of descriptors or ports."""
    return LegFailure(leg, worker, 503, "router_overloaded", detail, transport=True, blameless=True)


def leg_status_failure(leg: Leg, worker: str, status: int, body: bytes) -> LegFailure:
    """A leg did not answer 200. The client gets an HTTP error's status and message; for a status
    below 400, behind which a body could be read as the next answer, 502."""
    if status < 400:
        detail = f"it answers {status}, which is no answer to a request ({worker})"
        return LegFailure(leg, worker, 502, f"{leg}_bad_gateway", detail)
    if status == _CLIENT_LEFT:  # a request aborted on an engine; the old mode answers 500
        status = 500
    code = f"{leg}_{_LEG_CODES.get(status, 'error')}"
    message = engine_message(body) or reason_phrase(status)
    failure = LegFailure(leg, worker, status, code, message)
    failure.refused = True
    return failure


def leg_aborted(leg: Leg, worker: str, status: int, message: str) -> LegFailure:
    """The engine finished the request with ``finish_reason`` abort."""
    code = f"{leg}_{_LEG_CODES.get(status, 'error')}"
    message = _without_secrets(message)
    return LegFailure(leg, worker, status, code, message or f"request aborted by {leg} worker")


def engine_message(body: bytes) -> str:
    """The message inside SGLang's error bodies (several shapes), or the start of the text, without
    secrets."""
    found = _message_in(body) if len(body) <= MAX_ERROR_BYTES else None
    if found is None:
        found = body[: 4 * MAX_MESSAGE_CHARS].decode("utf-8", "replace").strip()
    return _without_secrets(found)


def _without_secrets(message: str) -> str:
    """The beginning of an engine's words. It may name its launch flags or the store of a model."""
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
