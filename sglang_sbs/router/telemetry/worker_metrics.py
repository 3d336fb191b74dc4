"""The workers as metrics, read when scraped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from sglang_sbs.router.metric_families import gauge, total
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.wire import EndForward

_STATES = {"closed": 0, "open": 1, "half_open": 2}
_HTTP = "http"


def model_name(registry: Registry) -> str:
    """Of the one model of this router's workers; ``unknown`` before any has told."""
    return next((w.info.model_id for w in registry if w.info and w.info.model_id), "unknown")


def engine_requests(report: EndForward) -> int:
    """Requests a rank holds by its own count, in whatever stage this router waits for."""
    stages = report.waiting_requests + report.bootstrapping_requests + report.inflight_requests
    if report.role == "decode":
        stages += report.kv_transfer_requests + report.running_requests
    return stages


class Drift:
    """What engines say they hold, to compare with this router's own books."""

    def __init__(self) -> None:
        self._held: dict[str, dict[int, int]] = {}

    def reported(self, worker: Worker, report: EndForward) -> None:
        self._held.setdefault(worker.url, {})[report.dp_rank] = engine_requests(report)

    def forget(self, worker_url: str) -> None:
        self._held.pop(worker_url, None)

    def of(self, worker: Worker) -> int | None:
        """Own books minus the engine's; ``None`` while not every rank has reported."""
        held = self._held.get(worker.url, {})
        if len(held) < worker.dp_size:
            return None
        return worker.load - sum(held.values())


def worker_families(
    registry: Registry, drift: Drift, checks: Mapping[tuple[str, str], int]
) -> Iterator[Metric]:
    """``checks``: health checks by role and result."""
    model = model_name(registry)
    health = gauge("smg_worker_health", "1 if healthy", "worker", "worker_type")
    state = gauge("smg_worker_cb_state", "Circuit breaker: 0 closed, 1 open, 2 half-open", "worker")
    failures = gauge("smg_worker_cb_consecutive_failures", "As the breaker counts", "worker")
    successes = gauge("smg_worker_cb_consecutive_successes", "While half-open", "worker")
    outcomes = total("smg_worker_cb_outcomes", "Legs by outcome", "worker", "outcome")
    transitions = total(
        "smg_worker_cb_transitions", "Changes of the breaker's state", "worker", "from", "to"
    )
    active = gauge("smg_worker_requests_active", "Legs in flight", "worker")
    problems = gauge("sbs_worker_problem", "1 per known problem", "worker", "problem")
    messages = total("sbs_endforward_messages", "EndForward messages", "worker", "dp_rank")
    off = gauge(
        "sbs_ledger_drift_requests",
        "Requests in this router's books minus those the engine reports",
        "worker",
        "worker_type",
    )
    for worker in registry:
        url, role, breaker = worker.url, worker.role, worker.breaker
        health.add_metric([url, role], float(worker.healthy))
        state.add_metric([url], _STATES[breaker.state])
        failed, succeeded = breaker.consecutive
        failures.add_metric([url], failed)
        successes.add_metric([url], succeeded)
        outcomes.add_metric([url, "failure"], worker.failures)
        outcomes.add_metric([url, "success"], worker.successes)
        for (old, new), count in breaker.transitions.items():
            transitions.add_metric([url, old, new], count)
        active.add_metric([url], worker.load)
        for kind in worker.problems:
            problems.add_metric([url, kind], 1)
        for rank, count in worker.reports.items():
            messages.add_metric([url, str(rank)], count)
        difference = drift.of(worker)
        if difference is not None:
            off.add_metric([url, role], difference)
    pool = gauge(
        *("smg_worker_pool_size", "Registered workers", "worker_type", "connection_mode", "model")
    )
    for kind in ("prefill", "decode"):
        pool.add_metric([kind, _HTTP, model], sum(worker.role == kind for worker in registry))
    checked = total("smg_worker_health_checks", "Health checks", "worker_type", "result")
    for kind in ("prefill", "decode"):
        for result in ("success", "failure"):
            checked.add_metric([kind, result], checks.get((kind, result), 0))
    yield from (health, state, failures, successes, outcomes, transitions, active, problems)
    yield from (messages, off, pool, checked)
