"""Clients behind a load balancer with two routers: what HAProxy or a Service would do for them.

A router that does not answer health checks gets no new requests. A request whose router refuses the
connection, breaks it, or is taken out is sent again to the other one: that repeat is the client's
or the balancer's, no router can do it, and it is counted. An answer with an HTTP error is final.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

from benchmarks.chaos.open_load import Fate, OpenLoad, Outcome
from benchmarks.demo.load import Arrival, Sample, send_one

CHECK_EVERY_S = 0.5
CHECK_TIMEOUT_S = 0.5
CHECKS_TO_FAIL = 2
MOST_TRIES = 5


@dataclass(eq=False)
class Router:
    url: str
    up: bool = True
    failed: int = 0
    taken_out: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Balanced:
    outcome: Outcome
    """The last try; sent, and its first token, as the client saw them over all tries."""
    tries: int

    @property
    def answered(self) -> bool:
        return self.outcome.fate is Fate.ANSWERED


class BalancedLoad(OpenLoad):
    def __init__(self, urls: Sequence[str], *, timeout_s: float) -> None:
        super().__init__("", timeout_s=timeout_s, kept=False)
        self.routers = [Router(url) for url in urls]
        self.done: list[Balanced] = []
        self._turn = itertools.count()
        self._checks: list[asyncio.Task[None]] = []
        self._came_up = asyncio.Event()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._checks = [asyncio.create_task(self._check(router)) for router in self.routers]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._checks:
            task.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)
        await super().__aexit__(*error)

    async def all_answers(self) -> list[Balanced]:
        """Send no more, wait for every answer; all of them in the order sent."""
        await self._answers()
        return sorted(self.done, key=lambda request: request.outcome.sent_s)

    async def _send_one(self, arrival: Arrival) -> None:
        sent_s, deadline_s = self.elapsed_s, self.elapsed_s + self._timeout_s
        first_token_s, tries = math.nan, 0
        while True:
            router = await self._pick(deadline_s)
            tries += 1
            tried_s = self.elapsed_s
            sample = await self._try(router, arrival, deadline_s)
            if math.isnan(first_token_s):
                first_token_s = tried_s - sent_s + sample.ttft_s
            fate = Outcome(tried_s, self.elapsed_s, sample).fate
            again = fate in (Fate.CUT_OFF, Fate.NOT_ACCEPTED)
            if not again or tries == MOST_TRIES or self.elapsed_s >= deadline_s:
                break
            if fate is Fate.NOT_ACCEPTED:
                self._take_out(router)
        sample.ttft_s = first_token_s
        self.outcomes.append(Outcome(sent_s, self.elapsed_s, sample))
        self.done.append(Balanced(self.outcomes[-1], tries))

    async def _try(self, router: Router, arrival: Arrival, deadline_s: float) -> Sample:
        """One router; given up when that is taken out."""
        sample = Sample(arrival.at_s, len(arrival.input_ids))
        asked = asyncio.ensure_future(send_one(self._session, router.url, arrival, into=sample))
        out = asyncio.ensure_future(router.taken_out.wait())
        either: set[asyncio.Future[Any]] = {asked, out}
        try:
            await asyncio.wait(
                either,
                timeout=max(0.0, deadline_s - self.elapsed_s),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not asked.done():
                gone = out.done()
                sample.error = "its router was taken out" if gone else "TimeoutError: no end"
        finally:
            for task in either:
                task.cancel()
            await asyncio.gather(*either, return_exceptions=True)
        return sample

    async def _pick(self, deadline_s: float) -> Router:
        """The next router in turn that is in; whichever if none comes back in time."""
        while True:
            able = [router for router in self.routers if router.up]
            if able or self.elapsed_s >= deadline_s:
                return (able or self.routers)[next(self._turn) % len(able or self.routers)]
            self._came_up.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s - self.elapsed_s):
                    await self._came_up.wait()

    # Health checks --------------------------------------------------------------------------------

    async def _check(self, router: Router) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            if await self._is_healthy(router):
                router.failed = 0
                if not router.up:
                    router.up, router.taken_out = True, asyncio.Event()
                    self._came_up.set()
            else:
                router.failed += 1
                if router.failed >= CHECKS_TO_FAIL:
                    self._take_out(router)

    async def _is_healthy(self, router: Router) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)
            async with self._session.get(f"{router.url}/readiness", timeout=timeout) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _take_out(self, router: Router) -> None:
        router.up = False
        router.taken_out.set()
