"""Settings of the scheduler, with defaults and checks."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from sglang_sbs.scheduling.policy_registry import Policy, PolicyError, require

Trigger = Literal["adaptive", "paper"]
DecodeRule = Literal["iqr", "potential"]

TRIGGERS: tuple[str, ...] = get_args(Trigger)
DECODE_RULES: tuple[str, ...] = get_args(DecodeRule)
LEAST_WEIGHT, MOST_WEIGHT = 0.01, 100.0
"""Limits of a tenant's weight (``tenant_weights``)."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a :class:`.Scheduler`. Times are in seconds, sizes in tokens or requests."""

    policy: Policy = "sbs"
    trigger: Trigger = "adaptive"
    decode_rule: DecodeRule = "potential"

    t_default_s: float = 0.3
    """T_default of Algorithm 1: forward time assumed before the first EndForward."""
    window: int = 100
    """W_size of Algorithm 1: number of forward times in the moving average."""
    n_limit: int = 100
    """N_limit of Algorithm 2: cycles that a request may stay unallocated before flow control
    refuses new ones. A cycle is one batch per prefill instance."""
    iqr_k: float = 1.5
    """k of Algorithm 3: decode ranks with more KV tokens than Q3 + k (Q3 - Q1) are masked."""

    default_chunk_tokens: int = 8192
    """C_chunk per rank if the engine does not report it."""
    max_queue_requests: int = 10_000
    max_queue_tokens: int = 0
    """Limit on prompt tokens waiting in the scheduler; 0: unlimited."""
    default_timeout_s: float = 60.0
    """Longest wait in the scheduler of a request without a deadline."""
    outage_hold_s: float = 5.0
    """How long requests wait for an instance after a role lost its last one; 0: refuse at once."""
    default_output_tokens: int = 256
    """Expected output length in tokens, until the first request completes."""

    initial_latency_s: float = 0.02
    """L_net (dispatch until the rank can run the request) before the first measurement."""
    max_hold_s: float = 2.0
    """Adaptive trigger: longest hold of a request while an instance could take it, but at least
    ``Tuning.most_hold_passes`` mean forward times."""
    priority_step_s: float = 5.0
    """Adaptive trigger: least time by which a level of priority moves a request in the queue."""
    refuse_missed_slo: bool = False
    """Refuse a request on arrival if the cluster can no longer meet its TTFT SLO."""
    tenant_weights: dict[str, float] = {}
    """Weight of each tenant's share of the passes; 1 for tenants not listed."""
    prefix_index_blocks: int = 2_000_000
    """Cache-aware mode: limit on KV blocks in the prefix index, about 200 bytes each."""
    seed: int = 0
    """Seed for policies that draw at random."""

    def __post_init__(self) -> None:
        try:
            require(self.policy)
        except PolicyError as error:
            raise ValueError(f"policy={error}") from None
        choices = {"trigger": TRIGGERS, "decode_rule": DECODE_RULES}
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}")
        for name in (
            "t_default_s",
            "window",
            "default_chunk_tokens",
            "max_queue_requests",
            "default_timeout_s",
            "max_hold_s",
            "priority_step_s",
            "prefix_index_blocks",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be greater than 0, not {getattr(self, name)}")
        for tenant, weight in self.tenant_weights.items():
            if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
                raise ValueError(
                    f"tenant_weights: that of {tenant!r} must be between {LEAST_WEIGHT:g} and "
                    f"{MOST_WEIGHT:g}, not {weight}"
                )
        for name in ("n_limit", "iqr_k", "max_queue_tokens", "initial_latency_s", "outage_hold_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
