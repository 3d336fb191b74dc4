"""Several clusters side by side, each with a scheduler of its own, behind one load balancer.

How to go on beyond what one scheduler can carry: ``--pools N`` divides the instances. The balancer
is no part of SBS. It sees requests come and go, and neither ranks nor queues.
"""

from __future__ import annotations

import random
import time
import zlib
from array import array
from collections.abc import Callable, Sequence

import msgspec

from sglang_sbs.scheduling import Command, Event, Scheduler, SchedulerConfig
from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.cluster.outcome import Outcome, PoolRecord
from sglang_sbs.simulator.cluster.simulation import Simulation
from sglang_sbs.simulator.cluster.spec import ClusterSpec

Choose = Callable[[Arrival, Sequence[int]], int]
"""The pool of a request, by what is in flight in each."""


class TimedScheduler(Scheduler):
    """The scheduler, with the CPU time that each event took."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.decisions_s = array("d")

    def handle(self, event: Event, now_s: float) -> list[Command]:
        begun_s = time.thread_time()
        commands = super().handle(event, now_s)
        self.decisions_s.append(time.thread_time() - begun_s)
        return commands


def simulate_pools(
    arrivals: Sequence[Arrival],
    config: SchedulerConfig,
    parts: Sequence[ClusterSpec],
    choose: Choose,
    drain_s: float,
) -> Outcome:
    """Clusters with one clock. Their outcomes are put together: instances are numbered through."""
    schedulers = [TimedScheduler(config) for _ in parts]
    pools = [
        Simulation([], scheduler, part, drain_s=drain_s)
        for scheduler, part in zip(schedulers, parts, strict=True)
    ]
    sent: list[list[int]] = [[] for _ in parts]
    for pool in pools:
        pool.start()
    for index, arrival in enumerate(arrivals):
        for pool in pools:
            pool.go_on(arrival.at_s)
        chosen = choose(arrival, [pool.in_flight for pool in pools])
        sent[chosen].append(index)
        pools[chosen].come([arrival])
    whole = Outcome([], arrivals=arrivals)
    first = 0
    for pool, part, mine, scheduler in zip(pools, parts, sent, schedulers, strict=True):
        outcome = pool.end()
        _add(outcome, whole, mine, first)
        whole.pools.append(PoolRecord(len(mine), scheduler.decisions_s, outcome.duration_s))
        first += len(part.prefill)
    whole.requests.sort(key=lambda request: request.index)
    whole.passes.sort(key=lambda one: one.end_s)
    return whole


def _add(outcome: Outcome, whole: Outcome, indices: Sequence[int], first: int) -> None:
    """``indices``: of its arrivals among all; ``first``: the number of its first instance."""

    def named(instance: str) -> str:
        return f"p{first + int(instance[1:])}"

    for request in outcome.requests:
        request.index = indices[request.index]
        request.rid = f"r{request.index}"
        if request.prefill is not None:
            request.prefill = (named(request.prefill[0]), request.prefill[1])
    whole.requests += outcome.requests
    whole.passes += [one._replace(instance=named(one.instance)) for one in outcome.passes]
    whole.queued_passes += outcome.queued_passes
    whole.bootstrap_waits += outcome.bootstrap_waits
    whole.retries += outcome.retries
    whole.duration_s = max(whole.duration_s, outcome.duration_s)


def equal_parts(spec: ClusterSpec) -> list[ClusterSpec]:
    """``spec.pools`` clusters out of one, in the order of its instances.

    Raises: ValueError: they cannot be divided so.
    """
    listed = [one for _, one in spec.prefill]
    each, left = divmod(len(listed), spec.pools)
    if left:
        raise ValueError(f"--pools {spec.pools}: {len(listed)} instances cannot be divided so")
    return [
        msgspec.structs.replace(
            spec,
            instances=tuple(listed[each * number : each * (number + 1)]),
            decode_dp_size=max(1, spec.decode_dp_size // spec.pools),
            pools=0,
            seed=spec.seed + 1000 * number,
        )
        for number in range(spec.pools)
    ]


def balancer(spec: ClusterSpec) -> Choose:
    """Before the pools of ``spec``."""
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
