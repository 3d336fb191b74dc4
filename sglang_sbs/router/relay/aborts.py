"""Sending aborts to engines, few at a time: when thousands of clients vanish at once, a connection
for each abort would be a second storm."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from weakref import WeakValueDictionary

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


class Aborts:
    def __init__(self, pool: Pool, worker_key: str | None, sent: Callable[[], None]) -> None:
        """``sent`` is told of each abort that goes to an engine."""
        self._pool = pool
        self._headers = f"authorization: Bearer {worker_key}\r\n".encode() if worker_key else b""
        self._sent = sent
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By engine, as long as it has aborts."""
        self.tasks: set[asyncio.Task[None]] = set()
        """One for each abort that waits or is under way."""

    def send(self, worker_url: str, rid: str) -> None:
        """Abort a request there, not waiting for the answer. SGLang matches rids by prefix: ours
        are of one length, so an abort hits exactly one request."""
        # SGLang fault: abort-by-prefix
        task = self._pool.loop.create_task(self._abort(worker_url, rid))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def wait_idle(self) -> None:
        while self.tasks:
            await asyncio.wait(self.tasks)

    async def _abort(self, url: str, rid: str) -> None:
        asked_s = time.monotonic()
        place = self._places.setdefault(url, asyncio.Semaphore(AT_ONCE))
        waits = place.locked()
        async with place:
            if waits and time.monotonic() - asked_s > STALE_S:
                return
            self._sent()
            body = orjson.dumps({"rid": rid})
            # A stopped engine takes connections and never answers: do not collect them.
            try:
                await fetch(self._pool, url, "/abort_request", self._headers, ANSWER_S, body=body)
            except (UpstreamError, TimeoutError):
                pass
            except Exception:
                logger.exception("no abort to %s", url)
