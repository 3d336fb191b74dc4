"""Serves ``POST /v1/messages/count_tokens`` with one engine. Nothing is generated, so the request
needs no bootstrap room and is not scheduled."""

from __future__ import annotations

import aiohttp
from aiohttp import web

from sglang_sbs.dashboard.pages import Handler
from sglang_sbs.router.engines.control_requests import ask
from sglang_sbs.router.errors import ANTHROPIC_PATH, RouterError, engine_message
from sglang_sbs.router.relay.relay import Relay
from sglang_sbs.router.requests.headers import forwarded_headers, in_lower_case, with_bearer
from sglang_sbs.router.telemetry.logs import current_request_id

_MOST_BYTES = 64 << 10
_MOST_ENGINES = 2
"""Engines tried per request: if two drop the connection, the request is probably the cause."""


class Messages:
    def __init__(self, relay: Relay, session: aiohttp.ClientSession) -> None:
        self._relay = relay
        self._session = session

    def routes(self) -> list[tuple[str, str, Handler]]:
        return [("POST", f"{ANTHROPIC_PATH}/count_tokens", self.count_tokens)]

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        """Return the response of the least loaded engine. Raises: RouterError: an engine's 4xx
        status; 503, no engine is usable; 502, none gave a valid response; 504, one did not answer
        in time. After a 504 no other engine is tried: counting a long text blocks an engine's HTTP
        process for all its clients."""
        relay = self._relay
        limit_bytes = relay.config.max_payload_bytes
        lines = forwarded_headers(
            with_bearer(in_lower_case(request.headers)), current_request_id.get()
        )
        # str.splitlines would also split values, at characters that clients choose.
        each = lines.decode("utf-8", "replace").split("\r\n")[:-1]
        headers = dict(line.split(": ", 1) for line in each)
        with relay.bodies.share() as share:
            body = await share.read(request, limit_bytes, " (--max-payload-size)")
            async with relay.admission.slot(1):
                return await self._ask(body, headers)

    async def _ask(self, body: bytes | bytearray, headers: dict[str, str]) -> web.Response:
        registry, limit_s = self._relay.attempts.registry, self._relay.config.count_tokens_s
        usable = sorted((w for w in registry if w.usable), key=lambda worker: worker.load)
        if not usable:
            raise RouterError(
                503, "no_workers", "no engine is available to count tokens", retry_after_s=1.0
            )
        why = ""
        for worker in usable[:_MOST_ENGINES]:
            try:
                status, answer = await ask(
                    self._session,
                    "POST",
                    f"{worker.url}{ANTHROPIC_PATH}/count_tokens",
                    timeout_s=limit_s,
                    data=body,
                    headers=headers | {"Content-Type": "application/json"},
                    most_bytes=_MOST_BYTES,
                )
            except TimeoutError:
                why = f"{worker.url} did not count the tokens within {limit_s:g} s"
                raise RouterError(504, "engine_timeout", why) from None
            except (aiohttp.ClientError, OSError) as error:
                why = f"{worker.url}: {type(error).__name__}"
                continue
            if status == 200 and answer[:1] == b"{":
                return web.Response(body=answer, content_type="application/json")
            if 400 <= status < 500:
                raise RouterError(status, "engine_refused", engine_message(answer))
            why = f"{worker.url}: status {status}"
        raise RouterError(502, "proxy_request_failed", why)
