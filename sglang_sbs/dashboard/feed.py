"""Builds the dashboard's frames five times a second while there are watchers.

All watchers get the same frames. The recorder of the router's own scheduler stays attached
(:meth:`LocalFeed.stay`), at a bounded cost. Other recorders are attached with the first watcher and
detached ``linger_s`` after the last one has left, so that a reloaded page keeps its history. A
watcher is a callback that must not block; it gets a history first, then every frame."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import orjson

from sglang_sbs.dashboard.recorder import DashboardRecorder, Order, Problems
from sglang_sbs.scheduling.events import Command, Event
from sglang_sbs.scheduling.explained.timelines import Timeline, Timelines
from sglang_sbs.trial.ratios import Ratio

logger = logging.getLogger(__name__)


Take = Callable[[bytes, bool], None]
"""Callback of a watcher: receives a frame as JSON, and whether the frame is a history."""
Stop = Callable[[], None]
Observer = Callable[[Event, Sequence[Command], float], None]
"""Called with every event, its commands and the time. Must neither raise nor block."""


class Observable(Protocol):
    observer: Observer | None
    errors: int
    """Number of events that failed in the scheduler."""
    timelines: Timelines
    """Observe each event before ``observer`` does."""

    @property
    def scheduler(self) -> Any:
        """A :class:`~sglang_sbs.scheduling.Scheduler`."""


class Feed(Protocol):
    def watch(self, take: Take) -> Stop:
        """Call ``take`` with a history and then with every frame, until the result is called."""

    def close(self) -> None:
        """Stop sending frames."""


class LocalFeed:
    """Feed of a scheduler in this process. Use only from one event loop."""

    def __init__(
        self,
        pump: Observable,
        *,
        problems: Problems = lambda: (),
        order: Order = lambda: (),
        alone: bool = False,
        lead: Callable[[], dict[str, Any] | None] = lambda: None,
        trial: Callable[[], dict[str, Any] | None] = lambda: None,
        frame_s: float = 0.2,
        linger_s: float = 15.0,
        retry_s: float = 10.0,
    ) -> None:
        """Create a feed.

        - ``problems``, ``order``: see :class:`.DashboardRecorder`.
        - ``alone``: the scheduler is a front end's own, used without the scheduler process.
        - ``lead``: returns which of several schedulers this is; None for a single one.
        - ``trial``: returns the state of a trial of two policies; None without a trial.
        - ``frame_s``: the interval of frames.
        - ``linger_s``: how long a recorder stays without a watcher.
        - ``retry_s``: how long after an exception a recorder that stays is replaced."""
        self._pump = pump
        self._record = partial(
            DashboardRecorder,
            problems=problems,
            order=order,
            errors=lambda: pump.errors,
            alone=alone,
        )
        self._lead = lead
        self._trial = trial
        self.frame_s, self.retry_s, self._linger_s = frame_s, retry_s, linger_s
        self.recorder: DashboardRecorder | None = None
        self.watchers: dict[Stop, Take] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._stays = False
        self._retry: asyncio.TimerHandle | None = None

    def stay(self) -> None:
        self._stays = True
        self._attach()

    def ratios(self) -> dict[str, Ratio]:
        """Gain by baseline (:mod:`.gain`); empty while it is unknown."""
        recorder = self.recorder
        return recorder.ttft.gain.ratios(time.monotonic()) if recorder is not None else {}

    def request_over(self, timeline: Timeline, parts_s: Mapping[str, float] | None) -> None:
        """Record an ended request. ``parts_s``: its TTFT by part, in seconds; None if it got no
        first token."""
        if self.recorder is not None:
            self.recorder.request_over(timeline, parts_s, time.monotonic())

    def watch(self, take: Take) -> Stop:
        recorder = self._attach()
        if not self.watchers:
            recorder.frame(time.monotonic())  # bring it up to date
        take(self._encode(recorder.history(time.monotonic())), True)

        def stop() -> None:
            self.watchers.pop(stop, None)

        self.watchers[stop] = take
        return stop

    def _attach(self) -> DashboardRecorder:
        if self.recorder is None:
            pump = self._pump
            self.recorder = self._record(pump.scheduler, time.monotonic(), pump.timelines)
            pump.observer = self._observe
            self._ticker = asyncio.create_task(self._tick())
        return self.recorder

    def close(self) -> None:
        self.watchers.clear()
        self.recorder = None
        self._pump.observer = None
        if self._ticker is not None:
            self._ticker.cancel()
        self._ticker = None
        if self._retry is not None:
            self._retry.cancel()
        self._retry = None

    def _failed(self) -> None:
        """Close after an exception. A recorder that stays is replaced by a new one."""
        self.close()
        if self._stays:
            self._retry = asyncio.get_running_loop().call_later(self.retry_s, self._attach)

    def _observe(self, event: Event, commands: Sequence[Command], now_s: float) -> None:
        try:
            if self.recorder is not None:
                self.recorder.observe(event, commands, now_s)
        except Exception:
            logger.exception("the dashboard failed on %r and is closed", type(event).__name__)
            self._failed()

    async def _tick(self) -> None:
        idle_s = 0.0
        while self._stays or idle_s < self._linger_s:
            await asyncio.sleep(self.frame_s)
            recorder = self.recorder
            if recorder is None:
                return
            idle_s = 0.0 if self.watchers else idle_s + self.frame_s
            now_s = time.monotonic()
            try:
                if not self.watchers:
                    recorder.tick(now_s)
                    recorder.take_new(now_s)
                    continue
                payload = self._encode(recorder.frame(now_s))
            except Exception:
                logger.exception("the dashboard failed and is closed")
                self._ticker = None
                self._failed()
                return
            for take in list(self.watchers.values()):
                take(payload, False)
        self._ticker = None
        self.close()

    def _encode(self, frame: dict[str, Any]) -> bytes:
        now = {"time_s": round(time.time(), 3), "lead": self._lead(), "trial": self._trial()}
        return orjson.dumps(frame | now)
