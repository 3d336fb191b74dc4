"""The workload ``agentic``: agents in a closed loop, whose contexts grow, pause and branch.

It is the simulator's (:mod:`sglang_sbs.simulator.workloads.agentic`), scaled: lengths to the chunk,
pauses to the pass. Load is a number of agents: who is answered sooner asks sooner. Agents are met
in the middle of their tasks and have nothing cached; their first turns are a warm-up.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sglang_sbs.simulator.cluster import arrival
from sglang_sbs.simulator.workloads.agentic import PAGE_TOKENS, AgentLoop

AGENTIC = "agentic"
TOKENS_PER_CHUNK = 32 * 1024
"""So many tokens of an agent stand for one chunk: its prompts have up to eight."""
AGENTS_PER_RANK = 8
"""Of prefill, at load 1."""
_MOST_OUTPUT_TOKENS = 32
_CYCLE_PASSES, _WARM_UP_PASSES = 8.0, 40.0
"""From a turn to the next, and what first turns take: for the remaining time only."""


class Turn(NamedTuple):
    """One request, its lengths in tokens of the small cluster."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Names of what it begins with, ``block_tokens`` each."""
    block_tokens: float
    large: arrival.Arrival


class Agents:
    """One run: who sends first, and what follows an answer."""

    def __init__(self, agents: int, seed: int, chunk_tokens: int, stretch: float) -> None:
        """``stretch``: by which times are longer than the loop's."""
        self._loop = AgentLoop(agents, math.inf, seed)
        self._scale = chunk_tokens / TOKENS_PER_CHUNK
        self._stretch = stretch
        self._known: set[int] = set()
        self.first = [self._turn(arrived) for arrived in self._loop.first]
        """In time order."""

    def after(self, turn: Turn, now_s: float) -> list[Turn]:
        """It was answered, or will never be: what its agent sends next."""
        return [
            self._turn(arrived) for arrived in self._loop.after(turn.large, now_s / self._stretch)
        ]

    def new_tokens(self, turn: Turn) -> int:
        """What no turn before it had; asked when it is sent."""
        new = sum(block not in self._known for block in turn.blocks)
        self._known.update(turn.blocks)
        rest = turn.prompt_tokens - len(turn.blocks) * turn.block_tokens
        return max(1, round(new * turn.block_tokens + rest))

    def _turn(self, arrived: arrival.Arrival) -> Turn:
        return Turn(
            arrived.at_s * self._stretch,
            max(1, round(arrived.prompt_tokens * self._scale)),
            min(_MOST_OUTPUT_TOKENS, max(2, round(arrived.output_tokens * self._scale))),
            arrived.blocks,
            PAGE_TOKENS * self._scale,
            arrived,
        )


def agents_at(load: float, ranks: int) -> int:
    """How many agents a load of so many prefill ranks is."""
    return max(1, round(load * AGENTS_PER_RANK * ranks))


def expected_s(agents: int, turns: int, pass_s: float) -> float:
    return pass_s * (_WARM_UP_PASSES + _CYCLE_PASSES * turns / agents)
