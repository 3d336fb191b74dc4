"""The front door: how many client requests may be inside at once (``--max-concurrent-requests``).

Owns the slots and the FIFO in front of them. Must not know what a request is. Holding for batching
is the scheduler's business, not this queue's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from sglang_sbs.router.errors import RouterError


class Admission:
    """``max_concurrent`` below 1: no limit."""

    def __init__(
        self,
        max_concurrent: int,
        queue_size: int,
        queue_timeout_s: float,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        """``has_room``: whether this process can open the connections one more request needs."""
        self._has_room = has_room
        self._max = max_concurrent
        self._queue_size = queue_size
        self._timeout_s = queue_timeout_s
        self._running = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def running(self) -> int:
        return self._running

    @property
    def queued(self) -> int:
        return len(self._queue)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """A slot for the time of the block.

        Raises:
            RouterError: 429 when the queue is full, 503 when no slot came free in time or this
                process is out of descriptors.
        """
        if not self._has_room():
            raise RouterError(
                503,
                "router_overloaded",
                "this router has no file descriptors left; raise its limit (ulimit -n)",
                retry_after_s=1.0,
            )
        await self._acquire()
        try:
            yield
        finally:
            self._release()

    async def _acquire(self) -> None:
        if self._max < 1 or (self._running < self._max and not self._queue):
            self._running += 1
            return
        if len(self._queue) >= self._queue_size:
            raise RouterError(
                429,
                "queue_full",
                f"{self._max} requests are running and {self._queue_size} waiting "
                "(--max-concurrent-requests, --queue-size)",
                retry_after_s=1.0,
            )
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(future)
        try:
            async with asyncio.timeout(self._timeout_s):
                await future
        except TimeoutError:
            self._withdraw(future)
            raise RouterError(
                503,
                "queue_timeout",
                f"waited {self._timeout_s:g} s for a slot (--queue-timeout-secs)",
                retry_after_s=self._timeout_s,
            ) from None
        except asyncio.CancelledError:
            self._withdraw(future)
            raise

    def _withdraw(self, future: asyncio.Future[None]) -> None:
        """Leave the queue; a slot that was handed over in the same instant goes on to the next."""
        if future in self._queue:
            self._queue.remove(future)
        elif future.done() and not future.cancelled():
            self._release()

    def _release(self) -> None:
        self._running -= 1
        while self._queue and self._running < self._max:
            future = self._queue.popleft()
            if not future.done():
                self._running += 1
                future.set_result(None)
