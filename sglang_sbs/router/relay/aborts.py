"""Sending aborts to engines, few at a time.

Owns ``POST /abort_request`` and the queue in front of it. Must not know why a request is aborted.
Thousands of clients may vanish in the same instant; a connection for each abort, all at once, would
be a second storm, upon an engine that has enough to do.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import orjson

from sglang_sbs.router.engines.connection import UpstreamError
from sglang_sbs.router.engines.connection_pool import Pool, request_head

AT_ONCE = 16
"""Aborts under way to one engine; the others wait for their turn."""
ANSWER_S = 10.0
"""How long an engine may take to answer an abort before its connection is closed."""
STALE_S = 60.0
"""An abort that waited so long is dropped: its engine answers nothing, or not in time to matter."""


@dataclass(slots=True)
class _Engine:
    under_way: int = 0
    waiting: deque[tuple[str, float]] = field(default_factory=deque)
    """The rid, and when it was to be aborted."""


class Aborts:
    """One per router process."""

    def __init__(self, pool: Pool, worker_key: str | None, sent: Callable[[], None]) -> None:
        """``sent`` is told of each abort that goes to an engine."""
        self._pool = pool
        self._headers = f"authorization: Bearer {worker_key}\r\n".encode() if worker_key else b""
        self._sent = sent
        self._engines: dict[str, _Engine] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def send(self, worker_url: str, rid: str) -> None:
        """Abort a request there, not waiting for the answer. SGLang matches rids by prefix: ours
        are of one length, so an abort hits exactly one request."""
        engine = self._engines.setdefault(worker_url, _Engine())
        if engine.under_way >= AT_ONCE:
            engine.waiting.append((rid, time.monotonic()))
        else:
            self._start(worker_url, engine, rid)

    async def wait_idle(self) -> None:
        """Until every abort was answered or given up."""
        await self._idle.wait()

    @property
    def waiting(self) -> int:
        """Aborts that wait for their turn."""
        return sum(len(engine.waiting) for engine in self._engines.values())

    def _start(self, worker_url: str, engine: _Engine, rid: str) -> None:
        engine.under_way += 1
        self._idle.clear()
        self._sent()
        body = orjson.dumps({"rid": rid})
        head = request_head("POST", worker_url, "/abort_request", self._headers, len(body))
        answer = _Answer(lambda: self._over(worker_url, engine))
        call = self._pool.call(worker_url, (head, body), answer)

        def give_up() -> None:
            # A stopped engine takes connections and never answers: do not collect them.
            call.cancel()
            answer.message_complete()

        answer.timer = self._pool.loop.call_later(ANSWER_S, give_up)

    def _over(self, worker_url: str, engine: _Engine) -> None:
        engine.under_way -= 1
        oldest_s = time.monotonic() - STALE_S
        while engine.waiting and engine.under_way < AT_ONCE:
            rid, asked_s = engine.waiting.popleft()
            if asked_s >= oldest_s:
                self._start(worker_url, engine, rid)
        if not engine.under_way:
            del self._engines[worker_url]
            if not self._engines:
                self._idle.set()


class _Answer:
    """A receiver that only wants to know when it is over."""

    def __init__(self, over: Callable[[], None]) -> None:
        self.timer: asyncio.TimerHandle | None = None
        self._over: Callable[[], None] | None = over

    def head_received(self, status: int, headers: Mapping[str, str]) -> None: ...
    def body_received(self, data: bytes) -> None: ...

    def message_complete(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        over, self._over = self._over, None
        if over is not None:
            over()

    def failed(self, error: UpstreamError) -> None:
        self.message_complete()
