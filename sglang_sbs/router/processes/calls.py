"""Matches responses to numbered messages between front end and scheduler process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from sglang_sbs.router.errors import RouterError

_Q = TypeVar("_Q", bound=msgspec.Struct)
_A = TypeVar("_A")


class Calls(Generic[_A]):
    """Messages that wait for their response. Use only from one event loop."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[_A]] = {}

    async def ask(self, send: Callable[[_Q], bool], question: _Q, limit_s: float) -> _A | None:
        """Send ``question`` with ``send``, numbered, and return its response; ``None`` if ``send``
        failed or no response came within ``limit_s``. Raises: RouterError, 503, the connection was
        lost meanwhile (:meth:`give_up`)."""
        number = next(self._numbers)
        future: asyncio.Future[_A] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            if not send(msgspec.structs.replace(question, call=number)):
                return None
            async with asyncio.timeout(limit_s):
                return await future
        except TimeoutError:
            return None
        finally:
            del self._waiting[number]

    def answered(self, number: int, answer: _A) -> None:
        """Pass a response to the :meth:`ask` with this number; drop it if that has ended."""
        future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_result(answer)

    def give_up(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(no_scheduler())


def no_scheduler() -> RouterError:
    """Return the error (503) for requests that need the scheduler process while it is away."""
    message = "this front end has no connection to the scheduler process; try again"
    return RouterError(503, "scheduler_unavailable", message, retry_after_s=1.0)
