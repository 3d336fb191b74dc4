"""Threads for what would hold up the event loop, long work apart from short.

Who brings a long text waits for other long texts, never the rest for him.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

LONG_BYTES = 256 << 10
"""Work on so much text is long."""
_SHORT_THREADS = 2

P = ParamSpec("P")
T = TypeVar("T")


class Lanes:
    """Must be used from one event loop only."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_SHORT_THREADS, thread_name_prefix="short")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long")
        self.long_bytes = 0
        """Of the long work that is waiting or under way."""

    async def run(
        self, size_bytes: int, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """``work(*args)`` in a thread; ``size_bytes``: of what it has to go through."""
        loop = asyncio.get_running_loop()
        if size_bytes < LONG_BYTES:
            return await loop.run_in_executor(self._short, lambda: work(*args, **kwargs))
        self.long_bytes += size_bytes
        try:
            return await loop.run_in_executor(self._long, lambda: work(*args, **kwargs))
        finally:
            self.long_bytes -= size_bytes

    def close(self) -> None:
        """What has not begun is dropped."""
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)
