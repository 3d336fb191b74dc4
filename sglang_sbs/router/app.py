"""The HTTP surface: routes, keys, request ids, error shapes.

Owns which URL does what and how an error looks on the wire. What happens behind a route is the
relay's (inference) or :mod:`.control`'s (everything else).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING

from aiohttp import web

from sglang_sbs.router.control import Control
from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.http_ids import request_id
from sglang_sbs.router.relay import PATHS
from sglang_sbs.router.requests import RouteKind, forwarded_headers

if TYPE_CHECKING:
    from sglang_sbs.router.server import RouterServer

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_identifier: ContextVar[str] = ContextVar("request_id")
"""The request id, from the middleware to the handler (one task, so one context, per request)."""

_OPEN_PATHS = frozenset({"/health", "/liveness", "/readiness", "/v1/models"})
"""Served without a key, as sglang_router does."""
_ADMIN_PREFIXES = ("/workers", "/flush_cache", "/get_loads", "/v1/loads", "/abort_request")
_NOT_IMPLEMENTED = {
    "/v1/embeddings": "Embeddings",
    "/v1/classify": "Classify",
    "/v1/rerank": "Rerank",
    "/rerank": "Rerank",
    "/v1/responses": "Responses",
    "/v1/messages": "Messages",
    "/v1/audio/transcriptions": "Audio transcriptions",
    "/v1/interactions": "Interactions",
    "/v1/realtime": "Realtime",
}


def build_app(server: RouterServer) -> web.Application:
    """The aiohttp application of the serving port."""
    surface = _Surface(server)
    app = web.Application(
        client_max_size=server.options.max_payload_bytes, middlewares=[surface.middleware]
    )
    app.on_response_prepare.append(surface.on_prepare)
    for kind, path in PATHS.items():
        app.router.add_post(path, surface.inference(kind))
    control = Control(server)
    for method, path, handler in control.routes():
        app.router.add_route(method, path, handler)
    for path, name in _NOT_IMPLEMENTED.items():
        app.router.add_route("*", path, _not_implemented(name))
    return app


def _not_implemented(name: str) -> Handler:
    async def handler(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=501, text=f"{name} not implemented")

    return handler


class _Surface:
    def __init__(self, server: RouterServer) -> None:
        self._server = server
        self._options = server.options
        self._metrics = server.metrics
        self._origins = frozenset(server.options.cors_allowed_origins)

    def inference(self, kind: RouteKind) -> Handler:
        server = self._server

        metrics = server.metrics
        path = PATHS[kind]
        count = metrics.requests.labels(path)
        duration = metrics.request_seconds.labels(path)

        async def handler(request: web.Request) -> web.StreamResponse:
            identifier = _identifier.get()
            headers = forwarded_headers(list(request.headers.items()), identifier)
            count.inc()
            started_s = time.monotonic()
            try:
                return await server.relay.handle(request, kind, headers, identifier)
            except RouterError as error:
                metrics.request_errors.labels(path, error.code).inc()
                raise
            finally:
                duration.observe(time.monotonic() - started_s)

        return handler

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path
        self._server.doorman.heard(request.protocol)
        identifier = request_id(path, request.headers, self._options.request_id_headers)
        _identifier.set(identifier)
        known = request.match_info.http_exception is None
        resource = request.match_info.route.resource
        label = resource.canonical if known and resource is not None else "unknown"
        started_s = time.monotonic()
        duration = self._metrics.http_started(request.method, label)
        error_code = ""
        status = 499
        try:
            response = await self._respond(request, handler, path)
            status = response.status
            error_code = response.headers.get("X-SMG-Error-Code", "")
        finally:
            self._metrics.http_ended(status, error_code)
            duration.observe(time.monotonic() - started_s)
        return response

    async def _respond(
        self, request: web.Request, handler: Handler, path: str
    ) -> web.StreamResponse:
        if request.method == "OPTIONS":
            return self._preflight()
        if not self._authorised(request, path):
            return web.Response(status=401)
        try:
            return await handler(request)
        except RouterError as error:
            return error.response()
        except web.HTTPRequestEntityTooLarge:
            limit = self._options.max_payload_bytes
            return RouterError(
                413, "payload_too_large", f"the body is over {limit} bytes (--max-payload-size)"
            ).response()
        except web.HTTPMethodNotAllowed as error:
            return web.Response(status=405, headers={"Allow": error.headers.get("Allow", "")})
        except web.HTTPNotFound:
            return web.Response(status=404)
        except asyncio.CancelledError:
            raise
        except ConnectionResetError:
            raise
        except Exception:
            logger.exception("%s %s failed", request.method, path)
            return RouterError(
                500, "internal_error", "internal error; see the router's log"
            ).response()

    def _preflight(self) -> web.Response:
        headers = (
            {}
            if self._origins
            else {
                "Access-Control-Allow-Methods": "*",
                "Access-Control-Allow-Headers": "*",
            }
        )
        return web.Response(status=200, headers=headers)

    def _authorised(self, request: web.Request, path: str) -> bool:
        options = self._options
        admin = path.startswith(_ADMIN_PREFIXES)
        if admin and options.admin_api_key is not None:
            return _bearer_is(request, options.admin_api_key)
        if options.api_key is None or path in _OPEN_PATHS:
            return True
        return _bearer_is(request, options.api_key)

    async def on_prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Headers of every response, streams included."""
        response.headers.setdefault("x-request-id", _identifier.get())
        if self._server.draining:
            response.force_close()
            response.headers["Connection"] = "close"
        if not self._origins:
            # As sglang_router does without the flag: browsers may read every answer.
            response.headers["Access-Control-Allow-Origin"] = "*"
            response.headers["Access-Control-Expose-Headers"] = "*"
            return
        origin = request.headers.get("Origin")
        if origin and ("*" in self._origins or origin in self._origins):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Allow-Methods"] = "GET, POST, DELETE, OPTIONS"
            response.headers["Access-Control-Allow-Headers"] = "content-type, authorization"
            response.headers["Access-Control-Expose-Headers"] = "x-request-id, x-smg-error-code"
            response.headers["Vary"] = "Origin"


def _bearer_is(request: web.Request, key: str) -> bool:
    scheme, _, value = request.headers.get("Authorization", "").partition(" ")
    # Header bytes that are no UTF-8 arrive as surrogates.
    given = value.strip().encode("utf-8", "surrogateescape")
    return scheme.lower() == "bearer" and hmac.compare_digest(given, key.encode())
