"""Decides which requests are refused instead of queued, and words the refusals."""

from __future__ import annotations

import heapq
import math

from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.scheduling.events import InstanceRole, Refuse, RefuseCause, RequestArrived
from sglang_sbs.scheduling.prefill.completion import NextPass
from sglang_sbs.scheduling.prefill.instance import Instances, PrefillInstance
from sglang_sbs.scheduling.queue.request import RequestQueue
from sglang_sbs.scheduling.reasons import WaitReason
from sglang_sbs.scheduling.request import Request

Refusal = tuple[RefuseCause, str]
"""Why a request is refused: cause for programs, and message for people."""


def refusal_of(
    event: RequestArrived,
    config: SchedulerConfig,
    queue: RequestQueue,
    largest_tokens: int,
) -> Refusal | None:
    """Return the reason for refusing a new request; None: it may wait. ``largest_tokens``: KV
    capacity of the largest decode DP rank."""
    if event.prompt_tokens > largest_tokens:
        return "too_long", (
            f"prompt is too long: it has {event.prompt_tokens} tokens, and a decode DP rank holds "
            f"at most {largest_tokens}"
        )
    if len(queue) >= config.max_queue_requests:
        return "queue_full", f"requests waiting: {len(queue)} (the limit)"
    if config.max_queue_tokens and queue.tokens + event.prompt_tokens > config.max_queue_tokens:
        return "queue_full", (
            f"prompt tokens waiting: {queue.tokens} (the limit is {config.max_queue_tokens})"
        )
    if queue.over_limit:
        return "flow_control", (
            f"overload: a request has waited more than {config.n_limit} of the scheduler's cycles"
        )
    return None


_ROOM_IN_WORDS: dict[InstanceRole, str] = {
    "prefill": "no prefill instance could take it in time",
    "decode": "no decode rank has room for it (KV tokens or running requests)",
}


def limiting_role(request: Request | None) -> InstanceRole | None:
    """Return the role that a queued request waits for; None: no request, or the role is unknown."""
    if request is None or request.waits_for is None:
        return None
    decode = WaitReason.NO_DECODE_ROOM, WaitReason.NO_DECODE
    return "decode" if request.waits_for in decode else "prefill"


def slo_refusal_of(
    request: Request,
    queue: RequestQueue,
    prefill: Instances,
    now_s: float,
    latency_s: float,
) -> Refusal | None:
    """Return the reason for refusing a request that cannot meet its TTFT SLO; None: it may meet the
    SLO, or has none. ``latency_s``: L_net."""
    slo_s = request.ttft_slo_s
    if slo_s is None:
        return None
    ahead_tokens = queue.ahead_tokens(request)
    forecast_s = first_token_in_s(
        request.uncached_tokens,
        ahead_tokens,
        queue.tokens,
        (queue.tokens + request.uncached_tokens) / (len(queue) + 1),
        prefill,
        now_s,
        latency_s,
        slo_s,
    )
    if forecast_s <= slo_s:
        return None
    return "slo", (
        f"the first token would take longer than the {1e3 * slo_s:.0f} ms that were asked for: "
        f"prompt tokens ahead: {ahead_tokens:.0f}"
    )


def first_token_in_s(
    tokens: int,
    ahead_tokens: float,
    waiting_tokens: int,
    mean_tokens: float,
    instances: Instances,
    now_s: float,
    latency_s: float,
    give_up_s: float = math.inf,
) -> float:
    """Forecast the seconds until a request's prompt is computed, for early refusal.

    The instances compute the tokens ahead in full passes, in the order in which they are free. Then
    come the passes of the request itself. Other requests are counted only by their tokens. KV
    transfer, the first decode step and later, more urgent arrivals are left out, so a refused
    request had no chance.

    Args:
        tokens: uncached tokens of the request.
        ahead_tokens: tokens of waiting requests that are served before it.
        waiting_tokens: tokens of all waiting requests, which fill the pass that it is in.
        mean_tokens: mean tokens of a waiting request.
        instances: instances that are up; at least one.
        latency_s: L_net.
        give_up_s: the forecast may stop at this time; it is a lower bound then.
    """
    ahead = ahead_tokens + sum(instance.ranks.backlog_tokens for instance in instances)
    free = [
        (max(instance.free_at_s(now_s, latency_s) - now_s, latency_s), index)
        for index, instance in enumerate(instances)
    ]
    heapq.heapify(free)
    full = [instance.full_pass(mean_tokens) for instance in instances]
    while ahead >= full[free[0][1]][0] and free[0][0] <= give_up_s:
        start_s, index = free[0]
        tokens_of_pass, pass_s = full[index]
        heapq.heapreplace(free, (start_s + pass_s, index))
        ahead -= tokens_of_pass
    ranks = sum(instance.dp_size for instance in instances)
    others_tokens = round(waiting_tokens / ranks)
    return min(
        start_s + _own_passes_s(instances[index], tokens, others_tokens) for start_s, index in free
    )


def _own_passes_s(instance: PrefillInstance, tokens: int, others_tokens: int) -> float:
    """Return the seconds of the passes that compute the request itself. ``others_tokens``: tokens
    of each other rank in the same pass."""
    ahead_tokens = [0, *[others_tokens] * (instance.dp_size - 1)]
    formula, chunk = instance.model.formula, instance.chunk_tokens
    return NextPass(formula, chunk, ahead_tokens, page=instance.page).done_s(0, max(1, tokens))


def refuse(
    rid: str,
    why: Refusal,
    queue: RequestQueue,
    prefill: Instances,
    limit: InstanceRole | None = None,
) -> Refuse:
    """Build the command for a refusal. ``limit``: role without capacity, for the message."""
    cause, message = why
    if limit is not None:
        message += f"; the limit is {limit}: {_ROOM_IN_WORDS[limit]}"
    after_s = retry_after_s(queue, prefill)
    return Refuse(rid=rid, cause=cause, retry_after_s=after_s, message=message, limit=limit)


def retry_after_s(queue: RequestQueue, prefill: Instances) -> float:
    """Estimate the seconds until the waiting prompt tokens are computed in full passes: at least 1;
    5 without prefill instances."""
    mean_tokens = queue.tokens / max(1, len(queue)) or math.inf
    rate = sum(tokens / pass_s for tokens, pass_s in (i.full_pass(mean_tokens) for i in prefill))
    return max(1.0, queue.tokens / rate) if rate else 5.0
