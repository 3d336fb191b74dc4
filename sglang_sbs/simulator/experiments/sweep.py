"""Runs scenarios under policies, with one row per run, and searches the capacity at an SLO."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import msgspec

from sglang_sbs.scheduling import SchedulerConfig, policy_names
from sglang_sbs.scheduling.policy_registry import reads_prefixes
from sglang_sbs.simulator.cluster.arrangements import simulate_arranged
from sglang_sbs.simulator.cluster.cost import cost_name, find_cost
from sglang_sbs.simulator.cluster.outcome import Outcome, RequestRecord, mean, quantile
from sglang_sbs.simulator.parallel import Row
from sglang_sbs.simulator.workloads.classes import Classes, class_summary
from sglang_sbs.simulator.workloads.optimum import optimal_cached_tokens
from sglang_sbs.simulator.workloads.scenario import (
    Scenario,
    full_chunk_tokens_per_s,
    make_scenario,
)
from sglang_sbs.trial.ratios import Part

_MOST_LOAD = 100.0
"""Upper limit of the capacity search: an engine that serves this load would never break the SLO."""
SEARCHED_LOADS = (0.2, 1.1, 1.5, 1.3, 1.2, 1.2, 1.2, 1.2, 1.2)
"""Loads that :func:`max_load` typically simulates."""
_REQUEST_S, _CACHED_REQUEST_S = 2.2e-4, 8e-4
"""CPU time per simulated request, without and with prefix caches (2.5 GHz, 2026)."""
_AGENT_TURN_S = 20.0
LOOP_DRAIN_S = 600.0
"""Drain time of a closed loop of agents, in seconds; long, because their answers are."""
NO_FLOW_CONTROL: dict[str, Any] = {
    "n_limit": 1_000_000,
    "default_timeout_s": 1e9,
    "max_queue_requests": 10_000_000,
}
"""Scheduler settings without refusals, because a simulation measures waiting."""

PARTS = 8
"""Number of parts of a ``day`` for which TTFT is reported separately."""
INTERVAL_PARTS = 8
"""Parts of the time after the warm-up, used as units of intervals. Each is long enough to share few
passes and little of its queue with the next."""
POLICY_CONFIGS: dict[str, dict[str, Any]] = {
    "sbs": {"policy": "sbs", "trigger": "adaptive"},
    "sbs_basic": {"policy": "sbs", "trigger": "adaptive"},
    "sbs_equal": {"policy": "sbs", "trigger": "adaptive"},
    "sbs_paper": {"policy": "sbs", "trigger": "paper", "decode_rule": "iqr"},
    **{name: {"policy": name} for name in policy_names() if name != "sbs"},
}
"""Scheduler settings by policy name."""
SEES_ALL_EQUAL = "sbs_equal"
"""Policy name of ``sbs`` without knowledge of priorities and tenants."""
READS_CACHES = (
    *("sbs_equal", "sbs_paper"),
    *(name for name in policy_names() if reads_prefixes(name)),
)
"""Policies that get the ranks' cache contents. ``sbs_basic`` is ``sbs`` without them; the others
know nothing of caches, or only what they dispatched."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run; plain data that can be sent to another process."""

    scenario: str
    policy: str
    load: float
    seed: int
    duration_s: float = 80.0
    cost: str = "mixed"
    """A name or file for :func:`~sglang_sbs.simulator.cluster.cost.find_cost`."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    classes: Classes = field(default_factory=Classes)

    def at_load(self, load: float) -> Job:
        return replace(self, load=load)


def scheduler_config(policy: str, seed: int = 0, **more: Any) -> SchedulerConfig:
    """Return the configuration of a policy in :data:`POLICY_CONFIGS`."""
    return SchedulerConfig(**{**NO_FLOW_CONTROL, **POLICY_CONFIGS[policy], "seed": seed, **more})


def run_job(job: Job) -> Row:
    return run(scenario_of(job), job)


def scenario_of(job: Job) -> Scenario:
    return make_scenario(job.scenario, cost=find_cost(job.cost), **dict(job.spec))


def expected_s(scenario: Scenario, job: Job) -> float:
    """Estimate the CPU seconds of a run within a factor of two or three, from its requests. They
    take longer in a cluster with prefix caches, and under policies that hold them."""
    qps = job.load * scenario.nominal_qps
    if scenario.agents:
        qps = job.load * scenario.agents / _AGENT_TURN_S
    request_s = _CACHED_REQUEST_S if scenario.spec.block_tokens else _REQUEST_S
    factor = 1.5 if job.policy.startswith("sbs") else 1.0
    return factor * qps * job.duration_s * request_s


def row_head(job: Job, scenario: Scenario) -> Row:
    return {
        "scenario": job.scenario,
        "policy": job.policy,
        "cost": cost_name(job.cost),
        "load": job.load,
        "qps": job.load * scenario.nominal_qps,
        "seed": job.seed,
        "chunk_tokens": scenario.spec.chunk_tokens,
        "prefill_instances": len(scenario.spec.prefill),
        "dp_size": max(instance.dp_size for _, instance in scenario.spec.prefill),
    }


def run(scenario: Scenario, job: Job) -> Row:
    """Run a job like :func:`run_job`, with its scenario given."""
    outcome = run_outcome(scenario, job)
    slo_s = scenario.spec.ttft_slo_s or scenario.slo_ttft_s
    # With ``sbs_equal`` the arrivals in the outcome have no classes.
    arrivals = outcome.arrivals if scenario.agents else job.classes.of(outcome.arrivals, job.seed)
    classes = class_summary(_counted(outcome, scenario), arrivals, slo_s)
    return {
        **row_head(job, scenario),
        **summary(outcome, scenario),
        **cache_summary(outcome, scenario),
        **(loop_summary(outcome, scenario, job) if scenario.agents else {}),
        **(decode_summary(outcome, scenario) if scenario.spec.transfer_token_s else {}),
        **({"slo_s": slo_s, "classes": classes} if classes else {}),
        **(pool_summary(outcome) if outcome.pools else {}),
        **({"ttft_by_part_s": _by_part(outcome, job.duration_s)} if job.scenario == "day" else {}),
    }


def _by_part(outcome: Outcome, duration_s: float) -> list[float]:
    """Return the mean TTFT by arrival in each eighth of the run; NaN: nothing was prefilled."""
    parts: list[list[float]] = [[] for _ in range(PARTS)]
    for request in outcome.requests:
        if not math.isnan(request.ttft_s):
            parts[int(PARTS * request.arrived_s / duration_s)].append(request.ttft_s)
    return [fmean(part) if part else math.nan for part in parts]


def run_outcome(scenario: Scenario, job: Job) -> Outcome:
    arrivals = scenario.at_load(job.load, job.duration_s, job.seed)
    if job.policy != SEES_ALL_EQUAL and isinstance(arrivals, list):
        arrivals = job.classes.of(arrivals, job.seed)
    spec = msgspec.structs.replace(scenario.spec, seed=job.seed)
    if job.policy not in READS_CACHES:
        spec = msgspec.structs.replace(spec, prefix_source="off")
    config = scheduler_config(job.policy, job.seed, **dict(job.config))
    drain_s = LOOP_DRAIN_S if scenario.agents else 120.0
    return simulate_arranged(arrivals, config, spec, drain_s=drain_s)


def summary(outcome: Outcome, scenario: Scenario) -> Row:
    """Summarize the latency of requests after the warm-up, and passes from then until the last
    arrival."""
    counted = _counted(outcome, scenario)
    ttft_s = sorted(r.ttft_s for r in counted if not math.isnan(r.ttft_s))
    spec, warm_s = scenario.spec, scenario.warm_up_s
    last_s = outcome.requests[-1].arrived_s if outcome.requests else 0.0
    engines = {name: spec.engines(instance) for name, instance in spec.prefill}
    capacity = {name: instance.capacity_tokens / engines[name] for name, instance in spec.prefill}
    own = [p for p in outcome.passes if p.instance in engines]  # exclude decode's
    passes = [p for p in own if p.start_s >= warm_s and p.end_s <= last_s]
    offered = sum(capacity[p.instance] for p in passes)
    busy_s = sum(p.end_s - p.start_s for p in passes)
    window_s = 0.0
    if last_s > warm_s:
        window_s = sum(
            count * spec.up_s(instance, warm_s, last_s) for instance, count in engines.items()
        )
    return {
        "ttft_mean_s": mean(ttft_s),
        "ttft_p50_s": quantile(ttft_s, 0.5),
        "ttft_p99_s": quantile(ttft_s, 0.99),
        "ttft_parts": _parts(counted, warm_s, last_s),
        "chunk_utilization": sum(p.tokens for p in passes) / offered if passes else math.nan,
        "bubble_share": max(0.0, 1 - busy_s / window_s) if window_s > 0 else math.nan,
        "active_rank_count": fmean(p.active_ranks for p in passes) if passes else math.nan,
        "max_over_mean": fmean(p.max_over_mean for p in passes) if passes else math.nan,
        "completed": len(ttft_s),
        "rejected": sum(r.refused is not None for r in counted),
        "unfinished": sum(r.ends == 0 for r in counted),
    }


def _parts(counted: Sequence[RequestRecord], first_s: float, last_s: float) -> list[Part]:
    """Sum and number of TTFTs by arrival in each part of the time."""
    sums, numbers = [0.0] * INTERVAL_PARTS, [0] * INTERVAL_PARTS
    for request in counted:
        if not math.isnan(request.ttft_s):
            share = (request.arrived_s - first_s) / max(1e-9, last_s - first_s)
            part = min(INTERVAL_PARTS - 1, int(INTERVAL_PARTS * share))
            sums[part] += request.ttft_s
            numbers[part] += 1
    return list(zip(sums, numbers, strict=True))


def pool_summary(outcome: Outcome) -> Row:
    """Summarize how evenly requests were spread over pools, and the cost of decisions: CPU seconds
    per event, and the busiest scheduler's share of a core if simulated time were real."""
    decisions_s = sorted(decision_s for pool in outcome.pools for decision_s in pool.decisions_s)
    requests = [pool.requests for pool in outcome.pools]
    shares = [sum(pool.decisions_s) / pool.duration_s for pool in outcome.pools if pool.duration_s]
    return {
        "pools": len(outcome.pools),
        "pool_max_over_mean": max(requests) / fmean(requests) if any(requests) else math.nan,
        "decision_p50_s": quantile(decisions_s, 0.5),
        "decision_p99_s": quantile(decisions_s, 0.99),
        "decision_share": max(shares, default=math.nan),
    }


