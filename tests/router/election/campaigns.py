"""Several candidates for one lock in one event loop, and the terms each of them led in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from sglang_sbs.router.election import ElectionTimes, parse_election
from sglang_sbs.router.election.campaign import Campaign

QUICK = ElectionTimes(lease_s=1, renew_s=0.7, retry_s=0.1)


@dataclass
class RecordedCampaign:
    """One campaign and the terms it led in; ``0`` for every time it had to follow."""

    campaign: Campaign
    terms: list[int] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def leads(self) -> bool:
        return bool(self.terms and self.terms[-1])


@contextlib.asynccontextmanager
async def running(recorded: RecordedCampaign) -> AsyncIterator[None]:
    """The campaign of one process, ended as the process would."""
    run = recorded.campaign.run(recorded.terms.append, lambda: recorded.terms.append(0))
    recorded.task = task = asyncio.create_task(run)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def candidate(url: str, number: int, times: ElectionTimes = QUICK) -> RecordedCampaign:
    return RecordedCampaign(parse_election(url, f"tcp://10.0.0.{number}:7700", times))
