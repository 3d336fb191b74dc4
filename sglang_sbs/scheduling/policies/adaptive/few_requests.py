"""Decides how many waiting requests leave now, and how many are left for the instance that starts
next. Must not know the DP ranks of a batch, or when it leaves.

:func:`fair_share` treats tokens as freely divisible. That is wrong with one or two requests per DP
rank: a pass lasts as long as its heaviest rank, so another short request may cost nothing, and a
long one as much as all others. In that case :func:`best_cut` tries every split of the requests
between two passes, and returns the one with the smallest sum of completion times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

from sglang_sbs.scheduling.policies.adaptive.lineup import Begins, Marginals
from sglang_sbs.scheduling.policies.offered_load import OfferedLoad
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.completion import attention_pairs
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.request import Request, uncached_tokens_of


class WaitingWork(NamedTuple):
    """The waiting requests at one moment (``tokens``: uncached), and the passes they wait for."""

    now_s: float
    tokens: int
    begins: Begins
    offered: OfferedLoad
    marginals: Marginals
    whole: float = 1.0
    """Confidence that batches start whole, 0 to 1. A request that misses its pass ends up in one
    that was not considered."""


def fair_share(
    instance: PrefillInstance,
    others: Iterable[tuple[float, PrefillInstance]],
    waiting_tokens: int,
    start_s: float,
    waiting: WaitingWork,
) -> float:
    """Return how many of the waiting tokens the next pass of ``instance`` should take; the rest is
    for other instances.

    The share minimises the sum of completion times over the passes that start next. Suppose
    instance i holds h_i tokens already, starts a pass delay_i later and gets w_i more. A token then
    completes after delay_i + fixed + slope * (h_i + w_i). At the optimum every instance that takes
    part has the same marginal cost, the water level:

        delay_i + pass_i(h_i) + slope_i * h_i + 2 * slope_i * w_i = level

    Here pass_i(h_i) is the length of its next pass without more tokens. The next chunk of a long
    prompt may make that pass long although it holds few tokens.

    Instances take part in the order of their delay, as long as the level is above the cost of their
    next pass. Tokens expected to arrive before the last of them starts count as well.

    Args:
        instance: the instance a batch is formed for.
        others: how many seconds later each other instance starts, and the instance; soonest first.
        waiting_tokens: uncached tokens that wait for any of them.
        start_s: when the pass starts that a batch sent now could be in.
    """
    now_s, marginals = waiting.now_s, waiting.marginals
    per_s, pass_s, held_s = marginals[instance]
    base_s = pass_s + held_s
    sum_per_s = per_s
    sum_tokens = per_s * base_s
    level_s = (waiting_tokens + sum_tokens) / sum_per_s
    coming_rate = TUNING.arriving_share * waiting.offered.token_rate
    for delay_s, other in others:
        other_per_s, pass_s, held_s = marginals[other]
        other_base_s = delay_s + pass_s + held_s
        if level_s <= other_base_s:
            break
        sum_per_s += other_per_s
        sum_tokens += other_per_s * other_base_s
        arriving = coming_rate * (start_s + delay_s - now_s)
        level_s = (waiting_tokens + arriving + sum_tokens) / sum_per_s
    return (level_s - base_s) * per_s


def prefix(requests: Sequence[Request], tokens: float) -> int:
    """Return how many of the first requests have closest to ``tokens`` uncached tokens."""
    taken = 0.0
    for count, request in enumerate(requests):
        if taken + request.uncached_tokens / 2 > tokens:
            return count
        taken += request.uncached_tokens
    return len(requests)


def cut_of(instance: PrefillInstance, head: Sequence[Request], waiting: WaitingWork) -> int:
    """Return how many of the requests in ``head`` leave now for this instance. ``head``: the
    requests that fit into its pass, in the order of the queue."""
    now_s, tokens, begins, offered, _, whole = waiting
    start_s = begins.begin_s(instance)
    share = fair_share(instance, begins.later(start_s, [instance]), tokens, start_s, waiting)
    cut = prefix(head, share)
    least = min(len(head), int(instance.idle and share > 0))
    cut = max(cut, least)
    cycle = offered.request_rate * offered.pass_s / len(begins.instances)
    few = cycle <= TUNING.most_divided * whole and len(head) <= TUNING.most_divided
    alone = instance.dp_size == 1  # no rank waits for another
    if alone or not few or any(request.uncached_tokens > instance.chunk_tokens for request in head):
        return cut
    later = begins.first(besides=instance)
    later_s = begins.begin_s(later)
    # Only the requests of these two instances are divided between them.
    left_tokens = tokens - uncached_tokens_of(head[:cut])
    rest = begins.later(later_s, [instance, later])
    share = fair_share(later, rest, left_tokens, later_s, waiting)
    head = head[: cut + prefix(head[cut:], share)]
    later_s = max(start_s, later_s)
    coming = round(TUNING.arriving_share * offered.request_rate * (later_s - now_s))
    return best_cut(
        head,
        NextPasses(
            instance, later, later_s - start_s, [round(offered.mean_tokens)] * coming, cycle
        ),
        least=least,
        usual=min(len(head), cut),
        now_s=now_s,
        pass_s=offered.pass_s,
    )


class NextPasses(NamedTuple):
    """The next passes of two instances, between which :func:`best_cut` splits requests."""

    first: PrefillInstance
    second: PrefillInstance
    delay_s: float
    """Seconds between the starts of the first and the second pass."""
    coming_tokens: Sequence[int]
    """Assumed tokens of each request that is expected before the second pass starts."""
    cycle: float
    """Requests that arrive per steady-state pass time, divided by the number of instances."""


def best_cut(
    requests: Sequence[Request],
    turns: NextPasses,
    *,
    least: int,
    usual: int,
    now_s: float,
    pass_s: float,
) -> int:
    """Return how many requests to put into the first of two passes for the smallest weighted sum of
    completion times.

    A request that has waited for the length of a usual pass weighs twice as much as a new one. A
    pass also delays the requests that arrive while it runs and start in the instance's next one.

    Args:
        requests: in the order of the queue.
        least: the smallest number that is tried.
        usual: the number to return unless another one is clearly better (``Tuning.worth``).
        pass_s: length of a usual pass, in seconds.
    """
    tokens = [request.uncached_tokens for request in requests]
    weights = [1 + (now_s - request.arrived_s) / pass_s for request in requests]
    coming = len(turns.coming_tokens)
    taken, left = sum(weights[:least]), sum(weights[least:])
    costs: dict[int, float] = {}
    for cut in range(least, len(tokens) + 1):
        now, later = sorted(tokens[:cut], reverse=True), sorted(tokens[cut:], reverse=True)
        first_s = _pass_s(turns.first, now) if now else 0.0
        second_s = _pass_s(turns.second, [*later, *turns.coming_tokens])
        costs[cut] = (
            (taken + turns.cycle) * first_s
            + left * (turns.delay_s + second_s)
            + (coming + turns.cycle) * second_s
        )
        if cut < len(tokens):
            taken += weights[cut]
            left -= weights[cut]
    best = max(costs, key=lambda cut: (-costs[cut], cut))
    return usual if costs[best] >= TUNING.worth * costs[usual] else best


def _pass_s(instance: PrefillInstance, tokens: Sequence[int]) -> float:
    """Return the predicted seconds of the instance's next pass with requests of these tokens, each
    put on the rank that is then emptiest."""
    ranks = [(rank.backlog_tokens, 0.0) for rank in instance.ranks]
    heapify(ranks)
    for request_tokens in tokens:
        held, pairs = ranks[0]
        heapreplace(ranks, (held + request_tokens, pairs + attention_pairs(request_tokens, 0)))
    return instance.model.formula.of_ranks_s(*zip(*ranks, strict=True))
