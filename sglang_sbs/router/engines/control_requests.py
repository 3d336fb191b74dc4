"""Control requests to engines. An answer must not make the router fetch from elsewhere (redirects)
or hold more than its own size (compression), and it has an end, whatever the engine sends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp

MAX_ANSWER_BYTES = 16 << 20
_SHORT_BYTES = 1 << 20


class AnswerTooLong(aiohttp.ClientError):
    """The engine sends more than anybody asked for."""


def engine_session(connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
    """For :func:`ask`: inflates nothing, keeps no cookies."""
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
    """Status and body; a redirect is an answer like any other. ``key`` is a bearer token, ``data``
    a body that is not to be made of ``json``. Raises:
    aiohttp.ClientError, there was no answer, or it has more than ``most_bytes``; OSError, as above;
    TimeoutError, not all of it came within ``timeout_s``."""
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
        # The interpreter's lock is not held while so many bytes are joined.
        return response.status, await asyncio.to_thread(b"".join, pieces)
