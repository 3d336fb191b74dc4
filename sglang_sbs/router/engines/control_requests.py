"""Sends control requests to engines. Responses cannot redirect the router elsewhere or be
compressed, and their size and time are limited."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

MAX_ANSWER_BYTES = 16 << 20
_SHORT_BYTES = 1 << 20


class AnswerTooLong(aiohttp.ClientError):
    """The engine's response exceeds the size limit of :func:`ask`."""


def engine_session(connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
    """Open a session for :func:`ask`. It neither decompresses responses nor keeps cookies."""
    return aiohttp.ClientSession(
        connector=connector,
        headers={"Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )


async def ask(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    key: str | None = None,
    timeout_s: float,
    connect_s: float | None = None,
    json: Any = None,
    data: bytes | bytearray | None = None,
    headers: Mapping[str, str] | None = None,
    most_bytes: int = MAX_ANSWER_BYTES,
) -> tuple[int, bytes]:
    """Send a request and return status and body; redirects are returned, not followed. ``key`` is a
    bearer token, ``data`` a body that replaces ``json``. Raises: aiohttp.ClientError or OSError,
    there was no response, or it exceeds ``most_bytes``; TimeoutError, it took over
    ``timeout_s``."""
    if key:
        headers = {**(headers or {}), "Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s)
    async with session.request(
        method,
        url,
        headers=headers,
        json=json,
        data=data,
        allow_redirects=False,
        timeout=timeout,
    ) as response:
        pieces: list[bytes] = []
        size = 0
        async for piece in response.content.iter_any():
            pieces.append(piece)
            size += len(piece)
            if size > most_bytes:
                raise AnswerTooLong(f"its answer is over {most_bytes >> 20} MiB")
        if size <= _SHORT_BYTES:
            return response.status, b"".join(pieces)
        # Joining this much in a thread does not hold the interpreter lock.
        return response.status, await asyncio.to_thread(b"".join, pieces)


def object_in(body: bytes) -> dict[str, Any]:
    """Parse a response's JSON object; return an empty one if the response is something else."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
