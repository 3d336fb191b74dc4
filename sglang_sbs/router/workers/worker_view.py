"""Describes a worker for ``GET /workers``."""

from __future__ import annotations

from typing import Any

from sglang_sbs.router.workers.diagnosis import barrier_of
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.worker import Worker

_LIMITS = (
    *("chunk_tokens", "kv_capacity_tokens", "max_running_requests", "prefill_max_requests"),
    "page_size",
)


def describe_worker(worker: Worker, now_s: float) -> dict[str, Any]:
    """Return one entry of ``GET /workers``: sglang_router's fields, then ours."""
    info = worker.info
    age_s = worker.report_age_s(now_s)
    return {
        "id": worker.id,
        "url": worker.url,
        "model_id": info.model_id if info else "unknown",
        "priority": worker.priority,
        "cost": worker.cost,
        "worker_type": worker.role,
        "is_healthy": worker.healthy,
        "load": worker.load,
        "connection_mode": "HTTP",
        "runtime_type": "sglang",
        "bootstrap_port": worker.bootstrap_port,
        "metadata": {
            "disaggregation_mode": worker.role,
            "served_model_name": info.model_id if info else "unknown",
            "load_balance_method": info.load_balance_method if info else "",
            "dp_size": str(worker.dp_size),
        }
        | worker.labels,
        "disable_health_check": False,
        "usable": worker.usable,
        "draining": worker.draining,
        "circuit_breaker": worker.breaker.state,
        **{name: getattr(info, name, None) for name in ("dp_size", "ranks")},
        "barrier": not info.no_barrier if info else None,
        "barrier_source": barrier_of(info).source if info else None,
        "rust_server": worker.known.rust_server,
        **{name: getattr(info, name, None) for name in _LIMITS},
        "kv_events": bool(info and info.kv_events) and not worker.kv_events_missing,
        "version": info.version if info else None,
        "defers_kv_release": worker.known.defers_release if worker.role == "decode" else None,
        "parked": worker.parked,
        "plugin": bool(info and info.sbs),
        "signal": _signal(worker, now_s),
        "endforward_age_s": round(age_s, 3) if age_s is not None else None,
        "endforward_messages": sum(worker.reports.values()),
        "dispatches": worker.dispatches,
        "failures": worker.failures,
        "rooms_left": worker.rooms_left if worker.role == "prefill" else None,
        "problems": dict(worker.problems),
    }


def _signal(worker: Worker, now_s: float) -> str:
    if worker.reporting(now_s):
        return "endforward"
    return "timers" if "loads" in worker.problems else "polls"


def problems_of(registry: Registry) -> list[tuple[str, str]]:
    """Return URL and text of each problem; for a worker that takes no requests only the reason."""
    return [(worker.url, text) for worker in registry for text in _problems_of(worker)]


def _problems_of(worker: Worker) -> list[str]:
    if worker.usable or worker.info is None:
        return [*worker.problems.values()]
    if worker.healthy:
        return ["its circuit breaker is open, as requests to it kept failing"]
    return [worker.problems["unhealthy"]] if "unhealthy" in worker.problems else []
