"""Rows made up for the tests of `scripts/compare-routers`."""

from __future__ import annotations

import math

from benchmarks.compare_routers.results.measure import Answers, Engines, KvBand
from benchmarks.compare_routers.results.rows import Header, Key, Row
from benchmarks.demo.load import Latency
from benchmarks.demo.passes import PassStatistics

NAN = math.nan
HEADER = Header(
    settings={"slo_ttft_s": 1.0, "chunk_tokens": 1024}, machine={"cpu_cores": 2}, begun="2026"
)


def row(
    policy: str,
    mean: float,
    *,
    load: float = 0.8,
    seed: int = 1,
    p99: float | None = None,
    failed: int = 0,
    sigma: float = 10.0,
    active_ranks: float = 1.8,
    host_lag_ms: float = 0.0,
    stalled_s: float = 0.0,
) -> Row:
    passes = PassStatistics(10, 900.0, 0.5, 0.9, 0.1, NAN, 0.01, active_ranks, 1.1)
    return Row(
        key=Key("paper", load, seed, policy),
        requests=100,
        qps=load * 30,
        host_lag_ms=host_lag_ms,
        most_host_lag_ms=12.2,
        stalled_s=stalled_s,
        answers=Answers(
            completed=100 - failed,
            failed=failed,
            errors=["HTTP 500"] if failed else [],
            ttft_ms=Latency(mean, mean, 2 * mean if p99 is None else p99),
            tpot_ms=Latency(20, 20, 30),
            e2e_ms=Latency(mean + 100, mean, mean),
            goodput_qps=20.0,
        ),
        engines=Engines(passes, NAN, NAN, KvBand(100.0, sigma)),
    )
