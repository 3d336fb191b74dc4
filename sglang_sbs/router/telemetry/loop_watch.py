"""Reports when the event loop was blocked, for how long, and where.

While it is blocked, requests wait, streams pause and EndForward is not read. A timer on the loop
measures the time. A thread logs the loop's stack meanwhile, which shows the cause. The thread
cannot run while C code holds the interpreter lock; then only the time is known."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import Metric

from sglang_sbs.router.metric_families import total

STILL_S = 0.25
"""Shortest time that counts as blocked."""
BEAT_S = 0.05
QUIET_S = 10.0
"""Shortest interval between logged stacks and between logged times, because a slow host causes
many."""
_FRAMES = 12
_BUSY = 0.5
"""Share of a blocked time from which garbage collection counts as its cause. With less CPU time
than this share, the process waited for a processor or disk."""

logger = logging.getLogger(__name__)


class LoopWatch:
    """Watches the event loop in which :meth:`run` is a task."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.stalls = 0
        self.stalled_s = 0.0
        self._clock = clock
        self._beat_s = 0.0
        self._logged_s = self._reported_s = -math.inf
        """Times of the last logged stack and of the last logged length."""
        self._collected_s = self._collecting_since_s = 0.0
        """Seconds of garbage collection since the last beat, and the start of the current one."""

    async def run(self) -> None:
        """Watch until cancelled."""
        self._beat_s, self._thread_id = self._clock(), threading.get_ident()
        ended = threading.Event()
        gc.callbacks.append(self._on_collection)
        threading.Thread(target=self._watch, args=(ended,), name="loop watch", daemon=True).start()
        try:
            while True:
                cpu_s = time.process_time()
                await asyncio.sleep(BEAT_S)
                self._beat(time.process_time() - cpu_s)
        finally:
            ended.set()
            gc.callbacks.remove(self._on_collection)

    def families(self) -> Iterator[Metric]:
        about = f"Times the event loop was blocked for {STILL_S} s or longer"
        yield total("sbs_loop_stalls", about, self.stalls)
        yield total("sbs_loop_stalled_seconds", "Time it was blocked in these", self.stalled_s)

    def _beat(self, cpu_s: float) -> None:
        now_s = self._clock()
        still_s = now_s - self._beat_s - BEAT_S
        if still_s >= STILL_S:
            self.stalls += 1
            self.stalled_s += still_s
            if now_s - self._reported_s >= QUIET_S:
                self._reported_s = now_s
                cause = _cause(still_s, cpu_s, self._collected_s)
                text = "the event loop was blocked for %.2f s (%d times so far): %s"
                logger.warning(text, still_s, self.stalls, cause)
        self._beat_s, self._collected_s = now_s, 0.0

    def _watch(self, ended: threading.Event) -> None:
        logged_beat_s = -math.inf
        while not ended.wait(BEAT_S):
            beat_s, now_s = self._beat_s, self._clock()
            still_s = now_s - beat_s - BEAT_S
            if still_s < STILL_S or beat_s == logged_beat_s or now_s - self._logged_s < QUIET_S:
                continue
            logged_beat_s, self._logged_s = beat_s, now_s
            frame = sys._current_frames().get(self._thread_id)
            # Log files and lines only: values may be a client's.
            stack = "".join(traceback.format_stack(frame)[-_FRAMES:])
            logger.warning("the event loop has been blocked for %.2f s, in:\n%s", still_s, stack)

    def _on_collection(self, phase: str, _info: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread_id:
            return
        if phase == "start":
            self._collecting_since_s = self._clock()
        else:
            self._collected_s += self._clock() - self._collecting_since_s


def _cause(still_s: float, cpu_s: float, collected_s: float) -> str:
    """Return the likely cause of a blocked time, as text for the log. ``cpu_s`` and
    ``collected_s``: the process's CPU time and garbage collection within it."""
    if collected_s > _BUSY * still_s:
        return f"garbage collection took {collected_s:.2f} s of it"
    if cpu_s < _BUSY * still_s:
        return (
            f"the process had {cpu_s:.2f} s of CPU time meanwhile, so it waited for a processor or "
            "for a disk: see what else runs on this host"
        )
    return f"it computed for {cpu_s:.2f} s; the stack logged before, if any, shows the code"
