"""A request of a workload, as the simulated cluster takes it, and who sends it after an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Arrival(NamedTuple):
    """One request: arrival time in seconds, tokens in and out."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Names of the prompt's full blocks from the first on: equal names, equal tokens up to there.
    Empty: it shares nothing."""
    session: str = ""
    """The conversation it is a turn of."""
    priority: int = 0
    tenant: str = ""
    answer_blocks: tuple[int, ...] = ()
    """Names of the blocks that its answer fills, after those of the prompt."""
    thread: int = -1
    """Who sends it, in a closed loop (:class:`ClosedLoop`)."""


class ClosedLoop(Protocol):
    """Clients of whom each waits for an answer before it sends again."""

    first: list[Arrival]
    """In time order; those that follow are not in it."""
    history: list[int]
    """Blocks that are in storage, where there is any, before the first one comes."""

    def after(self, arrival: Arrival, now_s: float) -> Sequence[Arrival]:
        """Its answer has ended, or it was given up: what follows, no earlier than ``now_s``."""
