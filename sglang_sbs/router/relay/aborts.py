"""Sends aborts to engines, a few at a time. One connection per abort would overload engines when
thousands of clients disconnect at once."""

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


class Aborts:
    def __init__(
        self,
        pool: Pool,
        worker_key: str | None,
        sent: Callable[[], None],
        *,
        at_once: int = AT_ONCE,
        answer_s: float = 10.0,
        stale_s: float = 60.0,
    ) -> None:
        """Create the sender; ``sent`` is called for each abort sent to an engine. ``at_once``:
        concurrent aborts to one engine; the others queue. ``answer_s``: time limit for an engine's
        response. ``stale_s``: aborts that queued for this long are dropped: their engine does not
        respond, or not in time to matter."""
        self._pool = pool
        self._headers = f"authorization: Bearer {worker_key}\r\n".encode() if worker_key else b""
        self._sent = sent
        self._at_once, self._answer_s, self._stale_s = at_once, answer_s, stale_s
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Limit on concurrent aborts by engine URL, kept while the engine has aborts."""
        self.tasks: set[asyncio.Task[None]] = set()
        """One task per queued or running abort."""

    def send(self, worker_url: str, rid: str) -> None:
        """Abort a request on an engine without waiting for the response. SGLang matches rids by
        prefix; ours all have the same length, so an abort hits exactly one request."""
        # SGLang fault: abort-by-prefix
        task = self._pool.loop.create_task(self._abort(worker_url, rid))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def wait_idle(self) -> None:
        while self.tasks:
            await asyncio.wait(self.tasks)

    async def _abort(self, url: str, rid: str) -> None:
        asked_s = time.monotonic()
        place = self._places.setdefault(url, asyncio.Semaphore(self._at_once))
        waits = place.locked()
        async with place:
            if waits and time.monotonic() - asked_s > self._stale_s:
                return
            self._sent()
            body = orjson.dumps({"rid": rid})
            # A stopped engine accepts connections but never responds, so the time limit keeps them
            # from piling up.
            try:
                limit_s = self._answer_s
                await fetch(self._pool, url, "/abort_request", self._headers, limit_s, body=body)
            except (UpstreamError, TimeoutError):
                pass
            except Exception:
                logger.exception("no abort to %s", url)
