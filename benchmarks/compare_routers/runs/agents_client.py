"""The client of a closed loop: each agent sends its next turn when it has read the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from benchmarks.compare_routers.agents import Agents, Turn
from benchmarks.demo.load import Arrival, Sample, send_one


@dataclass(slots=True)
class Played:
    begin_s: float
    """When counting began, by the monotonic clock."""
    samples: list[Sample] = field(default_factory=list)
    """Of the turns that count, in the order they were sent."""
    load_s: float = 0.0
    """From ``begin_s`` until the last turn was sent."""
    warm_up_failed: int = 0
    optimum_tokens: int = 0
    """Prompt tokens of all turns, those before ``begin_s`` too, without what a turn before had.
    0: nobody asked."""


async def play(
    url: str,
    agents: Agents,
    words: Callable[[Turn, int], Arrival],
    turns: int,
    *,
    timeout_s: float,
) -> Played:
    """Send turns until so many count: those after every agent's first one was answered.

    ``words`` makes a request of a turn and its number. Each is bounded by ``timeout_s``; a turn
    that fails is followed by the agent's next one.
    """
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):
        run = _Run(url, agents, words, turns, session, group)
        for turn in agents.first:
            group.create_task(run.take(turn))
    return run.played


class _Run:
    def __init__(
        self,
        url: str,
        agents: Agents,
        words: Callable[[Turn, int], Arrival],
        turns: int,
        session: aiohttp.ClientSession,
        group: asyncio.TaskGroup,
    ) -> None:
        self._url, self._agents, self._words, self._turns = url, agents, words, turns
        self._session, self._group = session, group
        self._begun_s = time.monotonic()
        self._sent = 0
        self._unanswered = {turn.large.thread for turn in agents.first}
        self._over = asyncio.Event()
        self.played = Played(self._begun_s)

    async def take(self, turn: Turn) -> None:
        """Send a turn at its time, read the answer, and have what follows sent at theirs."""
        if await self._over_before(turn.at_s):
            return
        counts = not self._unanswered
        at_s = time.monotonic() - self.played.begin_s
        arrival = self._words(turn, self._sent)
        self._sent += 1
        self.played.optimum_tokens += self._agents.new_tokens(turn)
        sample = Sample(at_s, turn.prompt_tokens)
        if counts:
            self._count(sample)
        await send_one(self._session, self._url, arrival, into=sample)
        if not counts:
            self.played.warm_up_failed += bool(sample.error)
            self._answered(turn)
        for following in self._agents.after(turn, time.monotonic() - self._begun_s):
            self._group.create_task(self.take(following))

    async def _over_before(self, at_s: float) -> bool:
        """Wait until then; whether the run was over sooner."""
        delay_s = self._begun_s + at_s - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, delay_s)):
                await self._over.wait()
        except TimeoutError:
            pass
        return self._over.is_set()

    def _count(self, sample: Sample) -> None:
        self.played.samples.append(sample)
        if len(self.played.samples) == self._turns:
            self.played.load_s = sample.at_s
            self._over.set()

    def _answered(self, turn: Turn) -> None:
        if turn.large.thread in self._unanswered:
            self._unanswered.remove(turn.large.thread)
            if not self._unanswered:
                self.played.begin_s = time.monotonic()
