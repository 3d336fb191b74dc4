"""Metrics of workers, read at scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import Metric

from sglang_sbs.router.metric_families import gauge, total
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.scheduling.events import InstanceRole
from sglang_sbs.wire import EndForward

_STATES = {"closed": 0, "open": 1, "half_open": 2}
_ROLES: tuple[InstanceRole, InstanceRole] = ("prefill", "decode")
# fmt: off
_OF_WORKERS: tuple[tuple[str, str, Callable[[Worker], float]], ...] = (
    ("smg_worker_cb_state", "Circuit breaker: 0 closed, 1 open, 2 half-open",
        lambda worker: _STATES[worker.breaker.state]),
    ("smg_worker_cb_consecutive_failures", "Consecutive failures counted by the breaker",
        lambda worker: worker.breaker.consecutive[0]),
    ("smg_worker_cb_consecutive_successes", "Consecutive successes while half-open",
        lambda worker: worker.breaker.consecutive[1]),
    ("smg_worker_requests_active", "Legs in flight", lambda worker: worker.load),
)
# fmt: on


def model_name(registry: Registry) -> str:
    """Return the name of the model that the workers serve; ``unknown`` until one reports it."""
    for worker in registry:
        if worker.info is not None and worker.info.model_id:
            return worker.info.model_id
    return "unknown"


def engine_requests(report: EndForward) -> int:
    """Return the requests that a DP rank reports, in the stages that the router counts as well."""
    stages = report.waiting_requests + report.bootstrapping_requests + report.inflight_requests
    if report.role == "decode":
        stages += report.kv_transfer_requests + report.running_requests
    return stages


def worker_families(
    registry: Registry, checks: Mapping[tuple[str, str], int], now_s: float
) -> Iterator[Metric]:
    """Yield the metrics of all workers; ``checks``: number of health checks by role and result."""
    workers = list(registry)
    for name, text, value in _OF_WORKERS:
        yield gauge(name, text, {worker.url: value(worker) for worker in workers}, "worker")
    healthy = {(worker.url, worker.role): worker.healthy for worker in workers}
    yield gauge("smg_worker_health", "1 if healthy", healthy, "worker", "worker_type")
    outcomes = {(worker.url, "failure"): worker.failures for worker in workers}
    outcomes |= {(worker.url, "success"): worker.successes for worker in workers}
    yield total("smg_worker_cb_outcomes", "Legs by outcome", outcomes, "worker", "outcome")
    about = "Changes of the breaker's state"
    changes = {
        (worker.url, *change): count
        for worker in workers
        for change, count in worker.breaker.transitions.items()
    }
    yield total("smg_worker_cb_transitions", about, changes, "worker", "from", "to")
    problems = {(worker.url, kind): 1 for worker in workers for kind in worker.problems}
    yield gauge("sbs_worker_problem", "1 per known problem", problems, "worker", "problem")
    about = "Bootstrap rooms that refused requests may have left in a prefill engine's memory"
    left = {worker.url: worker.rooms_left for worker in workers if worker.role == "prefill"}
    yield gauge("sbs_rooms_left", about, left, "worker")
    reports = {
        (worker.url, str(r)): count for worker in workers for r, count in worker.reports.items()
    }
    yield total("sbs_endforward_messages", "EndForward messages", reports, "worker", "dp_rank")
    about = "Requests counted by this router minus those reported by the engine"
    drifts = {
        (worker.url, worker.role): worker.load - there
        for worker in workers
        if (there := worker.engine_requests(now_s)) is not None
    }
    yield gauge("sbs_ledger_drift_requests", about, drifts, "worker", "worker_type")
    model, labels = model_name(registry), ("worker_type", "connection_mode", "model")
    sizes = {(role, "http", model): len(registry.of_role(role)) for role in _ROLES}
    yield gauge("smg_worker_pool_size", "Registered workers", sizes, *labels)
    asked = [(role, result) for role in _ROLES for result in ("success", "failure")]
    done = {key: checks.get(key, 0) for key in asked}
    yield total("smg_worker_health_checks", "Health checks", done, "worker_type", "result")
