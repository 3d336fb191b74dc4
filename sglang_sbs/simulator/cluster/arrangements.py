"""Simulates other arrangements of the same instances, to compare the gain of each for an operator.
Every policy runs in every arrangement.

``--short-pool N``: N instances take short prompts only, and the others long ones.

``--pools N``: N pools of equal instances, each with a scheduler of its own. Use it for clusters too
large for one scheduler. The load balancer before them is not part of SBS: it sees requests come and
go, but neither ranks nor queues.

``--deflect-tokens N``: decode instances compute prompts of at most N tokens beside their own steps
(prefill deflection, arXiv 2607.02043). SGLang's decode instances cannot do this.
"""

from __future__ import annotations

import random
import time
import zlib
from array import array
from collections.abc import Callable, Sequence

import msgspec

from sglang_sbs.scheduling import Command, Event, Scheduler, SchedulerConfig
from sglang_sbs.simulator.cluster.arrival import Arrival, ClosedLoop
from sglang_sbs.simulator.cluster.outcome import Outcome, PoolRecord
from sglang_sbs.simulator.cluster.simulation import Simulation, simulate
from sglang_sbs.simulator.cluster.spec import ClusterSpec, InstanceSpec

DEFLECT_CHUNK_TOKENS = 256
"""Limit on deflected prompt tokens per decode rank and step: more would delay decode for long."""
Choose = Callable[[Arrival, Sequence[int]], int]
"""Returns the number of the pool for a request, given the requests in flight in each pool."""


def simulate_arranged(
    arrivals: Sequence[Arrival] | ClosedLoop,
    config: SchedulerConfig,
    spec: ClusterSpec,
    *,
    drain_s: float,
) -> Outcome:
    """Run :func:`simulate` in the arrangement that ``spec`` asks for. A closed loop cannot be
    divided into pools, because its lengths are unknown in advance."""
    if spec.short_pool or spec.pools:
        assert isinstance(arrivals, Sequence)
        if spec.short_pool:
            outcome = _simulate_pools(arrivals, config, *_by_length(arrivals, spec), drain_s)
            outcome.pools.clear()
            return outcome
        return _simulate_pools(arrivals, config, _equal_parts(spec), _balancer(spec), drain_s)
    if spec.deflect_tokens:
        spec = _with_deflection(spec)
    return simulate(arrivals, config, spec, drain_s=drain_s)


def _by_length(arrivals: Sequence[Arrival], spec: ClusterSpec) -> tuple[list[ClusterSpec], Choose]:
    listed = [instance for _, instance in spec.prefill]
    threshold = fair_threshold(
        [arrival.prompt_tokens for arrival in arrivals], spec.short_pool, listed
    )
    parts = [
        msgspec.structs.replace(
            spec, instances=tuple(listed[first:end]), first_instance=first, short_pool=0
        )
        for first, end in ((0, spec.short_pool), (spec.short_pool, len(listed)))
    ]
    return parts, lambda arrival, _: int(arrival.prompt_tokens > threshold)


def fair_threshold(lengths: Sequence[int], pool: int, instances: Sequence[InstanceSpec]) -> int:
    """Return the longest prompt of the short pool (the first ``pool`` of ``instances``), such that
    both pools have equal work per instance. An operator could choose it only with knowledge of all
    lengths."""
    worth = [instance.capacity_tokens * instance.speed for instance in instances]
    wanted = sum(lengths) * sum(worth[:pool]) / sum(worth)
    taken = 0
    for tokens in sorted(lengths):
        taken += tokens
        if taken >= wanted:
            return tokens
    return max(lengths, default=0)


def _equal_parts(spec: ClusterSpec) -> list[ClusterSpec]:
    listed = [instance for _, instance in spec.prefill]
    each = len(listed) // spec.pools
    return [
        msgspec.structs.replace(
            spec,
            instances=tuple(listed[each * number : each * (number + 1)]),
            first_instance=each * number,
            decode_dp_size=max(1, spec.decode_dp_size // spec.pools),
            pools=0,
            seed=spec.seed + 1000 * number,
        )
        for number in range(spec.pools)
    ]


def _balancer(spec: ClusterSpec) -> Choose:
    """Return the load balancer in front of the pools of ``spec``."""
    rng = random.Random(f"pools {spec.seed}")

    def fewest(_arrival: Arrival, in_flight: Sequence[int]) -> int:
        return min(range(spec.pools), key=lambda pool: (in_flight[pool], rng.random()))

    def any_of(_arrival: Arrival, _in_flight: Sequence[int]) -> int:
        return rng.randrange(spec.pools)

    def of_session(arrival: Arrival, in_flight: Sequence[int]) -> int:
        if not arrival.session:
            return any_of(arrival, in_flight)
        return zlib.crc32(arrival.session.encode()) % spec.pools

    return {"least": fewest, "random": any_of, "session": of_session}[spec.pool_balance]


def _with_deflection(spec: ClusterSpec) -> ClusterSpec:
    """Add the decode ranks as one more prefill instance, for short prompts only. Its steps take as
    long as a prefill pass with equally few tokens, including decode's own work."""
    listed = [instance for _, instance in spec.prefill]
    decode = InstanceSpec(dp_size=spec.decode_dp_size, chunk_tokens=DEFLECT_CHUNK_TOKENS)
    return msgspec.structs.replace(spec, instances=(*listed, decode))


class _TimedScheduler(Scheduler):
    """Wraps a scheduler, and records the CPU time of each event."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.decisions_s = array("d")

    def handle(self, event: Event, now_s: float) -> list[Command]:
        begun_s = time.thread_time()
        commands = super().handle(event, now_s)
        self.decisions_s.append(time.thread_time() - begun_s)
        return commands


def _simulate_pools(
    arrivals: Sequence[Arrival],
    config: SchedulerConfig,
    parts: Sequence[ClusterSpec],
    choose: Choose,
    drain_s: float,
) -> Outcome:
    """Simulate clusters with a common clock and outcome."""
    whole = Outcome()
    schedulers = [_TimedScheduler(config) for _ in parts]
    pairs = zip(schedulers, parts, strict=True)
    pools = [Simulation(whole, scheduler, part, drain_s=drain_s) for scheduler, part in pairs]
    sent = [0] * len(pools)
    for pool in pools:
        pool.start()
    for arrival in arrivals:
        for pool in pools:
            pool.go_on(arrival.at_s)
        chosen = choose(arrival, [pool.in_flight for pool in pools])
        sent[chosen] += 1
        pools[chosen].come([arrival])
    for pool, requests, scheduler in zip(pools, sent, schedulers, strict=True):
        whole.pools.append(PoolRecord(requests, scheduler.decisions_s, pool.end()))
    whole.passes.sort(key=lambda record: record.end_s)
    return whole
