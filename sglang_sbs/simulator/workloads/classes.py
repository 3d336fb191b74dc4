"""Assigns priorities, tenants and SLOs to simulated requests, and summarizes the results by
class."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sglang_sbs.scheduling.queue.priority import CLASSES, class_of
from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.cluster.outcome import RequestRecord, mean, quantile
from sglang_sbs.simulator.parallel import Row


@dataclass(frozen=True, slots=True)
class Classes:
    """Classes of a workload's requests, as shares of their number."""

    high_share: float = 0.0
    low_share: float = 0.0
    tenants: Mapping[str, float] = field(default_factory=dict)
    """Relative number of requests per tenant; empty: no tenants."""

    def of(self, arrivals: Sequence[Arrival], seed: int) -> list[Arrival]:
        """Return the same requests with a priority, tenant and SLO drawn for each; everything else
        stays the same."""
        if not (self.high_share or self.low_share or self.tenants):
            return list(arrivals)
        rng = random.Random(f"classes {seed}")
        names, weights = list(self.tenants), list(self.tenants.values())
        out = []
        for arrival in arrivals:
            drawn = rng.random()
            high = drawn < self.high_share
            low = not high and drawn < self.high_share + self.low_share
            tenant = rng.choices(names, weights)[0] if names else ""
            out.append(arrival._replace(priority=int(high) - int(low), tenant=tenant))
        return out


def class_summary(
    records: Sequence[RequestRecord], arrivals: Sequence[Arrival], slo_s: float
) -> Row:
    """Return TTFT and goodput of each class and each tenant, by name; empty if there is only one.
    ``goodput``: requests with a first token within ``slo_s``, as a share of all that arrived."""
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        arrival = arrivals[record.index]
        groups.setdefault(class_of(arrival.priority), []).append(record)
        if arrival.tenant:
            groups.setdefault(f"tenant {arrival.tenant}", []).append(record)
    if len(groups) <= 1:
        return {}
    ranks: dict[str, int] = {name: rank for rank, name in enumerate(reversed(CLASSES))}
    ordered = sorted(groups, key=lambda name: (ranks.get(name, len(ranks)), name))
    return {name: _summary(groups[name], slo_s) for name in ordered}


def _summary(records: Sequence[RequestRecord], slo_s: float) -> Row:
    ttft_s = sorted(r.ttft_s for r in records if not math.isnan(r.ttft_s))
    return {
        "ttft_mean_s": mean(ttft_s),
        "ttft_p99_s": quantile(ttft_s, 0.99),
        "goodput": sum(value_s <= slo_s for value_s in ttft_s) / len(records),
        "completed": len(ttft_s),
        "rejected": sum(r.refused is not None for r in records),
    }
