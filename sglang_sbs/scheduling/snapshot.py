"""The scheduler's state as plain data, for metrics and dashboards."""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import TYPE_CHECKING, get_args

import msgspec

from sglang_sbs.scheduling.decode.instance import DecodeInstance
from sglang_sbs.scheduling.decode.rules import UNLIMITED
from sglang_sbs.scheduling.policies.immediate import Worker, workers_of
from sglang_sbs.scheduling.queue.priority import CLASSES, class_of
from sglang_sbs.scheduling.received.load_source import Source

if TYPE_CHECKING:
    from sglang_sbs.scheduling.scheduler import Scheduler


class PrefillRankState(msgspec.Struct, frozen=True):
    """State of one prefill DP rank, in tokens: C_avail, U_flight (``flight_tokens``) and R_queued
    (``queued_tokens``) of Algorithm 2."""

    c_avail: int
    flight_tokens: int
    queued_tokens: int
    outstanding_requests: int
    age_s: float | None
    """Seconds since the rank's last EndForward message; None: there was none."""


class PrefillState(msgspec.Struct, frozen=True):
    instance: str
    up: bool
    tier: str
    ready: bool
    predicted_free_in_s: float
    forward_fixed_s: float
    prediction_error_s: float
    gap_s: float
    watchdog_fires: int
    passes: int
    ranks: list[PrefillRankState]
    chunk_tokens: int = 0
    """C_chunk per DP rank."""
    barrier: bool = True
    """All DP ranks run each pass together. False: each its own, and ``passes`` counts them all."""
    drained: bool = False
    """The instance works but takes no new requests."""
    stalled: bool = False
    """The instance has requests that no pass takes, so no more are sent there."""
    full_pass_s: float = 0.0
    """Predicted time of a pass with full chunks on all ranks."""


class DecodeRankState(msgspec.Struct, frozen=True):
    """State of one decode DP rank: ⟨B_i, K_i⟩ (``running``, ``kv_tokens``) with this router's
    dispatches included."""

    running: int
    kv_tokens: int
    flight_requests: int
    age_s: float | None
    source: str = "none"
    """Source of ``running`` and ``kv_tokens`` (:mod:`.load_source`)."""


class DecodeState(msgspec.Struct, frozen=True):
    instance: str
    up: bool
    ranks: list[DecodeRankState]
    kv_capacity_tokens: int = 0
    """Limit on KV tokens per DP rank; 0: unknown."""
    drained: bool = False
    """The instance works but takes no new requests."""
    max_running: int = 0
    """Limit on running requests per DP rank; 0: unknown."""


class Snapshot(msgspec.Struct, frozen=True):
    """The scheduler's state at one moment (:func:`snapshot_of`)."""

    policy: str
    trigger: str
    queue_requests: int
    queue_tokens: int
    in_flight_requests: int
    """Number of requests dispatched and not ended."""
    oldest_wait_s: float
    interval_s: float
    mean_forward_s: float
    latency_s: float
    """L_net: the dispatch latency."""
    lead_s: float | None
    throttled: bool
    batches: int
    prefill: list[PrefillState]
    decode: list[DecodeState]
    prefix_blocks: int = 0
    """Number of entries in the prefix index."""
    queue_classes: dict[str, int] = {}
    """Number of waiting requests by class of priority (``low``, ``normal``, ``high``)."""
    holding: bool = True
    """Whether requests are held. False for immediate policies, and while batches do not arrive
    whole (``hold_guard``)."""
    queue_tenants: int = 0
    """Number of tenants with waiting requests; 0 if no request names one."""


def snapshot_of(scheduler: Scheduler, now_s: float) -> Snapshot:
    interval, queue = scheduler.interval, scheduler.queue
    first = next(iter(queue), None)
    waiting = Counter(class_of(request.priority) for request in queue.first(len(queue)))
    return Snapshot(
        policy=scheduler.config.policy,
        trigger=scheduler.config.trigger if scheduler.config.policy == "sbs" else "immediate",
        queue_requests=len(queue),
        queue_tokens=queue.tokens,
        in_flight_requests=scheduler.in_flight_requests,
        oldest_wait_s=now_s - first.arrived_s if first else 0.0,
        interval_s=interval.interval_s,
        mean_forward_s=interval.mean_forward_s,
        latency_s=interval.latency_s,
        lead_s=getattr(scheduler.policy, "lead_s", None),
        throttled=scheduler.throttled,
        batches=scheduler.gangs.count,
        prefill=[
            _prefill_state(instances, scheduler, now_s)
            for instances in workers_of([*scheduler.prefill.values()])
        ],
        decode=[
            _decode_state(instance, scheduler, now_s) for instance in scheduler.decode.values()
        ],
        prefix_blocks=len(scheduler.prefix.prefill) + len(scheduler.prefix.decode),
        queue_classes={name: waiting[name] for name in CLASSES},
        holding=getattr(scheduler.policy, "holding", scheduler.policy.holds),
        queue_tenants=queue.turns.tenants,
    )


def _prefill_state(instances: Worker, scheduler: Scheduler, now_s: float) -> PrefillState:
    """Return the state of one instance. Without a barrier it combines all ranks of the worker:
    means of learned values, sums of counts, and earliest times."""
    latency_s = scheduler.interval.latency_s
    return PrefillState(
        instance=instances[0].worker,
        up=scheduler.is_up(instances[0].id),
        tier=min([i.tier for i in instances], key=get_args(Source).index),
        ready=any(i.ready for i in instances),
        predicted_free_in_s=max(0.0, min(i.free_at_s(now_s, latency_s) for i in instances) - now_s),
        forward_fixed_s=fmean(i.model.formula.fixed_s for i in instances),
        prediction_error_s=fmean(i.model.error_s for i in instances),
        gap_s=fmean(i.pause.mean_s for i in instances),
        watchdog_fires=sum(i.watchdog.fires for i in instances),
        passes=sum(i.passes.ended for i in instances),
        ranks=[
            PrefillRankState(
                c_avail=c_avail,
                flight_tokens=rank.flight.total,
                queued_tokens=rank.queued_tokens,
                outstanding_requests=len(rank.requests),
                age_s=rank.cursor.age_s(now_s),
            )
            for i in instances
            for rank, c_avail in zip(i.ranks, i.ranks.c_avail(), strict=True)
        ],
        chunk_tokens=instances[0].chunk_tokens,
        barrier=instances[0].id == instances[0].worker,
        drained=scheduler.is_drained(instances[0].id),
        stalled=any(i.ranks.takes_nothing for i in instances),
        full_pass_s=fmean(i.model.formula.balanced_s(i.chunk_tokens) for i in instances),
    )


def _decode_state(instance: DecodeInstance, scheduler: Scheduler, now_s: float) -> DecodeState:
    ranks = [
        DecodeRankState(
            load.running,
            load.kv_tokens,
            len(rank.flight),
            rank.cursor.age_s(now_s),
            rank.source.name,
        )
        for rank, load in zip(instance.ranks, instance.loads(), strict=True)
    ]
    limits = instance.kv_capacity_tokens, instance.max_running
    capacity_tokens, max_running = (0 if most == UNLIMITED else most for most in limits)
    up, drained = scheduler.is_up(instance.id), scheduler.is_drained(instance.id)
    return DecodeState(instance.id, up, ranks, capacity_tokens, drained, max_running)
