"""A worker's requests by its engine's own count, and the drift from the router's."""

from __future__ import annotations

import pytest
from registry_setup import Setup

from sglang_sbs.router.telemetry.worker_metrics import worker_families


@pytest.mark.parametrize(
    ("ages_s", "drift"),
    [
        ({}, None),
        ({0: 0.1}, None),
        ({0: 0.1, 1: 0.1}, -7),
        ({0: 4.9, 1: 0.1}, -7),
        ({0: 5.0, 1: 0.1}, None),
        ({0: 60.0, 1: 60.0}, None),
    ],
)
def test_drift_is_known_while_all_ranks_report(ages_s: dict[int, float], drift: int | None) -> None:
    setup = Setup()
    worker = setup.up("http://p:1")
    worker.engine_holds = {rank: 3 + rank for rank in ages_s}
    worker.last_report_s = {rank: setup.now_s - age_s for rank, age_s in ages_s.items()}
    families = worker_families(setup.registry, {}, setup.now_s)
    (metric,) = (family for family in families if family.name == "sbs_ledger_drift_requests")
    assert [sample.value for sample in metric.samples] == ([] if drift is None else [drift])


def test_a_restarted_engine_holds_nothing_of_before() -> None:
    setup = Setup()
    worker = setup.up("http://p:1")
    worker.engine_holds, worker.last_report_s = {0: 3, 1: 9}, dict.fromkeys((0, 1), setup.now_s)
    assert worker.engine_requests(setup.now_s) == 12
    worker.forget_boot(setup.now_s)
    described, worker.info = worker.info, None
    worker.engine_holds[0] = worker.last_report_s[0] = 0
    assert worker.engine_requests(0.0) is None, "the number of ranks is not known yet"
    worker.info = described
    worker.engine_holds[1] = worker.last_report_s[1] = 0
    assert worker.engine_requests(0.0) == 0
