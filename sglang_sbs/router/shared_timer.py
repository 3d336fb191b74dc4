"""Timeouts of one length that share a timer of the event loop. A timer for each would be a
noticeable part of what a short request costs, and nearly all timeouts end unused."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)


class SharedTimer(Generic[K]):
    """Calls a function with each key whose time is up. Use only from one event loop."""

    def __init__(self, seconds: float, expired: Callable[[K], object]) -> None:
        """Create a timer; ``expired`` is called with each key that is not discarded within
        ``seconds``."""
        self._seconds = seconds
        self._expired = expired
        self._due_s: dict[K, float] = {}
        """When each key expires, on the event loop's clock; earliest first, as all timeouts are
        equally long."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, key: K) -> None:
        """Start the timeout of a key that has none."""
        loop = asyncio.get_running_loop()
        self._due_s[key] = due_s = loop.time() + self._seconds
        if self._timer is None:
            self._set(loop, due_s)

    def discard(self, key: K) -> None:
        """End the timeout of a key, if it has one."""
        self._due_s.pop(key, None)

    def _set(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        # Use an empty context, because the timer is for many keys.
        self._timer = loop.call_at(due_s, self._fire, loop, context=contextvars.Context())

    def _fire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Expire all keys that are due, then set the timer for the next one."""
        self._timer = None
        now_s = loop.time()
        while self._due_s and self._timer is None:
            key, due_s = next(iter(self._due_s.items()))
            if due_s > now_s:
                self._set(loop, due_s)
            else:
                del self._due_s[key]
                try:
                    self._expired(key)
                except Exception:
                    # The timeouts of other keys do not depend on this one.
                    logger.exception("a timeout was not handled")