def _counted(outcome: Outcome, scenario: Scenario) -> list[RequestRecord]:
    return [r for r in outcome.requests if r.arrived_s >= scenario.warm_up_s]


def loop_summary(outcome: Outcome, scenario: Scenario, job: Job) -> Row:
    """Figures of a closed loop, for requests sent after the warm-up. ``e2e_mean_s``: time until the
    last token. ``tokens_per_s_instance``: prompt tokens (including cached) and answer tokens of
    completed requests."""
    counted = _counted(outcome, scenario)
    e2e_s = [r.ended_s - r.arrived_s for r in counted if not math.isnan(r.prefilled_s + r.ended_s)]
    window_s = job.duration_s - scenario.warm_up_s
    tokens = sum(
        r.prompt_tokens + outcome.arrivals[r.index].output_tokens
        for r in outcome.requests
        if scenario.warm_up_s <= r.ended_s <= job.duration_s and not math.isnan(r.prefilled_s)
    )
    prompt_tokens = sum(r.prompt_tokens for r in counted) or 1
    return {
        "agents": round(job.load * scenario.agents),
        "qps": len(counted) / window_s,
        "e2e_mean_s": mean(e2e_s),
        "tokens_per_s_instance": tokens / window_s / len(scenario.spec.prefill),
        "loaded_share": sum(r.loaded_tokens for r in counted) / prompt_tokens,
        "fetched_share": sum(r.fetched_tokens for r in counted) / prompt_tokens,
    }


