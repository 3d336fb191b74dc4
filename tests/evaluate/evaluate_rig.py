"""Logs of a simulated cluster with a known cost: what an evaluation must find again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sglang_sbs.scheduling import ForwardEnded, Scheduler
from sglang_sbs.scheduling.eventlog import EventLogWriter
from sglang_sbs.simulator import ClusterSpec, PassCost
from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.cluster.outcome import Outcome
from sglang_sbs.simulator.cluster.simulation import Simulation
from sglang_sbs.simulator.experiments.sweep import READS_CACHES, scheduler_config
from sglang_sbs.wire import EndForward

SPEC = ClusterSpec(
    cost=PassCost(fixed_s=0.2, mean_s=1.3e-4, max_s=2.7e-4, pair_s=5e-8),
    prefill_instances=3,
    dp_size=2,
    chunk_tokens=1024,
    decode_dp_size=2,
    overlap=True,
    dispatch_latency_s=0.012,
    dispatch_jitter=0.2,
    gang_gate_s=0.04,
    launch_gap_s=0.025,
    prepare_s=0.006,
    first_token_s=0.05,
    feedback_latency_s=0.004,
    pass_jitter=0.05,
    decode_s=0.16,
    max_new_tokens=8,
)


def arrivals(seed: int, *, qps: float = 14.0, requests: int = 700) -> list[Arrival]:
    rng = random.Random(seed)
    out, now_s = [], 0.0
    for _ in range(requests):
        now_s += rng.expovariate(qps)
        out.append(Arrival(now_s, 1 + int(rng.betavariate(1, 2) * 1024), 8))
    return out


def ran(
    policy: str,
    sent: Sequence[Arrival],
    spec: ClusterSpec = SPEC,
    log: Path | None = None,
    tamper: Callable[[EndForward], EndForward] = lambda report: report,
) -> Outcome:
    """Simulate, and write the event log that a router would have written.

    ``tamper`` changes what the log says of a report, not what the scheduler received."""
    config = scheduler_config(policy)
    writer = None if log is None else EventLogWriter(log, config)

    class Recorded(Scheduler):
        def handle(self, event, now_s):
            commands = super().handle(event, now_s)
            if isinstance(event, ForwardEnded):
                event = msgspec.structs.replace(event, report=tamper(event.report))
            if writer is not None:
                writer.write(now_s, event, commands)
            return commands

    if policy not in READS_CACHES:
        spec = msgspec.structs.replace(spec, prefix_source="off")
    outcome = Outcome()
    simulation = Simulation(outcome, Recorded(config), spec)
    simulation.start(sent)
    simulation.end()
    if writer is not None:
        writer.close()
    return outcome


@dataclass
class Ran:
    log: Path
    sent: list[Arrival]
    outcome: Outcome
