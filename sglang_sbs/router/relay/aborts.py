"""Sending aborts to engines, few at a time: when thousands of clients vanish at once, a connection
for each abort would be a second storm."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import orjson

from sglang_sbs.router.engines.connection import UpstreamError
from sglang_sbs.router.engines.connection_pool import Pool, fetch

logger = logging.getLogger(__name__)

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

    def next_rid(self) -> str | None:
        oldest_s = time.monotonic() - STALE_S
        while self.waiting:
            rid, asked_s = self.waiting.popleft()
            if asked_s >= oldest_s:
                return rid
        return None


class Aborts:
    def __init__(self, pool: Pool, worker_key: str | None, sent: Callable[[], None]) -> None:
        """``sent`` is told of each abort that goes to an engine."""
        self._pool = pool
        self._headers = f"authorization: Bearer {worker_key}\r\n".encode() if worker_key else b""
        self._sent = sent
        self._engines: dict[str, _Engine] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, worker_url: str, rid: str) -> None:
        """Abort a request there, not waiting for the answer. SGLang matches rids by prefix: ours
        are of one length, so an abort hits exactly one request."""
        engine = self._engines.setdefault(worker_url, _Engine())
        if engine.under_way >= AT_ONCE:
            engine.waiting.append((rid, time.monotonic()))
            return
        engine.under_way += 1
        task = self._pool.loop.create_task(self._abort(worker_url, engine, rid))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait_idle(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def waiting(self) -> int:
        return sum(len(engine.waiting) for engine in self._engines.values())

    async def _abort(self, url: str, engine: _Engine, rid: str | None) -> None:
        """This one, then those that wait, until there are none."""
        while rid is not None:
            self._sent()
            body = orjson.dumps({"rid": rid})
            # A stopped engine takes connections and never answers: do not collect them.
            try:
                await fetch(self._pool, url, "/abort_request", self._headers, ANSWER_S, body=body)
            except (UpstreamError, TimeoutError):
                pass
            except Exception:  # the engine's other aborts go on
                logger.exception("no abort to %s", url)
            rid = engine.next_rid()
        engine.under_way -= 1
        if not engine.under_way:
            del self._engines[url]
