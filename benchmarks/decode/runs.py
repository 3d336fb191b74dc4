"""The decode experiment under each rule, as rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.decode import simulation
from sglang_sbs.scheduling import SchedulerConfig
from sglang_sbs.simulator.experiments.sweep import NO_FLOW_CONTROL
from sglang_sbs.simulator.parallel import Row

SCENARIO = "paper-decode"
"""What rows call it."""
PERSISTENT_SKEW = 0.7
"""Rank weights from 0.3 to 1.7: gives the paper's baseline band of 40-130K."""

FORESIGHT_STEPS = 100
"""Of ``clairvoyant``. The CV of K was 6.7 % with 60, 6.3 % with 100 and 6.2 % with 150, the
throughput the same (seeds 101 to 104, and K weighing 8 in the potential)."""


@dataclass(frozen=True, slots=True)
class DecodePolicy:
    """Scheduler settings, and what replaces the scheduler's choice of a rank."""

    settings: Mapping[str, Any]
    skew: float = 0.0
    foresight_steps: int = 0


_OF_PREFILL = ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "chunk_utilization", "bubble_share")
DECODE_POLICIES: dict[str, DecodePolicy] = {
    "sbs_potential": DecodePolicy({"policy": "sbs", "decode_rule": "potential"}),
    "sbs_iqr": DecodePolicy({"policy": "sbs", "decode_rule": "iqr"}),
    "least_requests": DecodePolicy({"policy": "least_requests"}),
    "round_robin": DecodePolicy({"policy": "round_robin"}),
    "skewed": DecodePolicy({"policy": "round_robin"}, skew=PERSISTENT_SKEW),
    "clairvoyant": DecodePolicy({"policy": "round_robin"}, foresight_steps=FORESIGHT_STEPS),
}
"""``skewed`` is placement with persistent rank weights; ``clairvoyant``, which no router can be,
the potential with the knowledge of when every request will end."""


@dataclass(frozen=True, slots=True)
class DecodeJob:
    policy: str
    seed: int
    cost: str = "h100"
    steps: int = simulation.DecodeSpec().steps
    warm_up_steps: int = simulation.DecodeSpec().warm_up_steps
    ranks: int = simulation.DecodeSpec().ranks
    """``REQUESTS_PER_RANK`` requests each."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the :class:`SchedulerConfig`."""


def run_decode_outcome(job: DecodeJob) -> simulation.DecodeOutcome:
    policy = DECODE_POLICIES[job.policy]
    config = SchedulerConfig(**{**NO_FLOW_CONTROL, **policy.settings, **job.config})
    spec = simulation.DecodeSpec(
        seed=job.seed,
        cost=simulation.STEP_COSTS[job.cost],
        steps=job.steps,
        warm_up_steps=job.warm_up_steps,
        ranks=job.ranks,
        concurrency=job.ranks * simulation.REQUESTS_PER_RANK,
    )
    return simulation.DecodeSimulation(spec, config).run(policy.skew, policy.foresight_steps)


def run_decode(job: DecodeJob) -> Row:
    """Simulate and summarise. The loop is closed (load 1.0 is its concurrency) and refuses nothing;
    what belongs to prefill is None."""
    outcome = run_decode_outcome(job)
    return {
        "scenario": SCENARIO,
        "policy": job.policy,
        "cost": job.cost,
        "load": 1.0,
        "qps": outcome.completed / outcome.time_s,
        "seed": job.seed,
        **dict.fromkeys(_OF_PREFILL),
        "completed": outcome.completed,
        "rejected": 0,
        **outcome.row(),
    }
