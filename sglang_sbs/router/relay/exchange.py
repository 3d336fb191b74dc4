"""One client request on its way: what all its units share, and how many may wait for prefill."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from sglang_sbs.router.client.answer_stream import Downstream
from sglang_sbs.router.errors import LegFailure
from sglang_sbs.router.prompts.reader import ReadPrompt
from sglang_sbs.router.relay.pair import Pair
from sglang_sbs.router.requests.headers import Asked
from sglang_sbs.router.requests.plan import Plan

MOST_AHEAD = 256
"""Units of one batch that wait for their prefill; the next begin as these get it."""


@dataclass(slots=True)
class Exchange:
    """One client request."""

    plan: Plan
    path: str
    headers: bytes
    request_id: str
    downstream: Downstream
    prompts: list[ReadPrompt]
    """By prompt index."""
    session: str
    asked: Asked
    priority: int
    """Larger is more urgent."""
    pairs: dict[int, Pair]
    """By unit index: the attempt under way."""
    suspects: dict[int, list[LegFailure]] = field(default_factory=dict)
    """By unit index: answers of 5xx that may be the engine's fault, or the request's."""
    window: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_AHEAD))
    ending: bool = False
    """The first of its units failed, or its client left: none is sent any more."""
    ahead: set[int] = field(default_factory=set)
    """By unit index: who has a place in ``window``."""

    async def go_ahead(self, index: int) -> None:
        """Wait for a place in the window."""
        await self.window.acquire()
        self.ahead.add(index)

    def prefilled(self, index: int) -> None:
        """The unit is past prefill, or over; its place is another's. Does nothing twice."""
        if index in self.ahead:
            self.ahead.discard(index)
            self.window.release()
