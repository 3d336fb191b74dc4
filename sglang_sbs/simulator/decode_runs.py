"""The decode experiment under each rule, as rows.

Owns the named decode policies. Must not know how rows are printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_sbs.scheduling import SchedulerConfig
from sglang_sbs.simulator.decode import STEP_COSTS, DecodeOutcome, DecodeSimulation, DecodeSpec
from sglang_sbs.simulator.sweep import NO_FLOW_CONTROL, Row

PERSISTENT_SKEW = 0.7
"""Rank weights from 0.3 to 1.7: gives the paper's baseline band of 40-130K."""

DECODE_POLICIES: dict[str, tuple[dict[str, Any], float]] = {
    "sbs_potential": ({"policy": "sbs", "decode_rule": "potential"}, 0.0),
    "sbs_iqr": ({"policy": "sbs", "decode_rule": "iqr"}, 0.0),
    "least_requests": ({"policy": "least_requests"}, 0.0),
    "round_robin": ({"policy": "round_robin"}, 0.0),
    "skewed": ({"policy": "round_robin"}, PERSISTENT_SKEW),
}
"""Scheduler settings and skew by name. ``skewed`` is placement with persistent rank weights."""


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """One run."""

    policy: str
    seed: int
    cost: str = "h100"
    steps: int = DecodeSpec().steps
    warm_up_steps: int = DecodeSpec().warm_up_steps
    config: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the :class:`SchedulerConfig`."""


def run_decode_outcome(job: DecodeJob) -> DecodeOutcome:
    """Simulate."""
    settings, skew = DECODE_POLICIES[job.policy]
    config = SchedulerConfig(**{**NO_FLOW_CONTROL, **settings, **job.config})
    spec = DecodeSpec(
        seed=job.seed,
        cost=STEP_COSTS[job.cost],
        steps=job.steps,
        warm_up_steps=job.warm_up_steps,
    )
    return DecodeSimulation(spec, config).run(skew)


def run_decode(job: DecodeJob) -> Row:
    """Simulate and summarise.

    The loop is closed (load 1.0 is its concurrency) and refuses nothing; what belongs to prefill is
    None.
    """
    outcome = run_decode_outcome(job)
    return {
        "scenario": "paper-decode",
        "policy": job.policy,
        "cost": job.cost,
        "load": 1.0,
        "qps": outcome.completed / outcome.time_s,
        "seed": job.seed,
        "ttft_mean_s": None,
        "ttft_p50_s": None,
        "ttft_p99_s": None,
        "chunk_utilization": None,
        "bubble_share": None,
        "completed": outcome.completed,
        "rejected": 0,
        **outcome.row(),
    }
