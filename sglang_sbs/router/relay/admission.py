"""The front door: how many requests may be inside at once (``--max-concurrent-requests``).

Owns the token bucket and the FIFO in front of it. Must not know what a request is. Holding for
batching is the scheduler's business, not this queue's.

The bucket is sglang_router's: it holds ``max_concurrent`` tokens, a request takes one and gives it
back at its end. ``--rate-limit-tokens-per-second`` adds further ones with time, never beyond the
bucket's size: requests that take long then let new ones in at that rate. Unlike there, what becomes
several requests (a batch, ``n``) takes a token for each, or all there are if they are fewer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from sglang_sbs.plain_words import counted
from sglang_sbs.router.errors import RouterError


class Admission:
    """``max_concurrent`` below 1: no limit."""

    def __init__(
        self,
        max_concurrent: int,
        queue_size: int,
        queue_timeout_s: float,
        has_room: Callable[[int], bool] = lambda units: True,
        *,
        refill_per_s: float = 0.0,
        observe: Callable[[bool], None] = lambda allowed: None,
    ) -> None:
        """``has_room``: whether this process can open the connections so many requests more need.
        ``observe`` is told of every request whether it was let in."""
        self._has_room = has_room
        self._observe = observe
        self._size = max_concurrent
        self._queue_size = queue_size
        self._timeout_s = queue_timeout_s
        self._refill_per_s = refill_per_s
        self._tokens = float(max_concurrent)
        self._filled_s = 0.0
        self._running = 0
        self._queue: deque[tuple[asyncio.Future[None], int]] = deque()
        """With the tokens each needs."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def running(self) -> int:
        return self._running

    @property
    def queued(self) -> int:
        return len(self._queue)

    def slot(self, units: int = 1) -> _Slot:
        """Tokens for the time of an ``async with``. See :meth:`enter` for what it may raise."""
        return _Slot(self, units)

    async def enter(self, units: int = 1) -> None:
        """Take a token for each unit, to be given back by :meth:`leave`.

        Raises:
            RouterError: 429 when the queue is full, 503 when no token came free in time or this
                process is out of descriptors.
        """
        if not self._has_room(units):
            raise RouterError(
                503,
                "router_overloaded",
                "this router has no file descriptors left; raise its limit (ulimit -n)",
                retry_after_s=1.0,
            )
        if self._size >= 1:
            try:
                await self._acquire(min(units, self._size))
            except RouterError:
                self._observe(False)
                raise
            self._observe(True)
        self._running += units

    def leave(self, units: int = 1) -> None:
        self._running -= units
        if self._size >= 1:
            self._give_back(min(units, self._size))

    async def _acquire(self, tokens: int) -> None:
        self._refill()
        if self._tokens >= tokens and not self._queue:
            self._tokens -= tokens
            return
        if len(self._queue) >= self._queue_size:
            raise RouterError(
                429,
                "queue_full",
                f"{counted(self._running, 'request')} running and {len(self._queue):,} waiting "
                "(--max-concurrent-requests, --queue-size)",
                retry_after_s=1.0,
            )
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((future, tokens))
        self._arm()
        try:
            async with asyncio.timeout(self._timeout_s):
                await future
        except TimeoutError:
            self._withdraw(future, tokens)
            raise RouterError(
                503,
                "queue_timeout",
                f"waited {self._timeout_s:g} s for a slot (--queue-timeout-secs)",
                retry_after_s=self._timeout_s,
            ) from None
        except asyncio.CancelledError:
            self._withdraw(future, tokens)
            raise

    def _withdraw(self, future: asyncio.Future[None], tokens: int) -> None:
        """Leave the queue; tokens that were handed over in the same instant go to the next."""
        if (future, tokens) in self._queue:
            self._queue.remove((future, tokens))
            self._hand_out()
        elif future.done() and not future.cancelled():
            self._give_back(tokens)

    def _refill(self) -> None:
        if self._refill_per_s <= 0:
            return
        now_s = asyncio.get_running_loop().time()
        if self._filled_s:
            gained = (now_s - self._filled_s) * self._refill_per_s
            self._tokens = min(float(self._size), self._tokens + gained)
        self._filled_s = now_s

    def _give_back(self, tokens: int) -> None:
        self._tokens = min(float(self._size), self._tokens + tokens)
        self._hand_out()

    def _hand_out(self) -> None:
        self._refill()
        while self._queue and self._tokens >= self._queue[0][1]:
            future, tokens = self._queue.popleft()
            if not future.done():
                self._tokens -= tokens
                future.set_result(None)
        self._arm()

    def _arm(self) -> None:
        """Look again when the next token will have been added."""
        if self._refill_per_s <= 0 or not self._queue or self._timer is not None:
            return
        wait_s = max(0.001, (self._queue[0][1] - self._tokens) / self._refill_per_s)
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._refilled)

    def _refilled(self) -> None:
        self._timer = None
        self._hand_out()


class _Slot:
    """Cheaper than a generator's context manager: every request goes through one."""

    __slots__ = ("_door", "_units")

    def __init__(self, door: Admission, units: int) -> None:
        self._door = door
        self._units = units

    async def __aenter__(self) -> None:
        await self._door.enter(self._units)

    async def __aexit__(self, *_: object) -> None:
        self._door.leave(self._units)
