"""Reads the dashboard's stream of frames from a router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
from aiohttp.http_exceptions import LineTooLong

from sglang_sbs.console.ask_router import MOST_ERROR_BYTES, NoAnswerError, refusal
from sglang_sbs.console.plain_words import plain_error
from sglang_sbs.dashboard.pages import EVENTS_PATH, SILENT_S

_CONNECT_S = 5.0
_MAX_EVENT_BYTES = 64 << 20


async def frames(router: str, key: str | None) -> AsyncIterator[dict[str, Any]]:
    """Yield the frames of one connection, a history first. Raises: NoAnswerError."""
    url = router.rstrip("/") + EVENTS_PATH
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=SILENT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(url, headers=headers) as answer,
        ):
            if answer.status != 200:
                absent = f"{url}: not found: is this an sglang-sbs router, and recent enough?"
                body = await answer.content.read(MOST_ERROR_BYTES)
                raise NoAnswerError(refusal(answer.status, url, key, absent, body))
            while line := await answer.content.readuntil(b"\n", max_size=_MAX_EVENT_BYTES):
                if line.startswith(b"data: ") and line.endswith(b"\n"):  # otherwise it was cut off
                    yield orjson.loads(line[6:])
    except LineTooLong as error:
        raise NoAnswerError("an event of the stream is too long to be one") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        text = plain_error(error)
        raise NoAnswerError(f"{router}: {text} (is the router there? --router URL)") from error
