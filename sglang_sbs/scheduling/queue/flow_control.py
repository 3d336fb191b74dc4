"""Who is refused instead of being queued, and what it is told."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.scheduling.decode.instance import DecodeInstance
from sglang_sbs.scheduling.events import RefuseCause, RequestArrived
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.queue.request import RequestQueue
from sglang_sbs.scheduling.queue.slo_forecast import first_token_in_s
from sglang_sbs.scheduling.request import Request

Refusal = tuple[RefuseCause, str]
"""Why, for programs and for people."""


def refusal_of(
    event: RequestArrived,
    config: SchedulerConfig,
    queue: RequestQueue,
    prefill: Sequence[PrefillInstance],
    decode: Sequence[DecodeInstance],
) -> Refusal | None:
    """Why a new request is refused; None if it may wait. ``prefill``, ``decode``: that are up."""
    missing = missing_role(prefill, decode)
    if missing is not None:
        return missing
    largest_tokens = max(one.kv_capacity_tokens for one in decode)
    if event.prompt_tokens > largest_tokens:
        return "too_long", (
            "the prompt is longer than a decode DP rank can hold (in tokens: "
            f"{event.prompt_tokens}, at most {largest_tokens})"
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


def slo_refusal_of(
    request: Request,
    queue: RequestQueue,
    prefill: Sequence[PrefillInstance],
    now_s: float,
    latency_s: float,
) -> Refusal | None:
    """Why a request that is not queued yet is refused if its SLO counts; None if it has none or may
    meet it."""
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


def missing_role(
    prefill: Sequence[PrefillInstance], decode: Sequence[DecodeInstance]
) -> Refusal | None:
    """Why no request at all can be placed."""
    if not prefill:
        return "no_prefill", "no prefill instance is up"
    if not decode:
        return "no_decode", "no decode instance is up"
    return None


def retry_after_s(queue: RequestQueue, prefill: Sequence[PrefillInstance]) -> float:
    """Time until the prompt tokens that wait now are computed, at full passes; at least 1 s."""
    mean_tokens = queue.tokens / max(1, len(queue)) or math.inf
    rate = sum(tokens / pass_s for tokens, pass_s in (i.full_pass(mean_tokens) for i in prefill))
    return max(1.0, queue.tokens / rate) if rate else 5.0
