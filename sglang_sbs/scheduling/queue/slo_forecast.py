"""Forecasts when a request that arrives now would have its first token, for early refusal.

The instances work off what is ahead in full passes, in the order in which they are free; then come
the passes of the request itself. No other request is looked at one by one. KV transfer, the first
decode step and later, more urgent arrivals are left out: a request it refuses had no chance."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from sglang_sbs.scheduling.prefill.instance import PrefillInstance


def first_token_in_s(
    tokens: int,
    ahead_tokens: float,
    waiting_tokens: int,
    mean_tokens: float,
    instances: Sequence[PrefillInstance],
    now_s: float,
    latency_s: float,
    give_up_s: float = math.inf,
) -> float:
    """Seconds until the prompt of ``tokens`` (uncached) is computed.

    ``ahead_tokens``: of those that wait, what is served before it; ``waiting_tokens``: all that
    wait, which fill the pass it is in; ``mean_tokens``: of one of them. ``instances``: that are up;
    at least one. ``latency_s``: L_net. ``give_up_s``: the forecast may stop here; it then is a
    lower bound."""
    ahead = ahead_tokens + sum(one.backlog_tokens for one in instances)
    free = [
        (max(one.free_at_s(now_s, latency_s) - now_s, latency_s), index)
        for index, one in enumerate(instances)
    ]
    heapq.heapify(free)
    full = [one.full_pass(mean_tokens) for one in instances]
    while ahead >= full[free[0][1]][0] and free[0][0] <= give_up_s:
        start_s, index = free[0]
        tokens_of_pass, pass_s = full[index]
        heapq.heapreplace(free, (start_s + pass_s, index))
        ahead -= tokens_of_pass
    ranks = sum(one.dp_size for one in instances)
    others_tokens = waiting_tokens / ranks
    return min(
        start_s + _own_passes_s(instances[index], tokens, others_tokens) for start_s, index in free
    )


def _own_passes_s(instance: PrefillInstance, tokens: int, others_tokens: float) -> float:
    """``others_tokens``: of each other rank in the same pass."""
    chunk = instance.chunk_tokens
    others = [min(chunk, round(others_tokens))] * (instance.dp_size - 1)
    whole, rest = divmod(tokens, chunk)
    full_s = instance.model.predict_s([chunk, *others]) if whole else 0.0
    rest_s = instance.model.predict_s([rest, *others]) if rest else 0.0
    return whole * full_s + rest_s
