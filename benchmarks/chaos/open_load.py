"""An open-loop load that runs beside a fault: started, added to, ended, and what became of it."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

import aiohttp
import msgspec

from benchmarks.demo.load import Arrival, Sample, send_one

WINDOW = 20
"""Requests in a row that tell whether service is back: one of them may be out of line."""
LEAST_SETTLED = 8
"""Requests after the recovery without which it is not believed."""
STEP_S = 2.0
"""Length of a :class:`Step`."""

_CODE = re.compile(r"""["']code["']: ?["']?(\w+)""")


class Fate(StrEnum):
    ANSWERED = "answered"
    ERROR = "error"
    """An HTTP status or an error event in the stream: the client knows what happened."""
    CUT_OFF = "cut off"
    """Accepted, and the connection or the stream ended without a word."""
    NOT_ACCEPTED = "not accepted"
    UNANSWERED = "unanswered"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request; seconds on the load's clock."""

    sent_s: float
    ended_s: float
    sample: Sample

    @property
    def first_token_s(self) -> float:
        """NaN if there was none."""
        return self.sent_s + self.sample.ttft_s

    @property
    def fate(self) -> Fate:
        error = self.sample.error
        if not error:
            return Fate.ANSWERED
        if error.startswith(("HTTP ", "{")):
            return Fate.ERROR
        if error.startswith("TimeoutError"):
            return Fate.UNANSWERED
        if error.startswith("ClientConnectorError"):
            return Fate.NOT_ACCEPTED
        return Fate.CUT_OFF

    @property
    def label(self) -> str:
        """An error's status or ``event``, and the router's code."""
        error = self.sample.error
        code = _CODE.search(error)
        status = error.split(":")[0].removeprefix("HTTP ") if error.startswith("HTTP ") else "event"
        return f"{status} {code[1] if code else error[:60]}"

    def running_at(self, time_s: float) -> bool:
        """Whether its stream had begun and not ended then."""
        return self.first_token_s <= time_s < self.ended_s


class Step(msgspec.Struct, frozen=True):
    """The requests that were sent in :data:`STEP_S` seconds."""

    from_s: float
    """Seconds since the fault; negative before it."""
    longest_ttft_s: float
    """NaN, which is null in JSON, if no request got a token."""
    failed: int
    """Requests without a complete answer."""


class OpenLoad:
    """Clients of one router. Leaving the context waits for no answer: call :meth:`finish`."""

    def __init__(self, url: str, *, timeout_s: float, kept: bool = True) -> None:
        """``kept``: whether connections are used again."""
        self._url = url
        self._timeout_s = timeout_s
        self._kept = kept
        self._started_s = time.monotonic()
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession
        self.outcomes: list[Outcome] = []

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=not self._kept),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    def send(self, arrivals: Sequence[Arrival]) -> None:
        """Send these at their times, counted from now, beside what is being sent."""
        self._spawn(self._send_all(arrivals))

    async def finish(self) -> list[Outcome]:
        """Send no more, wait for every answer; all outcomes in the order sent."""
        await self._answers()
        return sorted(self.outcomes, key=lambda outcome: outcome.sent_s)

    async def _answers(self) -> None:
        self._stopped.set()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_all(self, arrivals: Sequence[Arrival]) -> None:
        begin_s = self.elapsed_s
        for arrival in arrivals:
            try:
                async with asyncio.timeout(max(0.0, begin_s + arrival.at_s - self.elapsed_s)):
                    await self._stopped.wait()
                return
            except TimeoutError:
                self._spawn(self._send_one(arrival))

    async def _send_one(self, arrival: Arrival) -> None:
        sent_s = self.elapsed_s
        sample = await send_one(self._session, self._url, arrival)
        self.outcomes.append(Outcome(sent_s, self.elapsed_s, sample))


def recovery_s(outcomes: Sequence[Outcome], fault_s: float, limit_s: float) -> float | None:
    """Seconds from ``fault_s`` until requests were served as before, by the time they were sent.

    Served as before is answered with the first token within ``limit_s``. 0: all sent after the
    fault were. None: it did not come to that.
    """
    after = sorted((o for o in outcomes if o.sent_s >= fault_s), key=lambda o: o.sent_s)
    good = [o.fate is Fate.ANSWERED and o.sample.ttft_s <= limit_s for o in after]
    begin = len(after)
    while begin > 0 and good[begin - 1 : begin - 1 + WINDOW].count(False) <= 1:
        begin -= 1
    while begin < len(after) and not good[begin]:
        begin += 1
    if len(after) - begin < LEAST_SETTLED:
        return None
    return after[begin].sent_s - fault_s if begin else 0.0


def steps(outcomes: Sequence[Outcome], fault_s: float) -> list[Step]:
    """Return TTFT and failures at the clients over time, by when requests were sent."""
    by_start = defaultdict[float, list[Outcome]](list)
    for outcome in outcomes:
        by_start[STEP_S * math.floor((outcome.sent_s - fault_s) / STEP_S)].append(outcome)
    return [
        Step(start_s, first_token_worst_s(sent), sum(o.fate is not Fate.ANSWERED for o in sent))
        for start_s, sent in sorted(by_start.items())
    ]


def first_token_median_s(outcomes: Sequence[Outcome]) -> float:
    """Median TTFT of those that had one; NaN for none."""
    known = sorted(o.sample.ttft_s for o in outcomes if not math.isnan(o.sample.ttft_s))
    return known[len(known) // 2] if known else math.nan


def first_token_worst_s(outcomes: Sequence[Outcome]) -> float:
    """Largest TTFT of those that had one; NaN for none."""
    return max(
        (o.sample.ttft_s for o in outcomes if not math.isnan(o.sample.ttft_s)), default=math.nan
    )