def cache_summary(outcome: Outcome, scenario: Scenario) -> Row:
    """Prompt tokens of the requests that arrived after the warm-up and were prefilled.

    - ``computed_tokens``: tokens not found in the cache of the rank.
    - ``recomputed_tokens``: computed tokens in full blocks that some rank of the cluster had
      computed before.
    - ``hit_rate``: share of the prompt tokens that was found in the cache.
    - ``optimal_tokens``: tokens left to compute by one clairvoyant cache with the capacity of all
      ranks (:mod:`sglang_sbs.simulator.workloads.optimum`), warmed up by the same arrivals.
    - ``full_chunk_load``: computed tokens as a share of the tokens of full chunks in that time.
    """
    spec = scenario.spec
    room = spec.cluster_kv_tokens
    best = optimal_cached_tokens(outcome.arrivals, spec.block_tokens, room, outcome.history)
    counted = [r for r in _counted(outcome, scenario) if not math.isnan(r.prefilled_s)]
    prompt_tokens = sum(r.prompt_tokens for r in counted)
    cached_tokens = sum(r.cached_tokens for r in counted)
    window_s = outcome.requests[-1].arrived_s - scenario.warm_up_s if counted else math.inf
    full_tokens = full_chunk_tokens_per_s(spec) * window_s
    return {
        "full_chunk_load": (prompt_tokens - cached_tokens) / max(1e-9, full_tokens),
        "prompt_tokens": prompt_tokens,
        "computed_tokens": prompt_tokens - cached_tokens,
        "recomputed_tokens": sum(r.recomputed_tokens for r in counted),
        "optimal_tokens": prompt_tokens - sum(best[r.index] for r in counted),
        "hit_rate": cached_tokens / prompt_tokens if prompt_tokens else math.nan,
    }


