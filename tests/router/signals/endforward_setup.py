"""A listener and the workers that it binds reports to."""

from __future__ import annotations

import asyncio
from typing import Any

from sglang_sbs.router.signals.endforward_listener import EndForwardListener
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import WorkerInfo
from sglang_sbs.router.workers.worker import WorkerEvents
from sglang_sbs.scheduling.events import Event, ForwardEnded
from sglang_sbs.wire import encode_endforward
from tools.stand_ins.mock_engine import MockEngine


class Setup:
    def __init__(self, prefill: str = "10.0.0.1", decode: str = "localhost") -> None:
        """``prefill`` and ``decode`` are hosts."""
        self.events: list[Event] = []
        self.owners: dict[tuple[str, str], str] = {}
        self.registry = Registry(WorkerEvents(self.events.append))
        self.prefill = self.registry.add(f"http://{prefill}:30000", "prefill")
        self.decode = self.registry.add(f"http://{decode}:30001", "decode")
        for worker in (self.prefill, self.decode):
            self.registry.described(worker, WorkerInfo(dp_size=2))
            self.registry.set_healthy(worker, True)
        self.events.clear()
        self.listener = EndForwardListener(
            self.registry, self.events.append, lambda rid, role: self.owners.get((rid, role))
        )

    def receive(self, engine: MockEngine, rank: int = 0, **fields: Any) -> None:
        self.listener.receive(encode_endforward(engine.report(rank, **fields)))

    def bound(self) -> list[str]:
        return [event.instance for event in self.events if isinstance(event, ForwardEnded)]


async def publish_until(engine: MockEngine, condition: Any, **fields: Any) -> None:
    """PUB drops what is sent before the subscription is known: send until it arrives."""
    async with asyncio.timeout(20):
        while not condition():
            for rank in range(engine.dp_size):
                engine.publish(engine.report(rank, **fields))
            await asyncio.sleep(0.01)
