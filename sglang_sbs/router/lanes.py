"""For what would hold up the event loop: threads, long work apart from short; turns on the loop.
Who brings a long text waits for other long texts, never the rest for him."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

LONG_BYTES = 256 << 10
"""Work on so much text is long."""
_SHORT_THREADS = 2
_PACE_BYTES_PER_S = 250e6
"""JSON is read four times as fast: most of the time is left to others."""

P = ParamSpec("P")
T = TypeVar("T")


class Lanes:
    """Must be used from one event loop only."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_SHORT_THREADS, thread_name_prefix="short")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long")
        self.long_bytes = 0
        """Of the long work that is waiting or under way."""
        # Their threads start now: later, who starts one waits for all work that is under way.
        for _ in range(_SHORT_THREADS):
            self._short.submit(time.sleep, 0.01)
        self._long.submit(time.sleep, 0.0)

    async def run(
        self, size_bytes: int, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """``work(*args)`` in a thread; ``size_bytes``: of what it has to go through."""
        if size_bytes < LONG_BYTES:
            return await _in(self._short, partial(work, *args, **kwargs))
        self.long_bytes += size_bytes
        try:
            return await _in(self._long, partial(work, *args, **kwargs))
        finally:
            self.long_bytes -= size_bytes

    def close(self) -> None:
        """What has not begun is dropped."""
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)


async def _in(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """What is cancelled before it began is let go of at once: it stays in the executor's queue, and
    what it was to go through may be large."""
    jobs = [work]

    def run() -> T:
        return jobs.pop()()

    future = threads.submit(run)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if future.cancelled():
            jobs.clear()
        raise
    finally:
        del future  # its error has this frame, which would keep both, and all that was gone through


class Pace:
    """Long pieces of work on the loop, so far from each other that others get on between them."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def wait_s(self, size_bytes: int) -> float:
        """How long the next piece has to wait; ``size_bytes``: of what it goes through."""
        now_s = time.monotonic()
        start_s = max(now_s, self._free_s)
        self._free_s = start_s + size_bytes / _PACE_BYTES_PER_S
        return start_s - now_s


class Turns:
    """Lets a few pieces of work into each turn of the event loop, those of each sender in turn."""

    def __init__(self, at_once: int) -> None:
        self._at_once = self._left = at_once
        self._lines: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """Who waits, by sender; the sender whose turn is next comes first."""
        self._refilling = False

    async def take(self, sender: Hashable) -> None:
        """Wait until a piece of the sender's work may run; it has to run without waiting."""
        loop = asyncio.get_running_loop()
        if not self._refilling:
            self._refilling = True
            loop.call_soon(self._refill, loop)
        if self._left and not self._lines:
            self._left -= 1
            return
        place = loop.create_future()
        self._lines.setdefault(sender, deque()).append(place)
        await place

    def _refill(self, loop: asyncio.AbstractEventLoop) -> None:
        used, self._left = self._left < self._at_once, self._at_once
        while self._lines and self._left:
            sender, line = next(iter(self._lines.items()))
            del self._lines[sender]
            place = line.popleft()
            if line:
                self._lines[sender] = line
            if not place.done():  # else it was cancelled
                place.set_result(None)
                self._left -= 1
        self._refilling = used or self._left < self._at_once
        if self._refilling:
            loop.call_soon(self._refill, loop)
