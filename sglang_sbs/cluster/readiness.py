"""Waits until a started server serves requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import aiohttp

POLL_INTERVAL_S = 0.2
_REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=5)

# `/ready` is a flag check (SGLang >= 0.5.20); older servers answer 404 and have `/model_info` or
# `/get_model_info`. `/health` is not asked: it runs a forward pass.
ENGINE_READINESS_PATHS = ("/ready", "/model_info", "/get_model_info")
ROUTER_READINESS_PATHS = ("/readiness",)


class NotReadyError(TimeoutError):
    """A server did not become ready in time."""


async def wait_until_ready(
    session: aiohttp.ClientSession,
    url: str,
    paths: Sequence[str],
    timeout_s: float,
    key: str = "",
) -> None:
    """Poll `url` + the first of `paths` that it knows until it answers 200, with `key` if there is
    one. A certificate is not checked: it names the host that clients use, not this address.
    Raises: NotReadyError, not within `timeout_s`; it has the last answer."""
    started_s = time.monotonic()
    last_answer = "no answer yet"
    while True:
        for path in paths:
            try:
                async with session.get(
                    url + path, timeout=_REQUEST_TIMEOUT, headers=_bearer(key), ssl=False
                ) as response:
                    if response.status == 200:
                        return
                    last_answer = f"GET {path} answered {response.status}"
                    if response.status != 404:
                        break
            except (aiohttp.ClientError, TimeoutError) as error:
                last_answer = f"GET {path}: {type(error).__name__}"
                break
        if time.monotonic() - started_s > timeout_s:
            raise NotReadyError(
                f"{url} was not ready within {timeout_s:.0f} s ({last_answer}); "
                "raise --startup-timeout if it is only slow"
            )
        await asyncio.sleep(POLL_INTERVAL_S)


async def freeze_gc(session: aiohttp.ClientSession, url: str, key: str = "") -> None:
    """POST /freeze_gc, which excludes start-up objects from garbage collection. SGLang does so
    after a warm-up request; without one, full collections stop the HTTP process for about 0.5 s."""
    # SGLang fault: collector-after-start
    async with session.post(
        url + "/freeze_gc", timeout=_REQUEST_TIMEOUT, headers=_bearer(key)
    ) as response:
        response.raise_for_status()


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
