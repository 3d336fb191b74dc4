"""Limits concurrent requests (``--max-concurrent-requests``) with a FIFO queue and sglang_router's
token bucket. A request takes a token and returns it at its end; ``--rate-limit-tokens-per-second``
adds further tokens up to the bucket's size. Unlike in sglang_router, each unit of a batch or of
``n`` takes a token."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_sbs.console.plain_words import counted
from sglang_sbs.router.errors import RouterError


@dataclass(eq=False, repr=False)
class Admission:
    _size: int
    """Tokens in the full bucket; below 1 there is no limit."""
    _queue_size: int
    _timeout_s: float
    has_room: Callable[[int], bool] = lambda units: True
    """Returns whether there are file descriptors for the connections of this many more requests."""
    refill_per_s: float = 0.0
    observe: Callable[[bool], None] = lambda allowed: None
    """Called for each request with whether it was admitted."""
    running: int = 0
    _filled_s: float = 0.0
    _queue: deque[tuple[asyncio.Future[None], int]] = field(default_factory=deque)
    """Waiting requests with the tokens each needs."""
    _timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self._tokens = float(self._size)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def slot(self, units: int = 1) -> _AdmissionSlot:
        """Return a context manager that holds a token for each unit, at most all tokens.
        Raises on entry: RouterError (429), the queue is full; (503), no token became free in time,
        or no descriptors are left."""
        return _AdmissionSlot(self, units)

    async def take(self, units: int) -> None:
        """Take a token for each unit, at most all tokens; wait in the queue if there are too few.
        Raises: RouterError, as on entry to :meth:`slot`."""
        if not self.has_room(units):
            why = "this router has no file descriptors left; raise its limit (ulimit -n)"
            raise RouterError(503, "router_overloaded", why, retry_after_s=1.0)
        tokens = min(units, self._size)
        if tokens >= 1:
            try:
                await self._acquire(tokens)
            except RouterError:
                self.observe(False)
                raise
            self.observe(True)
        self.running += units

    def give_back(self, units: int) -> None:
        """Return the tokens that :meth:`take` took for this many units."""
        self.running -= units
        tokens = min(units, self._size)
        if tokens >= 1:
            self._give_back(tokens)

    async def _acquire(self, tokens: int) -> None:
        self._refill()
        if self._tokens >= tokens and not self._queue:
            self._tokens -= tokens
            return
        if len(self._queue) >= self._queue_size:
            state = f"{counted(self.running, 'request')} running and {len(self._queue):,} waiting"
            why = f"{state} (--max-concurrent-requests, --queue-size)"
            raise RouterError(429, "queue_full", why, retry_after_s=1.0)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((future, tokens))
        self._arm()
        try:
            async with asyncio.timeout(self._timeout_s):
                await future
        except TimeoutError:
            self._withdraw(future, tokens)
            why = f"waited {self._timeout_s:g} s for a slot (--queue-timeout-secs)"
            raise RouterError(503, "queue_timeout", why, retry_after_s=self._timeout_s) from None
        except asyncio.CancelledError:
            self._withdraw(future, tokens)
            raise

    def _withdraw(self, future: asyncio.Future[None], tokens: int) -> None:
        """Leave the queue; tokens granted at the same moment go to the next request."""
        if (future, tokens) in self._queue:
            self._queue.remove((future, tokens))
            self._hand_out()
        elif future.done() and not future.cancelled():
            self._give_back(tokens)

    def _refill(self) -> None:
        if self.refill_per_s <= 0:
            return
        now_s = asyncio.get_running_loop().time()
        if self._filled_s:
            gained = (now_s - self._filled_s) * self.refill_per_s
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
        """Set a timer for the time at which the next request's tokens are available."""
        if self.refill_per_s <= 0 or not self._queue or self._timer is not None:
            return
        wait_s = max(0.001, (self._queue[0][1] - self._tokens) / self.refill_per_s)
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._refilled)

    def _refilled(self) -> None:
        self._timer = None
        self._hand_out()


class _AdmissionSlot:
    """Context manager of :meth:`Admission.slot`, one per request; cheaper than a generator."""

    __slots__ = ("_admission", "_units")

    def __init__(self, admission: Admission, units: int) -> None:
        self._admission, self._units = admission, units

    async def __aenter__(self) -> None:
        await self._admission.take(self._units)

    async def __aexit__(self, *exc: object) -> None:
        self._admission.give_back(self._units)
