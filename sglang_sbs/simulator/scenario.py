"""The named scenarios of ``sglang-sbs simulate``: a cluster shape, a workload, a scale of load.

Owns what load 1.0 means in each. Must not know policies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sglang_sbs.simulator.cluster import ClusterSpec
from sglang_sbs.simulator.cost import COSTS, PassCost
from sglang_sbs.simulator.workload import (
    Arrival,
    read_trace,
    replayed,
    synthetic,
    tokens_per_s,
    truncated_pareto,
    uniform_like,
)

SCENARIOS = ("paper-3k", "paper-5k", "paper-long", "paper-decode", "trace:FILE")
_PAPER_INSTANCES = 3
_SHORT = uniform_like(3000)
_LONG = truncated_pareto(3072, 65536, 6700.0)


class ScenarioError(ValueError):
    """An unknown scenario; the message lists the known ones."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A workload on a cluster."""

    name: str
    spec: ClusterSpec
    nominal_qps: float
    """Requests per second of the whole cluster at load 1.0."""
    arrivals: Callable[[float, float, int], list[Arrival]]
    """(qps, duration_s, seed) -> requests."""
    slo_ttft_s: float
    """Mean time to first token of the capacity search."""
    workload_qps: float
    """The rate the workload itself has: a trace's mean rate; of the paper's, load 1.0 on its three
    prefill instances."""

    def at_load(self, load: float, duration_s: float, seed: int) -> list[Arrival]:
        """The workload at a share of the nominal rate."""
        return self.arrivals(load * self.nominal_qps, duration_s, seed)


def make_scenario(
    name: str,
    *,
    cost: PassCost = COSTS["mixed"],
    prefill_instances: int = 3,
    **spec: object,
) -> Scenario:
    """Build a scenario by name; further keywords go to :class:`ClusterSpec`.

    Load 1.0 is 57 QPS per prefill instance in ``paper-3k``, 70 in ``paper-5k`` (the baseline
    peaks of the paper, which are only physical as figures per instance), the rate of full chunks in
    ``paper-long`` and in traces.

    Raises:
        ScenarioError: unknown name.
        TraceError: the trace cannot be read.
    """

    def cluster(chunk_tokens: int) -> ClusterSpec:
        base = ClusterSpec(
            cost=cost, prefill_instances=prefill_instances, chunk_tokens=chunk_tokens
        )
        return msgspec.structs.replace(base, **spec)

    match name.partition(":"):
        case ("paper-3k", "", ""):
            shape = cluster(3072)
            qps = 57.0 * prefill_instances
            return Scenario(name, shape, qps, _synthetic_short, 0.8, 57.0 * _PAPER_INSTANCES)
        case ("paper-5k", "", ""):
            shape = cluster(5120)
            qps = 70.0 * prefill_instances
            return Scenario(name, shape, qps, _synthetic_short, 1.0, 70.0 * _PAPER_INSTANCES)
        case ("paper-long", "", ""):
            shape = cluster(16384)
            qps = full_chunk_tokens_per_s(shape) / 6700.0
            return Scenario(
                name,
                shape,
                qps,
                lambda q, d, s: synthetic(q, d, _LONG, s),
                4.0,
                qps * _PAPER_INSTANCES / prefill_instances,
            )
        case ("trace", ":", file) if file:
            trace = read_trace(Path(file))
            shape = cluster(4096 if file.endswith(".csv") else 16384)
            mean_tokens = sum(a.prompt_tokens for a in trace) / len(trace)
            rate = len(trace) / max(1e-9, trace[-1].at_s)
            assert tokens_per_s(trace) > 0
            return Scenario(
                name,
                shape,
                full_chunk_tokens_per_s(shape) / mean_tokens,
                lambda q, d, s: replayed(trace, q / rate, d, s),
                4.0,
                rate,
            )
    raise ScenarioError(f"no scenario {name!r}; one of {', '.join(SCENARIOS)}")


def full_chunk_tokens_per_s(spec: ClusterSpec) -> float:
    """What the cluster computes when every pass has a full chunk on every rank."""
    per_pass = spec.chunk_tokens * spec.dp_size
    return spec.prefill_instances * per_pass / spec.cost.full_chunk_s(spec.chunk_tokens)


def _synthetic_short(qps: float, duration_s: float, seed: int) -> list[Arrival]:
    return synthetic(qps, duration_s, _SHORT, seed)
