"""The HTTP surface: routes, keys, request ids and error shapes. The relay serves inference;
:mod:`.endpoints` and its neighbours serve everything else."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from functools import partial

import aiohttp
import orjson
from aiohttp import web

from sglang_sbs.dashboard.pages import Dashboard, Handler, NoRoom
from sglang_sbs.router.api.access import CONTROL_PLANE, Access, is_own_host
from sglang_sbs.router.api.endpoints import Control
from sglang_sbs.router.api.identity import TokenCheck
from sglang_sbs.router.api.messages import Messages
from sglang_sbs.router.api.scheduler_access import SchedulerAccess
from sglang_sbs.router.api.scheduling import Scheduling
from sglang_sbs.router.api.tokenizing import Tokenizing
from sglang_sbs.router.client.answer_stream import send
from sglang_sbs.router.client.intake import Doorman
from sglang_sbs.router.errors import RouterError, error_style
from sglang_sbs.router.options.keys import ControlKey
from sglang_sbs.router.options.router_options import RouterOptions
from sglang_sbs.router.relay.relay import Relay
from sglang_sbs.router.relay.time_split import HEADER, in_one_line, server_timing, split_of
from sglang_sbs.router.requests.body_fields import bad_request
from sglang_sbs.router.requests.engine_refusals import store_disabled
from sglang_sbs.router.requests.headers import (
    asked_in,
    forwarded_headers,
    in_lower_case,
    is_text,
    with_bearer,
)
from sglang_sbs.router.requests.plan import PATHS, RouteKind
from sglang_sbs.router.telemetry.logs import RefusalLog, current_request_id, is_logged, log_answer
from sglang_sbs.router.telemetry.worker_metrics import model_name

logger = logging.getLogger(__name__)

KINDS: dict[str, RouteKind] = {path: kind for kind, path in PATHS.items()}

_NOT_IMPLEMENTED = {
    "/v1/embeddings": "Embeddings",
    "/v1/classify": "Classify",
    "/v1/rerank": "Rerank",
    "/rerank": "Rerank",
    "/v1/responses/{rest:.+}": "Stored responses",
    "/v1/conversations": "Conversations",
    "/v1/conversations/{rest:.+}": "Conversations",
    "/v1/messages/{rest:.+}": "Batches of messages",
    "/v1/audio/transcriptions": "Audio transcriptions",
    "/v1/interactions": "Interactions",
    "/v1/realtime": "Realtime",
    "/v1/tokenizers": "Adding tokenizers",
    "/v1/tokenizers/{rest:.+}": "Tokenizers by name",
    "/parse/function_call": "Parsing of function calls",
    "/parse/reasoning": "Parsing of reasoning",
    "/wasm": "WASM modules",
    "/wasm/{rest:.+}": "WASM modules",
    "/ha/{rest:.+}": "Mesh",
}


_PREFLIGHT = {
    "Access-Control-Allow-Methods": "*",
    "Access-Control-Allow-Headers": "*",
    "Access-Control-Max-Age": "3600",
}
_ANY_ORIGIN = {"Access-Control-Allow-Origin": "*"}
_ANY_READER = _ANY_ORIGIN | {"Access-Control-Expose-Headers": "*"}
_ID_PREFIXES = {
    "/v1/chat/completions": "chatcmpl-",
    "/v1/completions": "cmpl-",
    "/generate": "gnt-",
    "/v1/responses": "resp-",
}


def _request_id(path: str, headers: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the request id as sglang_router does: the first header in ``names`` that is present
    and text, else a prefix and 24 alphanumerics."""
    for name in names:
        if (given := headers.get(name)) and is_text(given):
            return given
    return f"{_ID_PREFIXES.get(path, 'req-')}{random.getrandbits(96):024x}"


async def _not_stored(_request: web.Request) -> web.StreamResponse:
    """Raise RouterError (400): responses are not stored, as on every engine in PD mode."""
    raise store_disabled("response_id")


async def _not_implemented(name: str, _request: web.Request) -> web.StreamResponse:
    """Raise RouterError (501), as JSON because clients of these APIs parse the response."""
    raise RouterError(501, "not_implemented", f"{name} not implemented")


