"""The decode experiment (section 5.2.2) under each rule: its rows and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.paper import decode_simulation
from sglang_sbs.scheduling import SchedulerConfig
from sglang_sbs.simulator.experiments.sweep import NO_FLOW_CONTROL
from sglang_sbs.simulator.experiments.tables import ResultTable, groups, mean_of, means
from sglang_sbs.simulator.parallel import Row

SCENARIO = "paper-decode"
PERSISTENT_SKEW = 0.7
"""Rank weights from 0.3 to 1.7: gives the paper's baseline band of 40-130K."""


@dataclass(frozen=True, slots=True)
class DecodePolicy:
    """Scheduler settings; ``skew`` above 0 replaces the scheduler's choice of a rank."""

    settings: Mapping[str, Any]
    skew: float = 0.0


DECODE_POLICIES: dict[str, DecodePolicy] = {
    "skewed": DecodePolicy({"policy": "round_robin"}, skew=PERSISTENT_SKEW),
    "round_robin": DecodePolicy({"policy": "round_robin"}),
    "least_requests": DecodePolicy({"policy": "least_requests"}),
    "sbs_iqr": DecodePolicy({"policy": "sbs", "decode_rule": "iqr"}),
    "sbs_potential": DecodePolicy({"policy": "sbs", "decode_rule": "potential"}),
}


def run_decode(policy: str, seed: int, steps: int, warm_up_steps: int) -> Row:
    """One row of ``paper-claims``."""
    chosen = DECODE_POLICIES[policy]
    spec = decode_simulation.DecodeSpec(seed=seed, steps=steps, warm_up_steps=warm_up_steps)
    config = SchedulerConfig(**{**NO_FLOW_CONTROL, **chosen.settings})
    found = decode_simulation.DecodeSimulation(spec, config).run(chosen.skew).row()
    band = found["kv_sigma_high"] - found["kv_sigma_low"]
    return {
        **found,
        "scenario": SCENARIO,
        "policy": policy,
        "cost": "h100",
        "seed": seed,
        "kv_band": band,
    }


def decode_table(rows: Sequence[Row]) -> ResultTable:
    """KV band, largest batch and throughput per decode policy."""
    by_policy = {policy: mine for (policy,), mine in groups(rows, "policy").items()}
    speeds = {policy: mean_of(mine, "tokens_per_s") for policy, mine in by_policy.items()}
    references = ("round_robin", "skewed")

    def gains(speed: float) -> list[str]:
        return [f"{speed / speeds[name] - 1:+.1%}" for name in references]

    columns = ["policy", "band (-/+ 1 sd)", "CV", "peak", "largest batch", "tokens/s"]
    table = ResultTable(
        "KV tokens per decode rank and throughput",
        [*columns, *(f"vs {name}" for name in references)],
    )
    for policy, mine in by_policy.items():
        low, high, peak = (
            f"{mean_of(mine, key) / 1e3:.0f}K"
            for key in ("kv_sigma_low", "kv_sigma_high", "kv_peak")
        )
        even = means(mine, "{:.1%}", "kv_cv")
        cells = [f"{low}-{high}", even, peak, f"{mean_of(mine, 'batch_max'):.1f}"]
        table.rows.append([policy, *cells, f"{speeds[policy]:.0f}", *gains(speeds[policy])])
    bound = mean_of(rows, "balanced_tokens_per_s")
    table.rows.append(["perfect balance", *[""] * 4, f"{bound:.0f}", *gains(bound)])
    return table
