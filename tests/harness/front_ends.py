"""Requests to a router of several processes."""

from __future__ import annotations

import asyncio
from collections import Counter

import aiohttp
from router_harness import sse_events, until
from router_processes import Group, Site

IN_FLIGHT = "sbs_in_flight_requests"


def complete(answer: tuple[int, bytes]) -> bool:
    status, body = answer
    return status == 200 and sse_events(body)[-1] == "[DONE]" and b'"error"' not in body


class Load:
    """Clients that ask again and again, each request on a connection of its own."""

    def __init__(self, engines: Site, group: Group, clients: int = 6) -> None:
        self.outcomes: Counter[str] = Counter()
        self._engines, self._group = engines, group
        self._stop = False
        self._tasks = [asyncio.create_task(self._client()) for _ in range(clients)]

    async def _client(self) -> None:
        while not self._stop:
            try:
                answer = await self._engines.generate(self._group.url)
            except (aiohttp.ClientError, TimeoutError) as error:
                self.outcomes[type(error).__name__] += 1
            else:
                self.outcomes["complete" if complete(answer) else f"{answer!r}"] += 1

    async def more(self, count: int = 60) -> None:
        """Until so many more were answered."""
        wanted = self.outcomes.total() + count
        await until(lambda: self.outcomes.total() >= wanted)

    async def end(self) -> Counter[str]:
        self._stop = True
        await asyncio.gather(*self._tasks)
        return self.outcomes
