"""How much of what waits the next pass of an instance should take, and how much the others. Must
not know DP ranks, or when a batch leaves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sglang_sbs.scheduling.policies.tuning import ARRIVING_SHARE
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.request import Request


def fair_share(
    instance: PrefillInstance,
    others: Iterable[tuple[float, PrefillInstance]],
    waiting_tokens: int,
    start_s: float,
    now_s: float,
    token_rate: float,
) -> float:
    """Prompt tokens this pass should take of what waits; the rest is for later passes.

    Minimises the sum of completion times over the passes that start next. With w_i tokens for
    instance i, which holds h_i already and starts a pass delay_i later, a token completes after
    delay_i + fixed + slope * (h_i + w_i), so at the optimum every instance that takes part has
    the same marginal cost, the water level:

        delay_i + pass_i(h_i) + slope_i * h_i + 2 * slope_i * w_i = level

    where pass_i(h_i) is what its next pass takes anyway: the next chunk of a long prompt may
    make that long though it holds few tokens.

    Instances join in the order of their delay while that keeps the level above their cost of an
    empty pass. By the time the last of them starts, more will have arrived.

    Args:
        instance: the one a batch is formed for.
        others: all the rest, and how much later each starts, the soonest first. Not all are asked
            for.
        waiting_tokens: uncached tokens that wait for any of them.
        start_s: when the pass starts that a batch sent now could be in.
        now_s: the time.
        token_rate: tokens that arrive per second.
    """
    per_s, pass_s, held_s = instance.marginal or _marginal(instance)
    base_s = pass_s + held_s
    sum_per_s = per_s
    sum_tokens = per_s * base_s
    level_s = (waiting_tokens + sum_tokens) / sum_per_s
    coming_rate = ARRIVING_SHARE * token_rate
    for delay_s, other in others:
        other_per_s, pass_s, held_s = other.marginal or _marginal(other)
        other_base_s = delay_s + pass_s + held_s
        if level_s <= other_base_s:
            break
        sum_per_s += other_per_s
        sum_tokens += other_per_s * other_base_s
        arriving = coming_rate * (start_s + delay_s - now_s)
        level_s = (waiting_tokens + arriving + sum_tokens) / sum_per_s
    return (level_s - base_s) * per_s


def prefix(requests: Sequence[Request], tokens: float) -> int:
    """How many of the first requests come closest to this many tokens."""
    taken = 0.0
    for count, request in enumerate(requests):
        if taken + 0.5 * request.uncached_tokens > tokens:
            return count
        taken += request.uncached_tokens
    return len(requests)


def tokens_per_s(instance: PrefillInstance) -> float:
    """Without the fixed time of its passes."""
    return instance.dp_size / instance.model.slope_s_per_token()


def _marginal(instance: PrefillInstance) -> tuple[float, float, float]:
    """Tokens per second of water level, what its next pass takes anyway, and what it holds."""
    slope = 1 / tokens_per_s(instance)
    held = instance.backlog_tokens
    pass_s = instance.next_pass_s() if held else instance.model.fixed_s
    instance.marginal = 1 / (2 * slope), pass_s, slope * held
    return instance.marginal
