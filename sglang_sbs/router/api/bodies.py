"""Reads JSON bodies of requests other than inference, within limits, and writes JSON responses."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from sglang_sbs.router.client.intake import Bodies
from sglang_sbs.router.requests.body_fields import bad_request
from sglang_sbs.router.requests.raw_json import JsonError, value_of

MAX_BODY_BYTES = 1 << 20
"""Limit on the JSON body of a request that changes the cluster; adding a worker takes a few hundred
bytes."""


def json_answer(
    value: Any, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    body = orjson.dumps(value)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


async def read_object(
    request: web.Request, bodies: Bodies, most_bytes: int = MAX_BODY_BYTES
) -> dict[str, Any]:
    """Read a JSON object. Raises: RouterError: 400, it is invalid; 408, it is late; 413 or 503, it
    is too large."""
    with bodies.share() as share:
        return json_object(await share.read(request, most_bytes))


def json_object(raw: bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object. Raises: RouterError (400), it is not one, or its objects would take far
    more memory than ``raw``."""
    try:
        value = value_of(raw)
    except JsonError as error:
        raise bad_request(str(error)) from error
    if not isinstance(value, dict):
        raise bad_request("must be a JSON object")
    return value
