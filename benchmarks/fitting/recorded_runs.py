"""Event logs of policies on the real virtual-GPU cluster, one file per policy, load and seed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.demo.load import Workload
from benchmarks.demo.runs import policy_flags
from benchmarks.demo.virtual_cluster import running_rig

_PRIME_REQUESTS = 60
_NAME = re.compile(r"(?P<policy>\w+)-load(?P<load>[\d.]+)-seed(?P<seed>\d+)\.events")


@dataclass(frozen=True, slots=True, order=True)
class RecordedRun:
    """One event log: a policy under one load and arrival seed."""

    load: float
    """Share of the cluster's capacity."""
    policy: str
    seed: int
    path: Path


async def record_runs(
    directory: Path,
    *,
    topology: tuple[int, int],
    dp_size: int,
    policies: Sequence[str],
    loads: Sequence[float],
    seeds: Sequence[int],
    requests: int,
    console: Console,
) -> list[RecordedRun]:
    """Start the cluster, run every cell, stop it; the logs are in ``directory``, which exists.

    Raises:
        ClusterStartError: an engine did not come up.
        RuntimeError: a request failed, so the log is not of the whole load.
    """
    async with running_rig(*topology, dp_size, directory, console) as rig:
        # The first requests pay for connections and handshakes between every pair of ranks.
        prime = Workload(qps=rig.capacity_qps / 2, requests=_PRIME_REQUESTS, seed=0)
        await rig.run("prime", policy_flags("round_robin"), prime)
        for seed in seeds:
            for load in loads:
                workload = Workload(qps=load * rig.capacity_qps, requests=requests, seed=seed)
                for policy in policies:
                    label = f"{policy}-load{load:g}-seed{seed}"
                    run = await rig.run(label, policy_flags(policy), workload)
                    failed = [s.error for s in run.samples if s.error]
                    if failed:
                        raise RuntimeError(f"{label}: {len(failed)} failed, first: {failed[0]}")
                    console.print(f"recorded {label}", highlight=False)
    return recorded_runs(directory)


def recorded_runs(directory: Path) -> list[RecordedRun]:
    """The logs :func:`record_runs` left in a directory.

    Raises:
        ValueError: there is none.
    """
    runs = [
        RecordedRun(float(match["load"]), match["policy"], int(match["seed"]), path)
        for path in sorted(directory.glob("*.events"))
        if (match := _NAME.fullmatch(path.name))
    ]
    if not runs:
        raise ValueError(f"{directory} has no POLICY-loadLOAD-seedSEED.events file")
    return sorted(runs)
