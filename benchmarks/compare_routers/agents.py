"""The workload ``agentic``: contexts that grow turn by turn, and sub-agents that share them.

It is the simulator's (:mod:`sglang_sbs.simulator.workloads.agentic`), scaled to the chunk, from
first turns on. The runs of ``compare-routers`` are open loop, so the loop is played beforehand with
answers that all take as long: every contender gets the same turns at the same times, also one that
is not done with the turn before. A closed loop is in ``sglang-sbs simulate agentic``.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.workloads.agentic import PAGE_TOKENS, AgentLoop

TOKENS_PER_CHUNK = 32 * 1024
"""So many tokens of an agent stand for one chunk: its prompts have up to eight."""
TURNS_PER_AGENT = 16
_ANSWER_S = 20.0
_MOST_OUTPUT_TOKENS = 32


class Turn(NamedTuple):
    """One request, its lengths in tokens of the small cluster."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Names of what it begins with, ``block_tokens`` each."""
    block_tokens: float
    new_tokens: int
    """What no turn before it had."""


def turns(seed: int, requests: int, chunk_tokens: int) -> list[Turn]:
    """The first so many requests of some agents, in time order."""
    agents = max(1, round(requests / TURNS_PER_AGENT))
    loop = AgentLoop(agents, float("inf"), seed, under_way=False)
    waiting = [(arrival.at_s, number, arrival) for number, arrival in enumerate(loop.first)]
    heapq.heapify(waiting)
    scale = chunk_tokens / TOKENS_PER_CHUNK
    known: set[int] = set()
    out: list[Turn] = []
    number = len(waiting)
    while len(out) < requests:
        at_s, _, arrival = heapq.heappop(waiting)
        out.append(_scaled(arrival, at_s, scale, known))
        known.update(arrival.blocks)
        for following in loop.after(arrival, at_s + _ANSWER_S):
            number += 1
            heapq.heappush(waiting, (following.at_s, number, following))
    return out


def _scaled(arrival: Arrival, at_s: float, scale: float, known: set[int]) -> Turn:
    new = sum(block not in known for block in arrival.blocks)
    rest = arrival.prompt_tokens - len(arrival.blocks) * PAGE_TOKENS
    return Turn(
        at_s,
        max(1, round(arrival.prompt_tokens * scale)),
        min(_MOST_OUTPUT_TOKENS, max(2, round(arrival.output_tokens * scale))),
        arrival.blocks,
        PAGE_TOKENS * scale,
        max(1, round((new * PAGE_TOKENS + rest) * scale)),
    )
