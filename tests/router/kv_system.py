"""A worker whose ranks publish KV events over real sockets, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from router_harness import until

from sglang_sbs.router.options.config import PrefixWish
from sglang_sbs.router.signals.kv_subscriber import KvEventSubscriber
from sglang_sbs.router.signals.kv_times import KvTimes
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import (
    KvEventsBlock,
    WorkerInfo,
)
from sglang_sbs.router.workers.worker import WorkerEvents
from sglang_sbs.scheduling.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    InstanceDown,
    InstanceUp,
)
from tools.stand_ins.kv_publisher import KvPublisher
from tools.stand_ins.ports import free_ports

URL = "http://127.0.0.1:30000"
RANKS = 2


class System:
    """A worker with two ranks that publish, and the events that the scheduler receives."""

    def __init__(
        self,
        wish: PrefixWish = "auto",
        *,
        replay: bool = True,
        topic: str = "",
        times: KvTimes | None = None,
    ) -> None:
        first = free_ports(2 * RANKS)[0]
        self.replay = replay
        self.source = KvEventsBlock(
            port=first,
            replay_port=first + RANKS if replay else None,
            topic=topic,
            block_tokens=4,
            host="*",
        )
        self.events: list[Event] = []
        self.publishers = [self.publisher(rank) for rank in range(RANKS)]
        self.registry = Registry(WorkerEvents(self._emit), prefix_source=wish)
        self.subscriber = KvEventSubscriber(self.registry, self.events.append, times)
        self.worker = self.registry.add(URL, "prefill")

    def publisher(self, rank: int, dp_rank: int | None = None) -> KvPublisher:
        return KvPublisher(
            self.source.port + rank,
            self.source.port + RANKS + rank if self.replay else None,
            dp_rank=rank if dp_rank is None else dp_rank,
            topic=self.source.topic,
        )

    def _emit(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, InstanceDown):
            self.subscriber.down(self.worker)
        if isinstance(event, InstanceUp):
            self.subscriber.up(self.worker)

    def up(self, **fields: Any) -> None:
        info = WorkerInfo(**{"dp_size": RANKS, "page_size": 4, "kv_events": self.source} | fields)
        self.registry.described(self.worker, info)
        self.registry.set_healthy(self.worker, True)

    async def restart(self, rank: int) -> None:
        self.publishers[rank].stop()
        self.publishers[rank] = self.publisher(rank)
        self.publishers[rank].now_s = 1e6
        await self.publishers[rank].start()

    def held(self, rank: int, tier: str = "device") -> set[int]:
        """Return the blocks that the scheduler would count as held."""
        blocks: set[int] = set()
        for event in self.events:
            if isinstance(event, InstanceDown | InstanceUp):
                continue
            assert isinstance(event, BlocksStored | BlocksRemoved | BlocksCleared)
            if (event.instance, event.dp_rank) != (URL, rank):
                continue
            if isinstance(event, BlocksCleared):
                blocks.clear()
            elif event.tier == tier:
                named = set(event.blocks)
                blocks = blocks | named if isinstance(event, BlocksStored) else blocks - named
        return blocks

    @property
    def sources(self) -> list[str]:
        return [event.prefix_source for event in self.events if isinstance(event, InstanceUp)]

    async def believes(self, *ranks: set[int]) -> None:
        await until(lambda: [self.held(rank) for rank in range(len(ranks))] == list(ranks))

    def count(self, kind: str, rank: int = 0) -> int:
        return self.subscriber.counts_of(URL, rank)[kind]


@asynccontextmanager
async def system(*args: Any, start: bool = True, **options: Any) -> AsyncIterator[System]:
    here = System(*args, **options)
    if start:
        for publisher in here.publishers:
            await publisher.start()
    try:
        yield here
    finally:
        await here.subscriber.close()
        for publisher in here.publishers:
            if start:
                publisher.stop()
