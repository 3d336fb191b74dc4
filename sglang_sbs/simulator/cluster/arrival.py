"""A request of a workload for the simulated cluster, and the clients of a closed loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Arrival(NamedTuple):
    """One request: arrival time in seconds, prompt tokens and output tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Names of the prompt's full blocks in order: equal names mean equal tokens up to that block.
    Empty: it shares nothing."""
    session: str = ""
    """Name of the conversation to which this request belongs as a turn; empty: none."""
    priority: int = 0
    tenant: str = ""
    answer_blocks: tuple[int, ...] = ()
    """Names of the blocks filled by its answer, after those of the prompt."""
    thread: int = -1
    """The client in a closed loop (:class:`ClosedLoop`)."""


class ClosedLoop(Protocol):
    """Clients that wait for an answer before they send again."""

    first: list[Arrival]
    """Initial requests in time order; those that follow are not included."""
    history: list[int]
    """Names of the blocks that are in storage, if there is storage, before the first request."""

    def after(self, arrival: Arrival, now_s: float) -> Sequence[Arrival]:
        """Return the requests that follow the end of this one, no earlier than ``now_s``."""