def decode_summary(outcome: Outcome, scenario: Scenario) -> Row:
    """Figures of decode, for requests after the warm-up. ``sent_tokens``: mean number of prompt
    tokens transferred to decode. The other two: requests (``batch``) and KV tokens of the fullest
    rank over the mean of all ranks, averaged over time."""
    counted = [r for r in _counted(outcome, scenario) if not math.isnan(r.prefilled_s)]
    batch, kv_tokens = outcome.decode_balance(counted, scenario.spec.decode_dp_size)
    return {
        "sent_tokens": mean([r.prompt_tokens - r.decode_cached_tokens for r in counted]),
        "decode_batch_max_over_mean": batch,
        "decode_kv_max_over_mean": kv_tokens,
    }


class EmptyWindowError(ValueError):
    """Nothing can be measured; the message names the run and what to change."""


def max_load(
    job: Job, slo_ttft_s: float, low: float = 0.2, high: float = 2.0, tolerance: float = 0.01
) -> Row:
    """Find the largest load that is served within the SLO: the mean TTFT of requests after the
    warm-up is at most ``slo_ttft_s``, and none of them is refused or left over.

    The search bisects between ``low`` and ``high``, to a relative error of ``tolerance``. It goes
    beyond ``high`` only if every load up to it meets the SLO. A load without requests after the
    warm-up is never the result. Raises: EmptyWindowError, no load has such requests."""
    scenario = scenario_of(job)
    rows: dict[float, Row] = {}

    def meets(load: float) -> bool:
        arrivals = scenario.at_load(load, job.duration_s, job.seed)
        if isinstance(arrivals, list) and all(a.at_s < scenario.warm_up_s for a in arrivals):
            return True
        row = rows[load] = run(scenario, job.at_load(load))
        served = row["unfinished"] == row["rejected"] == 0
        return bool(served and row["ttft_mean_s"] <= slo_ttft_s)

    def bisect(low: float, high: float) -> tuple[float, bool]:
        """Return the largest load found, and whether a larger one broke the SLO."""
        broken = False
        while high - low > tolerance * max(high, 0.1):
            middle = (low + high) / 2
            if meets(middle):
                low = middle
            else:
                high, broken = middle, True
        return low, broken

    if not meets(low):
        low, _ = bisect(0.0, low)
    else:
        low, broken = bisect(low, high)
        while not broken and high < _MOST_LOAD and meets(high):
            low, broken = bisect(high, 2 * high)
            high *= 2
    if not rows:
        raise EmptyWindowError(
            f"{job.scenario}, seed {job.seed}: nothing arrives between the warm-up of "
            f"{scenario.warm_up_s:g} s and the end at {job.duration_s:g} s, at whatever load; "
            "simulate more seconds, or other seeds"
        )
    # No load meets the SLO: the row has the results of the lightest load tried, and a capacity of
    # 0.
    within = low if low in rows else 0.0
    at_limit = rows[within or min(rows)]
    max_qps = within * scenario.nominal_qps
    if scenario.agents:  # their rate is measured
        max_qps = at_limit["qps"] if within else 0.0
    return {**at_limit, "slo_ttft_s": slo_ttft_s, "max_qps": max_qps}
