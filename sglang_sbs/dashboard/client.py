"""Reads the dashboard's stream of frames from a router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
from aiohttp.http_exceptions import LineTooLong

from sglang_sbs.console.plain_words import plain_error
from sglang_sbs.dashboard.pages import EVENTS_PATH, SILENT_S

_CONNECT_S = 5.0
_MAX_EVENT_BYTES = 64 << 20


class DashboardError(Exception):
    """The stream is unavailable; the text explains why and what to do."""


async def frames(router: str, key: str | None) -> AsyncIterator[dict[str, Any]]:
    """Yield the frames of one connection, a history first. Raises: DashboardError."""
    url = router.rstrip("/") + EVENTS_PATH
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=SILENT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(url, headers=headers) as answer,
        ):
            if answer.status != 200:
                raise DashboardError(await _refusal(answer, url, key))
            while line := await answer.content.readuntil(b"\n", max_size=_MAX_EVENT_BYTES):
                if line.startswith(b"data: ") and line.endswith(b"\n"):  # otherwise it was cut off
                    yield orjson.loads(line[6:])
    except LineTooLong as error:
        raise DashboardError("an event of the stream is too long to be one") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        text = plain_error(error)
        raise DashboardError(f"{router}: {text} (is the router there? --router URL)") from error


async def _refusal(answer: aiohttp.ClientResponse, url: str, key: str | None) -> str:
    if answer.status in (401, 403):
        if key:
            return f"{url}: this key is not accepted ({answer.status})"
        return f"{url}: the router wants a key: --admin-api-key KEY, or SGLANG_SBS_ADMIN_API_KEY"
    if answer.status == 404:
        return f"{url}: not found: is this an sglang-sbs router, and recent enough?"
    body = (await answer.content.read(300)).decode("utf-8", "replace")
    return f"{url}: {answer.status} {body}"
