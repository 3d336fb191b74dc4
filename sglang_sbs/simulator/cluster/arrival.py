"""A request of a workload, as the simulated cluster takes it."""

from __future__ import annotations

from typing import NamedTuple


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
    thread: int = -1
    """Who sends it, in a closed loop (:class:`~.simulation.ClosedLoop`)."""
