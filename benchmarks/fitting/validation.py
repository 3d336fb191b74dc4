"""The simulator against recorded runs of a real cluster: same arrivals, same costs.

The time to first token is counted on both sides from the arrival at the scheduler to the first byte
of decode at the router.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec

from sglang_sbs.evaluate.fitting.calibration import Calibration, slowest_rank
from sglang_sbs.evaluate.fitting.recording import RecordedPass, Recording
from sglang_sbs.simulator.cluster.cost import PassCost
from sglang_sbs.simulator.cluster.outcome import Outcome, quantile
from sglang_sbs.simulator.cluster.simulation import simulate
from sglang_sbs.simulator.cluster.spec import ClusterSpec
from tools.cpu_engine.virtual_gpu import VirtualGpuCost


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded run and its simulation; times in seconds."""

    policy: str
    load: float
    seed: int
    requests: int
    real_ttft_mean_s: float
    simulated_ttft_mean_s: float
    real_ttft_p99_s: float
    simulated_ttft_p99_s: float
    real_passes: int
    simulated_passes: int
    real_queued_share: float
    """Share of the passes that were queued behind another (one-batch lookahead)."""
    simulated_queued_share: float

    @property
    def ratio(self) -> float:
        return self.simulated_ttft_mean_s / self.real_ttft_mean_s


def virtual_gpu_pass_cost(cost: VirtualGpuCost, dp_size: int) -> PassCost:
    return PassCost(
        fixed_s=cost.prefill_base_s,
        max_s=cost.prefill_per_max_token_s,
        mean_s=cost.prefill_per_total_token_s * dp_size,
    )


def virtual_gpu_cost(cost: PassCost, passes: Sequence[RecordedPass]) -> VirtualGpuCost:
    """The simulator's cost as the virtual GPU's prefill cost, decode left at its defaults.

    The virtual GPU knows tokens only. What attention pairs and requests cost is spread over the
    tokens of the slowest rank, as in these passes. Raises: ValueError, there is none.
    """
    tokens, pairs, count = 0, 0.0, 0
    for a_pass in passes:
        slowest = slowest_rank(cost, a_pass)
        tokens += a_pass.tokens[slowest]
        pairs += a_pass.pairs[slowest]
        count += a_pass.requests[slowest]
    if not tokens:
        raise ValueError("no prefill pass to take the mix of requests from")
    known = cost.of_tokens_only(pairs / tokens, count / tokens)
    return VirtualGpuCost(
        prefill_base_s=known.fixed_s,
        prefill_per_max_token_s=known.max_s,
        prefill_per_total_token_s=known.mean_s / statistics.fmean(len(p.tokens) for p in passes),
    )


def spec_of(recording: Recording, calibration: Calibration, seed: int = 0) -> ClusterSpec:
    """The recorded cluster.

    Raises:
        ValueError: its prefill instances differ, or it has none.
    """
    shapes = {
        (up.dp_size, up.chunk_tokens, up.page_size, up.prefill_max_requests)
        for up in recording.prefill
    }
    if len(shapes) != 1 or not recording.decode:
        raise ValueError("the log must have decode instances and prefill instances of one shape")
    ((dp_size, chunk_tokens, page_size, prefill_max_requests),) = shapes
    asked = {r.arrival.max_new_tokens for r in recording.requests.values()}
    return ClusterSpec(
        cost=calibration.cost,
        prefill_instances=len(recording.prefill),
        dp_size=dp_size,
        chunk_tokens=chunk_tokens,
        page_size=page_size,
        prefill_max_requests=prefill_max_requests,
        overlap=True,
        decode_dp_size=sum(up.dp_size for up in recording.decode),
        decode_kv_capacity_tokens=min(up.kv_capacity_tokens for up in recording.decode),
        decode_max_running_requests=min(up.max_running_requests for up in recording.decode),
        max_new_tokens=asked.pop() if len(asked) == 1 else None,
        dispatch_latency_s=calibration.dispatch_latency_s,
        gang_jitter=calibration.gang_jitter,
        dispatch_jitter=calibration.dispatch_jitter,
        prepare_s=calibration.prepare_s,
        launch_gap_s=calibration.launch_gap_s,
        first_token_s=calibration.first_token_s,
        feedback_latency_s=calibration.feedback_latency_s,
        decode_s=calibration.decode_s,
        seed=seed,
    )


def resimulate(recording: Recording, spec: ClusterSpec) -> Outcome:
    """The recorded arrivals under the recorded configuration on the simulated cluster."""
    requests = list(recording.requests.values())
    start_s = requests[0].arrived_s
    return simulate(
        [(r.arrived_s - start_s, r.prompt_tokens) for r in requests], recording.config, spec
    )


def compare(
    recording: Recording,
    calibration: Calibration,
    *,
    policy: str,
    load: float,
    seed: int,
    skip: int,
    repeats: int = 5,
) -> Cell:
    """Simulate a recorded run ``repeats`` times (latencies are drawn) and average.

    Args:
        skip: leave this many first requests (the warm-up) out of the figures, on both sides.
    """
    real = sorted(
        r.ttft_s for r in list(recording.requests.values())[skip:] if not math.isnan(r.ttft_s)
    )
    means, p99s, passes, queued = [], [], [], []
    for draw in range(repeats):
        outcome = resimulate(recording, spec_of(recording, calibration, draw))
        ttft_s = sorted(r.ttft_s for r in outcome.requests[skip:] if not math.isnan(r.ttft_s))
        means.append(statistics.fmean(ttft_s))
        p99s.append(quantile(ttft_s, 0.99))
        passes.append(len(outcome.passes))
        queued.append(outcome.queued_passes / len(outcome.passes))
    return Cell(
        policy=policy,
        load=load,
        seed=seed,
        requests=len(real),
        real_ttft_mean_s=statistics.fmean(real),
        simulated_ttft_mean_s=statistics.fmean(means),
        real_ttft_p99_s=quantile(real, 0.99),
        simulated_ttft_p99_s=statistics.fmean(p99s),
        real_passes=len(recording.passes),
        simulated_passes=round(statistics.fmean(passes)),
        real_queued_share=statistics.fmean(a_pass.inflight > 0 for a_pass in recording.passes),
        simulated_queued_share=statistics.fmean(queued),
    )


def by_cell(cells: Sequence[Cell]) -> Mapping[tuple[float, str], float]:
    """(load, policy) -> simulated / real mean TTFT over the seeds of the cell."""
    groups: dict[tuple[float, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.load, cell.policy), []).append(cell)
    return {
        key: sum(c.simulated_ttft_mean_s for c in mine) / sum(c.real_ttft_mean_s for c in mine)
        for key, mine in groups.items()
    }
