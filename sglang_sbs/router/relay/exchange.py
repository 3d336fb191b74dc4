"""The records of a request on its way: the client's, one of its units, one attempt at that.

Each refers to the one before, and everybody who serves the request has these: nobody writes down
again what they say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_sbs.router.assignment.assigner import Announced
from sglang_sbs.router.client.answer_stream import Downstream
from sglang_sbs.router.errors import LegFailure
from sglang_sbs.router.prompts.reader import ReadPrompt
from sglang_sbs.router.relay.pair import Pair
from sglang_sbs.router.requests.headers import Asked
from sglang_sbs.router.requests.plan import Plan, Unit
from sglang_sbs.router.telemetry.tracing import AttemptTrace
from sglang_sbs.router.workers.placement import Placement

MOST_AHEAD = 256
"""Units of one batch that wait for their prefill; the next begin as these get it."""

MakeSink = Callable[[], Callable[[bytes], None]]
"""Makes, for each attempt, what takes decode's stream."""


@dataclass(slots=True)
class Exchange:
    path: str
    headers: bytes
    """Those that both legs get."""
    request_id: str
    asked: Asked
    downstream: Downstream
    pairs: dict[int, Pair]
    """By unit index: the attempt under way."""
    plan: Plan
    prompts: list[ReadPrompt]
    """By prompt index."""
    session: str
    priority: int
    """Larger is more urgent."""
    window: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_AHEAD))
    ending: bool = False
    """The first of its units failed, or its client left: none is sent any more."""
    ahead: set[int] = field(default_factory=set)
    """By unit index: who has a place in ``window``."""

    async def go_ahead(self, index: int) -> None:
        await self.window.acquire()
        self.ahead.add(index)

    def prefilled(self, index: int) -> None:
        """The unit is past prefill, or over; its place is another's. Does nothing twice."""
        if index in self.ahead:
            self.ahead.discard(index)
            self.window.release()


@dataclass(slots=True, eq=False)
class UnitRun:
    """One unit, over all attempts at it."""

    exchange: Exchange
    unit: Unit
    make_sink: MakeSink | None
    """``None``: the answer is kept whole."""
    attempts: int = 0
    exclude: tuple[str, ...] = ()
    """Engines that failed it."""
    broken_off: set[str] = field(default_factory=set)
    """Those of them that went away under it."""
    suspects: list[LegFailure] = field(default_factory=list)
    """Answers of 5xx that may be the engine's fault, or the request's."""

    @property
    def prompt(self) -> ReadPrompt:
        return self.exchange.prompts[self.unit.prompt_index]

    @property
    def opened(self) -> bool:
        """Something of its answer is there, and may have been passed on."""
        pair = self.exchange.pairs.get(self.unit.index)
        return pair is not None and pair.opened


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt(Announced):
    """One attempt: it has a rid of its own, and both legs get that."""

    run: UnitRun
    announced_s: float = 0.0
    pair: Pair | None = None
    """Its legs, once they were sent."""
    prefill_open: bool = False
    """They were, and prefill has not answered."""
    trace: AttemptTrace | None = None

    @property
    def placement(self) -> Placement | None:
        """Where its legs went."""
        return self.pair.request.placement if self.pair is not None else None