class Surface:
    """The application on the serving port, with the handling common to all requests."""

    def __init__(
        self,
        options: RouterOptions,
        relay: Relay,
        scheduler: SchedulerAccess,
        session: aiohttp.ClientSession,
    ) -> None:
        """Create the surface; ``session`` sends control requests to engines."""
        self._options = options
        self._relay = relay
        self._in_flight = relay.in_flight
        self._scheduler = scheduler
        self._session = session
        self._metrics = relay.metrics
        self._origins = frozenset(options.cors_allowed_origins)
        self._id_names = tuple(name.lower() for name in options.request_id_headers)
        keys = options.control_plane_keys
        if options.admin_api_key is not None:
            keys = (ControlKey("admin-api-key", "", "admin", options.admin_api_key), *keys)
        self._refusals = RefusalLog()
        tokens = TokenCheck(options.jwt) if options.jwt is not None else None
        self._access = Access(options.api_key, keys, options.control_plane_audit, tokens)

    def application(self, doorman: Doorman, dashboard: Dashboard) -> web.Application:
        options, relay, scheduler = self._options, self._relay, self._scheduler
        app = web.Application(middlewares=[doorman.between_requests, self.middleware])
        app.on_response_prepare.append(self.on_prepare)
        app.on_cleanup.append(self._close)
        for path in KINDS:
            app.router.add_post(path, self._inference)
        for part in (
            Control(options, scheduler, relay.in_flight, self._session),
            Scheduling(scheduler, relay.in_flight.recent),
            Tokenizing(relay, str(options.tokenizer_path)),
            Messages(relay, self._session),
            dashboard,
        ):
            for method, path, handler in part.routes():
                app.router.add_route(method, path, handler)
        app.router.add_get(f"{PATHS['responses']}/{{id}}", _not_stored)
        app.router.add_post(f"{PATHS['responses']}/{{id}}/cancel", _not_stored)
        for path, name in _NOT_IMPLEMENTED.items():
            app.router.add_route("*", path, partial(_not_implemented, name))
        return app

    async def _inference(self, request: web.Request) -> web.StreamResponse:
        metrics, recent, path = self._metrics, self._in_flight.recent, request.path
        kind = KINDS[path]
        received = in_lower_case(request.headers)
        if kind == "messages":
            received = with_bearer(received)
        identifier = current_request_id.get()
        model = model_name(self._scheduler.registry)
        started_s = time.monotonic()
        answer: web.StreamResponse | None = None
        try:
            asked = asked_in(received, self._options.tenant_header)
            handle, traces = self._relay.handle, self._in_flight.traces
            if traces is None:
                headers = forwarded_headers(received, identifier)
                answer = await handle(request, kind, headers, identifier, asked)
            else:
                with traces.request(path, received, identifier) as (span, passed):
                    headers = forwarded_headers(passed, identifier)
                    answer = await handle(request, kind, headers, identifier, asked)
                    span.set_attribute("http.response.status_code", answer.status)
        except RouterError as error:
            metrics.request_failed(kind, model, error.code)
            recent.minute.refused[error.code] += 1
            raise
        finally:
            recent.minute.requests += 1
            streaming = answer is not None and not isinstance(answer, web.Response)
            metrics.served(kind, model, streaming, time.monotonic() - started_s)
        if not isinstance(answer, web.Response):
            return answer
        known = recent.find(identifier) if asked.timing else None
        parts = {} if known is None else split_of(known, self._scheduler.dispatcher)
        if value := server_timing(parts):
            answer.headers[HEADER] = value
        self._in_flight.on_answered()
        try:
            return await send(request, answer, self._options.relay.pace)
        finally:
            self._in_flight.on_sent()

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path
        current_request_id.set(_request_id(path, request.headers, self._id_names))
        known = request.match_info.http_exception is None
        resource = request.match_info.route.resource
        label = resource.canonical if known and resource is not None else "unknown"
        started_s = time.monotonic()
        duration = self._metrics.on_http_started(request.method, label, started_s)
        status, error_code = 499, ""
        try:
            response = await self._respond(request, handler, path, known)
            status, error_code = response.status, response.headers.get("X-SMG-Error-Code", "")
        finally:
            self._metrics.on_http_ended(status, error_code, started_s)
            seconds = time.monotonic() - started_s
            duration.observe(seconds)
            self._log(request.method, path, status, error_code, seconds)
        return response

    def _log(self, method: str, path: str, status: int, error_code: str, seconds: float) -> None:
        wanted = self._options.access_log
        recent = parts = None
        if path in KINDS:
            recent = self._in_flight.recent.find(current_request_id.get())
        waited_s = seconds
        if recent is not None:
            recent.status, recent.seconds = status, seconds
            if recent.first_byte_s is not None:
                waited_s = recent.first_byte_s - recent.began_s
        if not wanted.has(status, waited_s) or not is_logged(path, status):
            return
        if not self._refusals.is_news(status, error_code):
            return
        more = ""
        if recent is not None:
            parts = split_of(recent, self._scheduler.dispatcher)
            more = in_one_line(recent, parts)
        log_answer(method, path, status, error_code, seconds, more=more, parts=parts)

    async def _close(self, _app: web.Application) -> None:
        self._refusals.close()

    async def _respond(
        self, request: web.Request, handler: Handler, path: str, known: bool
    ) -> web.StreamResponse:
        if request.method == "OPTIONS":
            return web.Response(headers=None if self._origins else _PREFLIGHT)
        style = error_style(path)
        try:
            if known and (refusal := await self._refusal(request, path)) is not None:
                if refusal.status == 401 and style == "anthropic":
                    raise RouterError(401, "unauthorized", "missing or wrong API key")
                return refusal
            return await handler(request)
        except RouterError as error:
            return error.response(style)
        except NoRoom as error:
            return RouterError(503, "too_many_dashboards", str(error), retry_after_s=5.0).response()
        except web.HTTPMethodNotAllowed as error:
            allowed = {"Allow": error.headers.get("Allow", "")}
            if style == "openai":
                return web.Response(status=405, headers=allowed)
            why = f"use {allowed['Allow']}"
            answer = RouterError(405, "method_not_allowed", why).response(style)
            answer.headers.update(allowed)
            return answer
        except web.HTTPNotFound:
            return web.Response(status=404)
        except ConnectionResetError:
            raise
        except Exception as error:
            response = _failed(request.method, path, error).response(style)
            if isinstance(error, web.RequestPayloadError):
                response.force_close()  # the start of the next request is unknown
            return response

    async def _refusal(self, request: web.Request, path: str) -> web.Response | None:
        """Return the error response for a request without a valid key; ``None`` if it is allowed.
        Raises: RouterError: 415, its body is encoded; 403, a foreign web page sends it."""
        encoding = request.headers.get("Content-Encoding")
        if encoding is not None and encoding.strip().lower() != "identity":
            why = "send the body without Content-Encoding: its decoded size cannot be"
            raise RouterError(415, "unsupported_content_encoding", f"{why} bounded")
        identifier = current_request_id.get()
        refusal = await self._access.refusal(request.method, path, request.headers, identifier)
        if refusal is None and self._is_forged(request, path):
            raise RouterError(
                403,
                "cross_origin_request",
                "web pages of other origins may not change this router: set a key "
                "(--control-plane-api-keys, --admin-api-key), or list its origin in "
                "--cors-allowed-origins",
            )
        return refusal

    def _is_forged(self, request: web.Request, path: str) -> bool:
        """Return whether a browser sends this for a foreign page, without its user's knowledge
        (CSRF). False where a key is required, because the page does not have it."""
        origin = request.headers.get("Origin")
        if origin is None or not self._access.open_to_all:
            return False
        if request.method in ("GET", "HEAD") or not path.startswith(CONTROL_PLANE):
            return False
        host = request.headers.get("Host", "").lower()
        own = origin.partition("://")[2].lower() == host and is_own_host(host, self._options.host)
        return not own and self._origins.isdisjoint(("*", origin))

    async def on_prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Set the headers of every response, streams included."""
        if identifier := current_request_id.get():  # not for responses by aiohttp itself
            response.headers.setdefault("x-request-id", identifier)
        response.headers.popall("Server", None)  # hide the version from attackers
        if self._in_flight.draining:
            response.force_close()
            response.headers["Connection"] = "close"
        response.headers.update(self._cross_origin(request.method, request.headers.get("Origin")))

    def _cross_origin(self, method: str, origin: str | None) -> dict[str, str]:
        if not self._origins:
            # As sglang_router without the flag: browsers may read every response.
            return _ANY_ORIGIN if method == "OPTIONS" else _ANY_READER
        if not origin or self._origins.isdisjoint(("*", origin)):
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
            "Access-Control-Allow-Headers": "content-type, authorization",
            "Access-Control-Expose-Headers": "x-request-id, x-smg-error-code",
            "Vary": "Origin",
        }


def _failed(method: str, path: str, error: Exception) -> RouterError:
    """Return the error for an unhandled exception: 400 if the client is at fault, else 500, and log
    it."""
    if isinstance(error, web.RequestPayloadError):
        return bad_request("the body does not match its headers", "unreadable_body")
    # Deeply nested JSON can be read safely, but not displayed or serialized.
    deep = isinstance(error, orjson.JSONEncodeError) and "Recursion" in str(error)
    if deep or isinstance(error, RecursionError):
        return bad_request("the body is nested too deeply")
    logger.exception("%s %s failed", method, path)
    return RouterError(500, "internal_error", "internal error; see the router's log")
