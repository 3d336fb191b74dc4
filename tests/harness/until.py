"""Waiting for what nothing announces."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable


async def until(
    condition: Callable[[], object], within_s: float = 60.0, every_s: float = 0.002
) -> None:
    """Return once ``condition`` holds, which may be a coroutine function.

    For what callbacks, threads or other processes make true. Where there is an event, wait for
    that. Raises: TimeoutError, it does not within ``within_s``."""
    async with asyncio.timeout(within_s):
        while True:
            holds = condition()
            if await holds if inspect.isawaitable(holds) else holds:
                return
            await asyncio.sleep(every_s)
