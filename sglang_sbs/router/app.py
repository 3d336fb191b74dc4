"""The HTTP surface: routes, keys, request ids, error shapes.

Owns which URL does what and how an error looks on the wire. What happens behind a route is the
relay's (inference) or :mod:`.control`'s (everything else).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from sglang_sbs.router.access import Access, ControlKey
from sglang_sbs.router.control import Control
from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.http_ids import request_id
from sglang_sbs.router.logs import current_request_id, log_answer
from sglang_sbs.router.relay import PATHS
from sglang_sbs.router.requests import RouteKind, forwarded_headers
from sglang_sbs.router.worker_metrics import model_name

if TYPE_CHECKING:
    from sglang_sbs.router.server import RouterServer

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_NOT_IMPLEMENTED = {
    "/v1/embeddings": "Embeddings",
    "/v1/classify": "Classify",
    "/v1/rerank": "Rerank",
    "/rerank": "Rerank",
    "/v1/responses": "Responses endpoint",
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
        options = server.options
        keys = options.control_plane_keys
        if options.admin_api_key is not None:
            keys = (ControlKey("admin-api-key", "", "admin", options.admin_api_key), *keys)
        self._access = Access(options.api_key, keys, audit=options.control_plane_audit)

    def inference(self, kind: RouteKind) -> Handler:
        server = self._server

        metrics = server.metrics
        path = PATHS[kind]

        async def handler(request: web.Request) -> web.StreamResponse:
            identifier = current_request_id.get()
            model = model_name(server.registry)
            started_s = time.monotonic()
            streaming = False
            try:
                response = await relayed(request, identifier)
                streaming = not isinstance(response, web.Response)
                return response
            except RouterError as error:
                metrics.request_failed(path, model, error.code)
                raise
            finally:
                metrics.served(path, model, streaming, time.monotonic() - started_s)

        async def relayed(request: web.Request, identifier: str) -> web.StreamResponse:
            received = list(request.headers.items())
            if server.traces is None:
                headers = forwarded_headers(received, identifier)
                return await server.relay.handle(request, kind, headers, identifier)
            with server.traces.request(path, received, identifier) as (span, passed):
                headers = forwarded_headers(passed, identifier)
                response = await server.relay.handle(request, kind, headers, identifier)
                span.set_attribute("http.response.status_code", response.status)
                return response

        return handler

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path
        self._server.doorman.heard(request.protocol)
        identifier = request_id(path, request.headers, self._options.request_id_headers)
        current_request_id.set(identifier)
        known = request.match_info.http_exception is None
        resource = request.match_info.route.resource
        label = resource.canonical if known and resource is not None else "unknown"
        started_s = time.monotonic()
        duration = self._metrics.http_started(request.method, label)
        error_code = ""
        status = 499
        try:
            response = await self._respond(request, handler, path, known)
            status = response.status
            error_code = response.headers.get("X-SMG-Error-Code", "")
        finally:
            self._metrics.http_ended(status, error_code)
            seconds = time.monotonic() - started_s
            duration.observe(seconds)
            log_answer(request.method, path, status, error_code, seconds)
        return response

    async def _respond(
        self, request: web.Request, handler: Handler, path: str, known: bool
    ) -> web.StreamResponse:
        if request.method == "OPTIONS":
            return self._preflight()
        if known:
            identifier = current_request_id.get()
            refusal = self._access.refusal(request.method, path, request.headers, identifier)
            if refusal is not None:
                return refusal
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
        except web.HTTPBadRequest as error:
            return web.Response(status=400, text=error.text, content_type=error.content_type)
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
                "Access-Control-Max-Age": "3600",
            }
        )
        return web.Response(status=200, headers=headers)

    async def on_prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Headers of every response, streams included."""
        response.headers.setdefault("x-request-id", current_request_id.get())
        response.headers.popall("Server", None)  # no version for who looks for known holes
        if self._server.draining:
            response.force_close()
            response.headers["Connection"] = "close"
        if not self._origins:
            # As sglang_router does without the flag: browsers may read every answer.
            response.headers["Access-Control-Allow-Origin"] = "*"
            if request.method != "OPTIONS":
                response.headers["Access-Control-Expose-Headers"] = "*"
            return
        origin = request.headers.get("Origin")
        if origin and ("*" in self._origins or origin in self._origins):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Allow-Methods"] = "GET, POST, DELETE, OPTIONS"
            response.headers["Access-Control-Allow-Headers"] = "content-type, authorization"
            response.headers["Access-Control-Expose-Headers"] = "x-request-id, x-smg-error-code"
            response.headers["Vary"] = "Origin"
