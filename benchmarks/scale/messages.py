"""What an EndForward message costs the scheduler process, by kind: CPU time, without sockets.

Owns the messages of a large cluster and the clock. Must not know how they are handled. The parts
are the router's own (listener, registry, metrics, scheduler); the messages are those of
:mod:`.fleet`. CPU time of the thread, so that a busy machine does not count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.scale.fleet import CHUNK_TOKENS, KV_TOKENS, FleetShape
from sglang_sbs.router.assignment.scheduler_driver import SchedulerPump
from sglang_sbs.router.signals.endforward_listener import EndForwardListener
from sglang_sbs.router.telemetry.metrics import RouterMetrics
from sglang_sbs.router.telemetry.worker_metrics import engine_requests
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import WorkerInfo
from sglang_sbs.router.workers.worker import Worker, WorkerEvents
from sglang_sbs.scheduling import Scheduler, SchedulerConfig
from sglang_sbs.scheduling.events import InstanceRole
from sglang_sbs.wire import EndForward, encode_endforward

_ROUNDS = 6


class _Engines:
    """Frames that the ranks of a cluster would send next."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._seq = 0

    def frames(self, role: InstanceRole, kind: str, forward_id: int) -> list[list[bytes]]:
        self._seq += 1
        now_s = time.monotonic()
        ended = kind == "forward"
        out = []
        for worker in self._workers:
            if worker.role != role:
                continue
            about: dict[str, Any] = {"batch_size": 10, "running_requests": 10, "kv_tokens": 15_000}
            if role == "prefill":
                about = {
                    "extend_tokens": 1000,
                    "batch_size": 1,
                    "tokens_per_rank": [1000] * worker.dp_size,
                }
            for rank in range(worker.dp_size):
                report = EndForward(
                    instance_id=worker.url,
                    boot_id=worker.url,
                    role=role,
                    dp_rank=rank,
                    dp_size=worker.dp_size,
                    seq=self._seq,
                    kind=kind,  # type: ignore[arg-type]
                    forward_id=forward_id,
                    mode="extend" if role == "prefill" else "decode",
                    launch_s=now_s,
                    end_s=now_s + 0.1 if ended else 0.0,
                    forward_s=0.1 if ended else 0.0,
                    chunk_tokens=CHUNK_TOKENS,
                    kv_capacity_tokens=KV_TOKENS,
                    sglang_version="0.5.23",
                    **about,
                )
                out.append(encode_endforward(report))
        return out


async def message_costs(shape: FleetShape) -> dict[str, float]:
    """Microseconds of CPU per message, by kind; all of them are looked at.

    Needs a running event loop, for the scheduler's timer.

    Raises:
        RuntimeError: the router did not take one.
    """
    pump = SchedulerPump(
        Scheduler(SchedulerConfig(policy="sbs")),
        decided=lambda command: None,
        failed=lambda rid: None,
    )
    registry = Registry(WorkerEvents(pump.submit))
    metrics = RouterMetrics()

    def booked(worker: Worker, report: EndForward) -> None:
        metrics.forward_ended(worker.url, CHUNK_TOKENS, report)
        worker.engine_holds[report.dp_rank] = engine_requests(report)

    listener = EndForwardListener(registry, pump.submit, lambda rid, role: None, booked)
    roles: tuple[tuple[InstanceRole, list[int]], ...] = (
        ("prefill", shape.prefill),
        ("decode", shape.decode),
    )
    for role, sizes in roles:
        for number, dp_size in enumerate(sizes):
            worker = registry.add(f"http://{role}-{number}:1", role, 8998)
            info = WorkerInfo(
                dp_size=dp_size,
                chunk_tokens=CHUNK_TOKENS,
                kv_capacity_tokens=KV_TOKENS,
                max_running_requests=1024,
            )
            registry.described(worker, info)
            registry.set_healthy(worker, True)
            registry.refresh(worker)
    engines = _Engines(list(registry))
    spent_s: dict[str, float] = {}
    counted: dict[str, int] = {}
    kinds: tuple[tuple[InstanceRole, str], ...] = (
        ("decode", "forward"),
        ("prefill", "launch"),
        ("prefill", "forward"),
    )
    for number in range(_ROUNDS):
        for role, kind in kinds:
            frames = engines.frames(role, kind, number + 1)
            started_s = time.thread_time()
            for one in frames:
                listener.receive(one)
            if number:  # the first binds senders to workers
                name = f"{role} {kind}"
                spent_s[name] = spent_s.get(name, 0.0) + time.thread_time() - started_s
                counted[name] = counted.get(name, 0) + len(frames)
    pump.close()
    refused = {fate: count for fate, count in listener.counts.items() if fate != "bound"}
    if refused:
        raise RuntimeError(f"messages were refused: {refused}")
    return {name: 1e6 * spent_s[name] / counted[name] for name in spent_s}
