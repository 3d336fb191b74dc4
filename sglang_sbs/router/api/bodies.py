"""Bodies of requests that are not inference, read with an end, and answers to them, as JSON."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web

from sglang_sbs.router.client.intake import GRACE_S
from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.requests.body_fields import bad_request

MAX_BODY_BYTES = 1 << 20
"""Of requests that change the cluster; a worker takes a few hundred."""


def json_answer(
    value: Any, status: int = 200, headers: dict[str, str] | None = None
) -> web.StreamResponse:
    body = orjson.dumps(value)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def too_large(most_bytes: int) -> RouterError:
    detail = f"the body is over {most_bytes} bytes, the limit of this endpoint"
    return RouterError(413, "payload_too_large", detail)


async def read_object(request: web.Request) -> dict[str, Any]:
    """Raises: RouterError (400, 408 or 413), it is none, does not come or has no end."""
    body = bytearray()
    try:
        async with asyncio.timeout(GRACE_S):
            while piece := await request.content.readany():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise too_large(MAX_BODY_BYTES)
    except TimeoutError:
        detail = f"the body stopped after {len(body)} bytes"
        raise RouterError(408, "body_too_slow", detail) from None
    return json_object(body)


def json_object(raw: bytes | bytearray) -> dict[str, Any]:
    """Raises: RouterError (400)."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise bad_request("must be a JSON object")
    return value
