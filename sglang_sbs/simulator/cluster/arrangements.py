"""Other arrangements of the same instances, so that it can be said what an operator gains by which.

``--short-pool N``: that many instances take short prompts only and the others long ones, each pool
with a scheduler of its own. ``--pools N``: so many pools of equal instances (:mod:`.pools`).
``--deflect-tokens N``: decode instances compute prompts of at most N
tokens beside their own steps (prefill deflection, arXiv 2607.02043; SGLang's cannot). Any policy
runs in either.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sglang_sbs.scheduling import SchedulerConfig
from sglang_sbs.simulator.cluster.arrival import Arrival, ClosedLoop
from sglang_sbs.simulator.cluster.outcome import Outcome
from sglang_sbs.simulator.cluster.pools import balancer, equal_parts, simulate_pools
from sglang_sbs.simulator.cluster.simulation import simulate
from sglang_sbs.simulator.cluster.spec import ClusterSpec, InstanceSpec

DEFLECT_CHUNK_TOKENS = 256
"""Per decode rank and step: more would hold up decode for long."""


def simulate_arranged(
    arrivals: Sequence[Arrival] | ClosedLoop,
    config: SchedulerConfig,
    spec: ClusterSpec,
    *,
    drain_s: float,
) -> Outcome:
    """As :func:`simulate`, in the arrangement that ``spec`` asks for.

    Raises: ValueError: pools in a closed loop, where nobody knows the lengths in advance.
    """
    if spec.short_pool or spec.pools:
        if not isinstance(arrivals, Sequence):
            raise ValueError("--short-pool, --pools: not in a closed loop (agentic)")
        if spec.short_pool:
            return _by_length(arrivals, config, spec, drain_s)
        return simulate_pools(arrivals, config, equal_parts(spec), balancer(spec), drain_s)
    if spec.deflect_tokens:
        spec = _with_deflection(spec)
    return simulate(arrivals, config, spec, drain_s=drain_s)


def _by_length(
    arrivals: Sequence[Arrival], config: SchedulerConfig, spec: ClusterSpec, drain_s: float
) -> Outcome:
    """A pool for short prompts, and one for the others."""
    listed = [one for _, one in spec.prefill]
    if spec.short_pool >= len(listed):
        raise ValueError(f"short_pool {spec.short_pool}: long prompts need one of {len(listed)}")
    threshold = fair_threshold([one.prompt_tokens for one in arrivals], spec.short_pool, listed)
    parts = [
        msgspec.structs.replace(spec, instances=tuple(instances), short_pool=0)
        for instances in (listed[: spec.short_pool], listed[spec.short_pool :])
    ]
    outcome = simulate_pools(
        arrivals, config, parts, lambda one, _: int(one.prompt_tokens > threshold), drain_s
    )
    outcome.pools.clear()
    return outcome


def fair_threshold(lengths: Sequence[int], pool: int, instances: Sequence[InstanceSpec]) -> int:
    """The longest prompt of the short pool, its first ``pool`` of ``instances``: so that both pools
    have as much to compute per instance, as an operator would who knew all lengths in advance."""
    worth = [one.capacity_tokens * one.speed for one in instances]
    wanted = sum(lengths) * sum(worth[:pool]) / sum(worth)
    taken = 0
    for tokens in sorted(lengths):
        taken += tokens
        if taken >= wanted:
            return tokens
    return max(lengths, default=0)


def _with_deflection(spec: ClusterSpec) -> ClusterSpec:
    """The decode ranks as one more prefill instance, for short prompts only. Its steps take what a
    prefill pass with as few tokens takes, decode's own work and all."""
    listed = [one for _, one in spec.prefill]
    decode = InstanceSpec(dp_size=spec.decode_dp_size, chunk_tokens=DEFLECT_CHUNK_TOKENS)
    return msgspec.structs.replace(spec, instances=(*listed, decode), deflecting=f"p{len(listed)}")
