"""Thread pools and turn-taking for work that would block the event loop. Long texts queue behind
other long texts; short requests never wait for them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

LONG_BYTES = 256 << 10
"""Bytes of input from which work counts as long."""
_SHORT_THREADS = 2
_PACE_BYTES_PER_S = 250e6
"""Rate at which :class:`Pace` admits input. JSON is parsed four times as fast, so the event loop
stays free for other work most of the time."""

P = ParamSpec("P")
T = TypeVar("T")


class Lanes:
    """Runs work in threads, short and long work separately. Use only from one event loop."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_SHORT_THREADS, thread_name_prefix="short")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long")
        self.long_bytes = 0
        """Bytes of long work waiting or running."""
        # Start the threads now: starting one later would wait for all running work.
        for _ in range(_SHORT_THREADS):
            self._short.submit(time.sleep, 0.01)
        self._long.submit(time.sleep, 0.0)

    async def run(
        self, size_bytes: int, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return the result of ``work``, run in a thread. Input of ``size_bytes`` selects the
        threads for short or long work."""
        if size_bytes < LONG_BYTES:
            return await _in(self._short, partial(work, *args, **kwargs))
        self.long_bytes += size_bytes
        try:
            return await _in(self._long, partial(work, *args, **kwargs))
        finally:
            self.long_bytes -= size_bytes

    def close(self) -> None:
        """Stop; work that has not begun is dropped."""
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)


async def _in(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Return the result of work run in a thread. If it is cancelled before it begins, its possibly
    large input is dropped at once, although the executor's queue keeps an entry."""
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
        del future  # its error references this frame, which would keep both and the input


class Pace:
    """Spaces out long pieces of work on the event loop, so that others run in between."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def wait_s(self, size_bytes: int) -> float:
        """Reserve the next place for work on ``size_bytes`` of input. Return the seconds until it
        may run."""
        now_s = time.monotonic()
        start_s = max(now_s, self._free_s)
        self._free_s = start_s + size_bytes / _PACE_BYTES_PER_S
        return start_s - now_s


class LoopTurns:
    """Admits at most ``at_once`` pieces of work per turn of the event loop, one sender after
    another."""

    def __init__(self, at_once: int) -> None:
        self._at_once = self._left = at_once
        self._lines: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """Waiting pieces by sender; the first sender has the next turn."""
        self._refilling = False

    async def take(self, sender: Hashable) -> None:
        """Wait until one piece of this sender's work may run; the caller must then run it without
        awaiting."""
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
            if not place.done():  # otherwise it was cancelled
                place.set_result(None)
                self._left -= 1
        self._refilling = used or self._left < self._at_once
        if self._refilling:
            loop.call_soon(self._refill, loop)
