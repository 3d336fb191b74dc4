"""A registry of workers, and the /server_info of one."""

from __future__ import annotations

from typing import Any

from sglang_sbs.router.options.config import BreakerConfig, MonitorConfig
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import WorkerInfo
from sglang_sbs.router.workers.worker import Worker, WorkerEvents
from sglang_sbs.scheduling.events import Event

INFO: dict[str, Any] = {
    "version": "0.5.23",
    "disaggregation_mode": "prefill",
    "dp_size": 1,
    "attn_dp_size": 8,
    "chunked_prefill_size": 3072,
    "max_total_num_tokens": 50_000,
    "max_running_requests": 1024,
    "page_size": 64,
    "served_model_name": "ds",
    "disaggregation_bootstrap_port": 8998,
}


class Setup:
    def __init__(self, threshold: int = 2, **monitor: Any) -> None:
        self.events: list[Event] = []
        self.now_s = 100.0
        self.doubted: list[str] = []
        self.silenced: list[Worker] = []
        self.registry = Registry(
            WorkerEvents(
                self.events.append,
                doubted=lambda worker: self.doubted.append(worker.url),
                silenced=self.silenced.append,
            ),
            BreakerConfig(failure_threshold=threshold, timeout_s=10),
            lambda: self.now_s,
            monitor=MonitorConfig(**monitor),
        )

    def up(self, url: str, role: Any = "prefill", **info: Any) -> Worker:
        worker = self.registry.add(url, role)
        self.registry.described(worker, WorkerInfo(**({"dp_size": 2, "chunk_tokens": 512} | info)))
        self.registry.set_healthy(worker, True)
        return worker
