"""Simulates a workload with its recorded placement or under a policy. Results are plain data."""

from __future__ import annotations

import heapq
import math

import msgspec

from sglang_sbs.evaluate.workload import RecordedPlacement, Workload
from sglang_sbs.scheduling import Scheduler, events
from sglang_sbs.simulator.cluster.boot import DECODE
from sglang_sbs.simulator.cluster.outcome import Outcome
from sglang_sbs.simulator.cluster.simulation import Decides, Simulation
from sglang_sbs.simulator.experiments.sweep import (
    NO_FLOW_CONTROL,
    READS_CACHES,
    scheduler_config,
)
from sglang_sbs.simulator.parallel import Row

RAN = ""
"""Stands for the recorded placement where the name of a policy is expected."""
_DRAIN_S = 600.0
_KEPT = (
    "default_chunk_tokens",
    "default_output_tokens",
    "iqr_k",
    "max_hold_s",
    "prefix_index_blocks",
    "priority_step_s",
    "tenant_weights",
    "window",
)
"""Settings of the recorded router that apply to every policy. Its limits do not: an evaluation
compares waiting times, so no policy may refuse requests."""


class RecordedPlacements:
    """Replaces a scheduler: sends each request at its recorded time to its recorded ranks."""

    def __init__(self, placements: list[RecordedPlacement]) -> None:
        self._placements = placements
        self._due: list[tuple[float, int, str]] = []
        self._woken_for_s = math.nan

    def handle(self, event: events.Event, now_s: float) -> list[events.Command]:
        """Return the dispatches due at ``now_s``, and when to call again. Request ids are the
        simulation's: ``r`` and the index of the arrival."""
        if isinstance(event, events.RequestArrived):
            index = int(event.rid[1:].partition(".")[0])
            heapq.heappush(self._due, (self._placements[index].at_s, index, event.rid))
        out: list[events.Command] = []
        while self._due and self._due[0][0] <= now_s:
            _, index, rid = heapq.heappop(self._due)
            placement = self._placements[index]
            out.append(
                events.Dispatch(
                    rid=rid,
                    prefill=placement.instance,
                    prefill_rank=placement.rank,
                    decode=DECODE,
                    decode_rank=placement.decode_rank,
                    batch=placement.batch,
                    held_s=0.0,
                    reason="as recorded",
                )
            )
        if self._due and self._due[0][0] != self._woken_for_s:
            self._woken_for_s = self._due[0][0]
            out.append(events.WakeAt(time_s=self._woken_for_s))
        return out


def run(work: Workload, policy: str, draw: int) -> Row:
    """Simulate the workload once, and return the results; ``draw`` seeds latencies and pass jitter.
    In the row, ``ttft_s``: seconds per request in order of arrival, NaN where it was not measured;
    ``unfinished``: requests without a first token, counted with their wait until the end."""
    spec = msgspec.structs.replace(work.spec, seed=draw)
    asked = policy or work.reacting
    if asked and asked not in READS_CACHES:
        spec = msgspec.structs.replace(spec, prefix_source="off")
    outcome = Outcome()
    simulation = Simulation(outcome, _decides(work, policy, draw), spec, drain_s=_DRAIN_S)
    simulation.start(work.arrivals)
    end_s = simulation.end()
    ttft_s, unfinished = [], 0
    of_each = zip(outcome.requests, work.measured_s, work.after_s, strict=True)
    for record, measured_s, after_s in of_each:
        one_s = record.ttft_s - spec.first_token_s + after_s
        if math.isnan(measured_s):
            one_s = math.nan
        elif math.isnan(one_s):
            one_s, unfinished = end_s - record.arrived_s, unfinished + 1
        ttft_s.append(one_s)
    return {
        "policy": policy,
        "draw": draw,
        "ttft_s": ttft_s,
        "unfinished": unfinished,
        "passes": len(outcome.passes),
        "pass_s": sum(p.end_s - p.start_s for p in outcome.passes) / max(1, len(outcome.passes)),
    }


def _decides(work: Workload, policy: str, draw: int) -> Decides:
    if policy != RAN:
        kept = {name: getattr(work.config, name) for name in _KEPT}
        return Scheduler(scheduler_config(policy, draw, **kept))
    if work.reacting:
        return Scheduler(msgspec.structs.replace(work.config, **NO_FLOW_CONTROL))
    return RecordedPlacements(work.placements)
