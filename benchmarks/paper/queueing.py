"""The paper's queueing model (section 3.2): how long a request waits for its pass to begin.

Passes take one time T whatever is in them, nothing is lost on the way, and chunks are seldom full.
The wait is from arrival to the launch of the pass, in the engine or in the scheduler.
"""

from __future__ import annotations

from statistics import fmean

from sglang_sbs.simulator.cluster.cost import COSTS, PassCost
from sglang_sbs.simulator.experiments.sweep import Job, run_outcome
from sglang_sbs.simulator.parallel import Row
from sglang_sbs.simulator.workloads.scenario import make_scenario

QUEUEING = "paper-queueing"
_WORKLOAD = "paper-3k"
_LOAD = 0.2
"""Every instance is always busy, and few ranks have more than a chunk: the paper's premise."""
_WAY_S = 1e-3
"""Between router and engine: next to nothing of a pass."""


def queueing_job(policy: str, instances: int, seed: int, duration_s: float) -> Job:
    spec = {
        "prefill_instances": instances,
        "overlap": False,
        "dispatch_latency_s": _WAY_S,
        "dispatch_serial_s": 0.0,
        "dispatch_jitter": 0.0,
    }
    return Job(_WORKLOAD, policy, _LOAD, seed, duration_s, spec=spec)


def queueing_row(job: Job) -> Row:
    """``wait_passes``: the mean wait of what arrived after the warm-up, as a share of T."""
    t_s = COSTS[job.cost].full_chunk_s(3072)
    scenario = make_scenario(job.scenario, cost=PassCost(fixed_s=t_s), **dict(job.spec))
    outcome = run_outcome(scenario, job)
    launched_s = {(a_pass.instance, a_pass.end_s): a_pass.start_s for a_pass in outcome.passes}
    waits_s = [
        launched_s[request.prefill[0], request.prefilled_s] - request.arrived_s
        for request in outcome.requests
        if request.prefill and request.arrived_s >= scenario.warm_up_s
    ]
    return {
        "scenario": QUEUEING,
        "policy": job.policy,
        "cost": "constant",
        "load": job.load,
        "seed": job.seed,
        "prefill_instances": len(scenario.spec.prefill),
        "wait_passes": fmean(waits_s) / t_s,
    }
