"""The loads: prompt lengths, output lengths, arrival times, by name.

One is no list of arrivals (:mod:`.agents`): there each turn waits for an answer.

Lengths are shares of the chunk, so a small cluster sees what a large one would. The offered load
is exact: arrival times are stretched until the prompt tokens of the run come at ``load`` times the
rate that full chunks on every rank would compute, whatever lengths the seed drew.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.compare_routers.agents import AGENTIC, Turn
from benchmarks.compare_routers.prompts import Prompts
from benchmarks.demo.load import Arrival
from sglang_sbs.simulator.workloads.arrivals import time_of_day

LONG_TAIL_CHUNKS = 8
_BURST_CV = 3.0
_MOST_OUTPUT_TOKENS = 64
OUTPUT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Request:
    """One request before it is given words: relative time and lengths."""

    at: float
    """Arrival time in any unit: only proportions count."""
    prompt_tokens: int
    output_tokens: int


def _poisson(rng: random.Random) -> float:
    return rng.expovariate(1.0)


def _bursts(rng: random.Random) -> float:
    """Gamma distributed pauses with a coefficient of variation of 3."""
    shape = _BURST_CV**-2
    return rng.gammavariate(shape, 1.0 / shape)


def _paper(rng: random.Random, chunk_tokens: int) -> tuple[int, int]:
    """0 to one chunk (the paper's 0-3K at chunk 3K), Beta(1, 2): a third of it on average."""
    return max(1, int(rng.betavariate(1, 2) * chunk_tokens)), OUTPUT_TOKENS


def _long_tail(rng: random.Random, chunk_tokens: int) -> tuple[int, int]:
    """Lognormal, median a fifth of a chunk, cut at eight chunks; outputs lognormal too."""
    prompt = min(LONG_TAIL_CHUNKS * chunk_tokens, chunk_tokens / 5 * rng.lognormvariate(0.0, 1.2))
    output = min(_MOST_OUTPUT_TOKENS, 8 * rng.lognormvariate(0.0, 0.8))
    return max(1, int(prompt)), max(2, int(output))


def _drawn(
    pause: Callable[[random.Random], float],
    lengths: Callable[[random.Random, int], tuple[int, int]],
) -> Callable[[int, int, int], list[Request]]:
    def draw(seed: int, requests: int, chunk_tokens: int) -> list[Request]:
        rng = random.Random(seed)
        at, out = 0.0, []
        for _ in range(requests):
            at += pause(rng)
            prompt, output = lengths(rng, chunk_tokens)
            out.append(Request(at, prompt, output))
        return out

    return draw


def _day(seed: int, requests: int, chunk_tokens: int) -> list[Request]:
    """Poisson arrivals whose rate rises and falls as a squared sine; lengths as ``paper``."""
    drawn = _drawn(_poisson, _paper)(seed, requests, chunk_tokens)
    return [
        dataclasses.replace(arrival, at=time_of_day(arrival.at / drawn[-1].at)) for arrival in drawn
    ]


WORKLOADS: dict[str, Callable[[int, int, int], list[Request]]] = {
    "paper": _drawn(_poisson, _paper),
    "long-tail": _drawn(_poisson, _long_tail),
    "bursty": _drawn(_bursts, _paper),
    "day": _day,
}
NAMES = (*WORKLOADS, AGENTIC)


def duration_s(requests: Sequence[Request], tokens_per_s: float) -> float:
    """How long a load of this many prompt tokens per second lasts."""
    return sum(request.prompt_tokens for request in requests) / tokens_per_s


def arrivals(
    name: str,
    *,
    seed: int,
    requests: int,
    tokens_per_s: float,
    chunk_tokens: int,
    prompts: Prompts,
    content: str,
) -> list[Arrival]:
    """The requests of a run in time order, the last at its end.

    ``content`` makes the words: runs on the same engines need different ones, or the prefix cache
    answers the second.
    """
    drawn = WORKLOADS[name](seed, requests, chunk_tokens)
    stretch = duration_s(drawn, tokens_per_s) / drawn[-1].at
    out = []
    for number, turn in enumerate(drawn):
        indices = prompts.draw(turn.prompt_tokens, f"{content}/{seed}/{number}")
        out.append(
            Arrival(
                turn.at * stretch,
                prompts.token_ids(indices),
                turn.output_tokens,
                prompts.text(indices),
            )
        )
    return out


class TurnWords:
    def __init__(self, prompts: Prompts, content: str) -> None:
        """``content``: as of :func:`arrivals`."""
        self._prompts, self._content = prompts, content
        self._drawn: _Drawn = {}

    def __call__(self, turn: Turn, number: int) -> Arrival:
        """The ``number``-th of a run."""
        indices = _words(turn, number, self._prompts, self._content, self._drawn)
        return Arrival(
            turn.at_s,
            self._prompts.token_ids(indices),
            turn.output_tokens,
            self._prompts.text(indices),
        )


_Drawn = dict[tuple[int, int], list[int]]
"""Words of blocks, by name and position: drawing those of a long prompt anew takes a while."""


def _words(turn: Turn, number: int, prompts: Prompts, seed: str, drawn: _Drawn) -> list[int]:
    indices: list[int] = []
    for position, block in enumerate(turn.blocks, start=1):
        if (block, position) not in drawn:
            length = round(position * turn.block_tokens) - len(indices)
            drawn[block, position] = prompts.draw(length, f"{seed}/block/{block}/{position}")
        indices += drawn[block, position]
    missing = turn.prompt_tokens - len(indices)
    if missing > 0:
        indices += prompts.draw(missing, f"{seed}/{number}")
    return indices[: turn.prompt_tokens]
