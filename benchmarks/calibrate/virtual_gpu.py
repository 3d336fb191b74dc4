"""Translates between the simulator's cost of a pass and that of the virtual GPU."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from sglang_sbs.evaluate.fitting.calibration import slowest_rank
from sglang_sbs.evaluate.fitting.recording import RecordedPass
from sglang_sbs.simulator.cluster.cost import PassCost
from tools.cpu_engine.virtual_gpu import VirtualGpuCost


def virtual_gpu_pass_cost(cost: VirtualGpuCost, dp_size: int) -> PassCost:
    return PassCost(
        fixed_s=cost.prefill_base_s,
        max_s=cost.prefill_per_max_token_s,
        mean_s=cost.prefill_per_total_token_s * dp_size,
    )


def virtual_gpu_cost(cost: PassCost, passes: Sequence[RecordedPass]) -> VirtualGpuCost:
    """Return the virtual GPU's prefill cost for the simulator's cost; decode keeps its defaults.

    The virtual GPU counts tokens only. The cost of attention pairs and requests is spread over the
    tokens of the slowest rank, as in these passes. Raises: ValueError, there is no pass.
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
