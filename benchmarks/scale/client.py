"""Clients of the scale measurement: streams that stay, short requests, and what they noticed."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from benchmarks.raw_client import CONNECT_AT_ONCE, ENDLESS, Exchange, Tally, chat_request

SHORT_TOKENS = 4
"""Tokens of a request that comes and goes."""
_SIZES = 64
_LONGEST_PROMPT_BYTES = 8000
_TURN_S = 0.02


@dataclass(slots=True)
class Notes:
    """The observations of the clients; times in seconds."""

    noting: bool = False
    """Whether the measurement runs: gaps and first tokens outside it are left out."""
    sent: int = 0
    complete: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    """Time to the first token of each request sent while noting."""
    gaps_s: list[float] = field(default_factory=list)
    """Between two arrivals of data on a stream."""


class TimedStream(Exchange):
    __slots__ = ("_last_s", "_notes")

    def __init__(self, tally: Tally, notes: Notes) -> None:
        super().__init__(tally)
        self._notes = notes
        self._last_s = 0.0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        now_s = time.perf_counter()
        if self._last_s and self._notes.noting:
            self._notes.gaps_s.append(now_s - self._last_s)
        if self.first_s:
            self._last_s = now_s


class Clients:
    """All clients of one router. ``hold`` opens streams that stay, ``churn`` sends short ones."""

    def __init__(self, port: int, seed: int = 1) -> None:
        self.notes = Notes()
        self._port = port
        self._rng = random.Random(seed)
        self._tally = Tally()
        self._gate = asyncio.Semaphore(CONNECT_AT_ONCE)
        self._held: list[TimedStream] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._bodies = {
            tokens: [_request(tokens, self._rng) for _ in range(_SIZES)]
            for tokens in (ENDLESS, SHORT_TOKENS)
        }

    @property
    def open(self) -> int:
        """Streams that have begun and not ended, of those that stay."""
        return sum(stream.first_s > 0 and not stream.done.done() for stream in self._held)

    async def hold(self, streams: int, per_s: float) -> None:
        """Open so many that stay, at a rate; all have begun or failed when this returns."""
        await asyncio.gather(*[task async for task in self._paced(streams, per_s, ENDLESS)])

    async def churn(self, seconds: float, per_s: float) -> None:
        """Send short requests at a rate; they may still run when this returns."""
        async for _ in self._paced(round(seconds * per_s), per_s, SHORT_TOKENS):
            pass

    async def settle(self, timeout_s: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def ended(self, timeout_s: float) -> None:
        """Until the streams that stay are over too; what does not end is counted as lost."""
        await self.settle(timeout_s)
        waiting = [stream.done for stream in self._held if not stream.done.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)
        stuck = sum(not stream.done.done() for stream in self._held) + len(self._tasks)
        self.notes.complete = self._tally.complete
        self.notes.failures.update(self._tally.failures)
        if stuck:
            self.notes.failures["no end"] += stuck
        for stream in self._held:
            stream.close()
        for task in self._tasks:
            task.cancel()

    async def _paced(
        self, count: int, per_s: float, tokens: int
    ) -> AsyncIterator[asyncio.Task[None]]:
        started_s = time.perf_counter()
        sent = 0
        while sent < count:
            due = min(count, int((time.perf_counter() - started_s) * per_s) + 1)
            for _ in range(due - sent):
                task = asyncio.create_task(self._one(tokens))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                yield task
            sent = due
            await asyncio.sleep(_TURN_S)

    async def _one(self, tokens: int) -> None:
        loop = asyncio.get_running_loop()
        notes = self.notes
        notes.sent += 1
        async with self._gate:
            try:
                _, stream = await loop.create_connection(
                    lambda: TimedStream(self._tally, notes), "127.0.0.1", self._port
                )
            except OSError as error:
                notes.failures[f"connect: {error.strerror}"] += 1
                return
        sent_s, noted = time.perf_counter(), notes.noting
        stream.send(self._rng.choice(self._bodies[tokens]))
        if tokens == ENDLESS:
            self._held.append(stream)
        await stream.opened
        if noted and stream.first_s:
            notes.first_s.append(stream.first_s - sent_s)
        if tokens != ENDLESS:
            await stream.done
            stream.close()


def _request(tokens: int, rng: random.Random) -> bytes:
    prompt = "a word " * (rng.randint(40, _LONGEST_PROMPT_BYTES) // 7)
    return chat_request(tokens, stream=True, prompt=prompt)
