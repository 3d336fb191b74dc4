"""A synthetic workload of conversations. A turn's prompt consists of the system prompt, all earlier
turns with their answers, and a new message. It is a prefix of the next turn's prompt."""

from __future__ import annotations

import random

from sglang_sbs.simulator.cluster.arrival import Arrival

PAGE_TOKENS = 64
"""Tokens per KV page: SGLang's page size for DeepSeek-V3 with FlashMLA."""
_MEAN_TURNS = 5.0
_MEAN_THINK_S = 10.0
_MEAN_OUTPUT_TOKENS = 400
_SYSTEM_PROMPTS = 20
_SYSTEM_TOKENS = (200, 4000)
_MESSAGE_TOKENS = (5.5, 1.2)
"""(mu, sigma) of the lognormal tokens of a message: median 245, mean 500."""
LONGEST_TOKENS = 65_536
"""Limit on a prompt's tokens: a conversation ends before its prompt would exceed this."""
_NAMES_PER_CONVERSATION = 1 << 20


def conversations(qps: float, duration_s: float, seed: int) -> list[Arrival]:
    """Return the turns of conversations that begin at random from time 0 on. Their rate comes near
    ``qps`` within a minute.

    The k-th of 20 system prompts is used in proportion to 1 / k. The number of turns is geometric
    with a mean of 5, and the pause between two is exponential with a mean of 10 s at every load."""
    rng = random.Random(seed)
    lengths = random.Random("system prompts")
    system = [lengths.randint(*_SYSTEM_TOKENS) for _ in range(_SYSTEM_PROMPTS)]
    popularity = [1 / (k + 1) for k in range(_SYSTEM_PROMPTS)]
    turns: list[Arrival] = []
    number, begins_s = _SYSTEM_PROMPTS, 0.0
    while (begins_s := begins_s + rng.expovariate(qps / _MEAN_TURNS)) < duration_s:
        (which,) = rng.choices(range(_SYSTEM_PROMPTS), popularity)
        at_s, tokens = begins_s, system[which]
        shared = tokens // PAGE_TOKENS
        while True:
            tokens += max(1, round(rng.lognormvariate(*_MESSAGE_TOKENS)))
            if tokens > LONGEST_TOKENS:
                break
            output_tokens = 1 + int(rng.expovariate(1 / _MEAN_OUTPUT_TOKENS))
            if at_s < duration_s:
                blocks = tuple(
                    (which if page < shared else number) * _NAMES_PER_CONVERSATION + page
                    for page in range((tokens + output_tokens) // PAGE_TOKENS)
                )
                full = tokens // PAGE_TOKENS
                turns.append(
                    Arrival(
                        at_s,
                        tokens,
                        output_tokens,
                        blocks[:full],
                        str(number),
                        answer_blocks=blocks[full:],
                    )
                )
            if rng.random() < 1 / _MEAN_TURNS:
                break
            tokens += output_tokens
            at_s += rng.expovariate(1 / _MEAN_THINK_S)
        number += 1
    return sorted(turns)
