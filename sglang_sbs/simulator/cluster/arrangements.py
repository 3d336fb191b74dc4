"""Other arrangements of the same instances, so that it can be said what an operator gains by which.

``--short-pool N``: that many instances take short prompts only and the others long ones, each pool
with a scheduler of its own. ``--deflect-tokens N``: decode instances compute prompts of at most N
tokens beside their own steps (prefill deflection, arXiv 2607.02043; SGLang's cannot). Any policy
runs in either.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sglang_sbs.scheduling import SchedulerConfig
from sglang_sbs.simulator.cluster.arrival import Arrival, ClosedLoop
from sglang_sbs.simulator.cluster.outcome import Outcome
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
    if spec.short_pool:
        if not isinstance(arrivals, Sequence):
            raise ValueError("--short-pool: not in a closed loop (agentic)")
        return _pools(arrivals, config, spec, drain_s)
    if spec.deflect_tokens:
        spec = _with_deflection(spec)
    return simulate(arrivals, config, spec, drain_s=drain_s)


def _pools(
    arrivals: Sequence[Arrival], config: SchedulerConfig, spec: ClusterSpec, drain_s: float
) -> Outcome:
    """Two clusters side by side. Outcomes are put together; names stay those of the instances."""
    listed = [one for _, one in spec.prefill]
    if spec.short_pool >= len(listed):
        raise ValueError(f"short_pool {spec.short_pool}: long prompts need one of {len(listed)}")
    threshold = fair_threshold([one.prompt_tokens for one in arrivals], spec.short_pool, listed)
    whole = Outcome([])
    for first, instances, short in (
        (0, listed[: spec.short_pool], True),
        (spec.short_pool, listed[spec.short_pool :], False),
    ):
        mine = [
            index for index, one in enumerate(arrivals) if (one.prompt_tokens <= threshold) == short
        ]
        part = msgspec.structs.replace(spec, instances=tuple(instances), short_pool=0)
        outcome = simulate([arrivals[index] for index in mine], config, part, drain_s=drain_s)
        for request in outcome.requests:
            request.index = mine[request.index]
            request.rid = f"r{request.index}"
        whole.requests += outcome.requests
        whole.passes += [
            one._replace(instance=f"p{first + int(one.instance[1:])}") for one in outcome.passes
        ]
        whole.retries += outcome.retries
        whole.duration_s = max(whole.duration_s, outcome.duration_s)
    whole.requests.sort(key=lambda request: request.arrived_s)
    whole.passes.sort(key=lambda one: one.end_s)
    whole.arrivals = arrivals
    return whole


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
