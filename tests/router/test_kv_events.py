"""KV events over real sockets: discovery, replays, restarts, and engines that cannot be heard."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
from router_harness import TIMEOUT_S, until

from sglang_sbs.router.options.config import PrefixWish
from sglang_sbs.router.signals import kv_rank_feed, kv_subscriber
from sglang_sbs.router.signals.kv_messages import MAX_EVENT_BLOCKS
from sglang_sbs.router.signals.kv_subscriber import KvEventSubscriber
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import (
    KvEventsBlock,
    SbsBlock,
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
from tools.stand_ins.kv_publisher import KvPublisher, cleared, removed, stored
from tools.stand_ins.ports import free_ports

URL = "http://127.0.0.1:30000"
RANKS = 2


class System:
    """A worker with two ranks that publish, and what the scheduler is told of them."""

    def __init__(self, wish: PrefixWish = "auto", *, replay: bool = True, topic: str = "") -> None:
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
        self.subscriber = KvEventSubscriber(self.registry, self.events.append)
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
        """What the scheduler would believe."""
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


async def test_the_past_and_then_what_happens_of_every_rank() -> None:
    async with system(topic="kv") as here:
        first, second = here.publishers
        first.publish(stored(1, 2), stored(3, medium="CPU_PINNED"))
        first.publish(removed(1))
        here.up()
        await here.believes({2}, set())
        assert here.held(0, "host") == {3}
        second.publish(["BlockStored", [7, 8], None, [1] * 8, 4, None, "GPU"])  # <= 0.5.18
        first.publish(stored(4))
        await here.believes({2, 4}, {7, 8})
        first.publish(cleared())
        second.publish(["BlockRemoved", [7], "GPU"])
        await here.believes(set(), {8})
        assert here.sources == ["events"]


async def test_very_many_blocks_are_told_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop has other things to do between any two of them."""
    monkeypatch.setattr(kv_subscriber, "TURN_S", 0.0)
    async with system() as here:
        here.up()
        await until(lambda: here.subscriber.counts_of(URL, 0)["replays"] > 0)
        told: list[int] = []
        turns = 0
        monkeypatch.setattr(here.subscriber, "_submit", lambda event: told.append(turns))
        here.publishers[0].publish(stored(*range(10 * kv_rank_feed.MAX_BLOCKS_PER_EVENT)))
        while len(told) < 10:
            turns += 1
            await asyncio.sleep(0)
        assert sorted(set(told)) == told
        here.publishers[0].publish(stored(*range(MAX_EVENT_BLOCKS + 1)))
        await until(lambda: here.count("malformed") == 1)


async def test_others_get_turns_while_a_large_message_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What comes behind it waits, as it says what became of the same blocks later."""
    monkeypatch.setattr(kv_subscriber, "TURN_S", 0.0)
    turns = 0
    decoded_in: set[int] = set()
    decode = kv_subscriber.decode_in_parts

    def watched(payload: bytes) -> Any:
        parts = decode(payload)
        while True:
            decoded_in.add(turns)
            try:
                next(parts)
            except StopIteration as over:
                return over.value
            yield

    monkeypatch.setattr(kv_subscriber, "decode_in_parts", watched)
    async with system() as here:
        first = here.publishers[0]
        first.publish(*map(stored, range(8000)))  # comes with the replay
        first.publish(stored(8000))
        here.up()
        async with asyncio.timeout(TIMEOUT_S):
            while here.count("stored") < 8001:
                turns += 1
                await asyncio.sleep(0)
        assert len(decoded_in) > 8
        first.publish(*map(removed, range(8000)))
        first.publish(stored(1))
        first.publish(stored(2), {"type": "BlockStored", "token_ids": [0] * 100_000})
        first.publish(stored(3))
        await until(lambda: here.count("malformed") == 1)
        await here.believes({3})


async def test_what_comes_during_a_replay_waits_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In its socket, and nobody looks there all the time."""
    looks = 0
    turn = kv_subscriber._Rank._turn

    async def counted(rank: Any) -> None:
        nonlocal looks
        looks += 1
        await turn(rank)

    monkeypatch.setattr(kv_subscriber._Rank, "_turn", counted)
    async with system() as here:
        first, loop = here.publishers[0], asyncio.get_running_loop()
        first.publish(stored(1))
        loop.remove_reader(first._fd)  # it answers later
        here.up()
        await until(lambda: here.count("replays") == 1)
        first.publish(removed(1))
        first.publish(stored(2))
        looks = 0
        await asyncio.sleep(0.3)
        assert here.held(0) == set()
        assert looks < 50
        loop.add_reader(first._fd, first._answer)
        first._answer()
        await here.believes({2})
        first.publish(stored(3))
        await here.believes({2, 3})
        assert (here.count("gaps"), here.count("replays")) == (0, 1)


async def test_while_the_scheduler_is_behind_nothing_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_subscriber, "_MOST_UNTOLD", 1)
    async with system() as here:
        here.up()
        await here.publishers[0].subscribed()
        here.publishers[0].publish(stored(9))
        await here.believes({9})
        before = here.count("events")
        with monkeypatch.context() as busy:
            busy.setattr(here.subscriber, "_tell_soon", lambda: None)
            for block in range(5):
                here.publishers[0].publish(stored(block))
            await asyncio.sleep(0.2)
            assert here.count("events") <= before + 1
        here.subscriber._tell_soon()
        await here.believes({*range(5), 9})


async def test_a_lost_batch_is_asked_for_again() -> None:
    async with system() as here:
        here.up()
        await here.publishers[0].subscribed()
        here.publishers[0].publish(stored(1, 2))
        await here.believes({1, 2})
        here.publishers[0].publish(removed(1), lose=True)
        here.publishers[0].publish(stored(3))
        await here.believes({2, 3})
        assert (here.count("gaps"), here.count("lost")) == (1, 0)
        assert not [event for event in here.events if isinstance(event, BlocksCleared)]


async def test_a_lost_batch_that_is_gone_clears_the_rank() -> None:
    async with system() as here:
        first = here.publishers[0]
        here.up()
        await first.subscribed()
        first.publish(stored(1, 2))
        await here.believes({1, 2})
        first.publish(removed(1), lose=True)
        first.forgotten = first.seq
        first.publish(stored(3))
        await here.believes({3})
        assert (here.count("gaps"), here.count("lost")) == (1, 1)


async def test_without_a_replay_endpoint_too() -> None:
    async with system(replay=False) as here:
        first = here.publishers[0]
        here.up()
        await first.subscribed()
        await until(lambda: all(rank.connected for rank in here.subscriber._instances[URL].ranks))
        await asyncio.sleep(2 * kv_subscriber._SUBSCRIBED_S)
        first.publish(stored(1, 2))
        await here.believes({1, 2})
        first.publish(removed(1), lose=True)
        first.publish(stored(3))
        await here.believes({3})


async def test_a_publisher_that_restarts_is_learned_anew() -> None:
    async with system() as here:
        here.up()
        await here.publishers[0].subscribed()
        here.publishers[0].publish(stored(1))
        here.publishers[1].publish(stored(9))
        await here.believes({1}, {9})
        await here.restart(0)
        await here.believes(set(), {9})
        here.publishers[0].publish(stored(5))
        await here.believes({5}, {9})


async def test_garbage_is_counted_and_survived() -> None:
    async with system(topic="kv") as here:
        first = here.publishers[0]
        here.up()
        await first.subscribed()
        first.publish(stored(1))
        await here.believes({1})
        for frames in (
            [b"kv"],
            [b"kv", b"1", b"x"],
            [b"kvv", bytes(8), b"x"],
            [b"kv", b"\xff" * 8, b"x"],
        ):
            first.send(frames)
        first.send([b"other", bytes(8), b"x"])
        first.publish(stored(2))
        await here.believes({1, 2})
        first._sent.append(b"\xc1")
        first.send([b"kv", (first.seq - 1).to_bytes(8, "big"), b"\xc1"])
        first.publish(stored(3))
        await here.believes({3})
        assert here.count("malformed") == 5


async def test_an_instance_that_is_down_for_a_moment_is_listened_to_meanwhile() -> None:
    async with system() as here:
        here.up()
        await here.publishers[0].subscribed()
        here.publishers[0].publish(stored(1))
        await here.believes({1})
        here.registry.set_healthy(here.worker, False, "test")
        here.publishers[0].publish(stored(2))
        await here.believes({1, 2})
        here.registry.set_healthy(here.worker, True)
        assert here.publishers[0].replays == 1
        assert not [event for event in here.events if isinstance(event, BlocksCleared)]


async def test_one_that_stays_down_is_forgotten_and_learned_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_subscriber, "KEEP_S", 0.0)
    monkeypatch.setattr(kv_subscriber, "_TICK_S", 0.05)
    async with system() as here:
        here.up()
        await here.publishers[0].subscribed()
        here.publishers[0].publish(stored(1))
        await here.believes({1})
        here.registry.set_healthy(here.worker, False, "test")
        await here.believes(set())
        told = len(here.events)
        here.publishers[0].publish(stored(2))
        await asyncio.sleep(0.05)
        assert len(here.events) == told
        here.registry.set_healthy(here.worker, True)
        await here.believes({1, 2})


async def test_one_that_restarted_by_its_boot_id_is_forgotten_at_once() -> None:
    async with system() as here:
        here.up(sbs=SbsBlock(boot_id="a"))
        await here.publishers[0].subscribed()
        here.publishers[0].publish(stored(1))
        await here.believes({1})
        info = here.worker.info
        assert info is not None
        here.registry.described(
            here.worker, msgspec.structs.replace(info, sbs=SbsBlock(boot_id="b"))
        )
        assert here.held(0) == set()
        here.registry.refresh(here.worker)
        await here.believes({1})  # what it replays is what it holds


async def test_one_that_is_removed_is_forgotten() -> None:
    async with system() as here:
        here.up()
        here.publishers[0].publish(stored(1))
        await here.believes({1})
        here.registry.remove(here.worker)
        here.subscriber.removed(URL)
        assert here.held(0) == set()
        assert not [line for family in here.subscriber.families() for line in family.samples]


@pytest.mark.parametrize(
    ("wish", "expected"),
    [("auto", "events"), ("events", "events"), ("approximate", "approximate"), ("off", "off")],
)
async def test_the_flag_has_the_last_word(wish: PrefixWish, expected: str) -> None:
    async with system(wish) as here:
        here.publishers[0].publish(stored(1))
        here.up()
        assert here.sources == [expected]
        if expected == "events":
            await here.believes({1})
        else:
            await asyncio.sleep(2 * kv_subscriber._SUBSCRIBED_S)
            assert here.held(0) == set()


@pytest.mark.parametrize(
    ("fields", "wish", "expected"),
    [
        ({"kv_events": None}, "auto", "approximate"),
        ({"kv_events": None}, "events", "off"),
        ({"radix_cache": False}, "auto", "off"),
    ],
)
async def test_engines_that_publish_nothing(
    fields: dict[str, Any], wish: PrefixWish, expected: str
) -> None:
    async with system(wish) as here:
        here.up(**fields)
        assert here.sources == [expected]
        if wish == "events":
            assert "--kv-events-config" in here.worker.problems["kv_events"]


async def test_ranks_that_cannot_be_reached_fall_back_until_they_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_subscriber, "PATIENCE_S", 0.3)
    monkeypatch.setattr(kv_subscriber, "_TICK_S", 0.05)
    async with system(start=False) as here:
        first, second = here.publishers
        await first.start()
        first.publish(stored(1))
        here.up()
        await until(lambda: here.sources == ["events", "approximate"])
        assert f"tcp://127.0.0.1:{second.port}" in here.worker.problems["kv_events"]
        before = len(here.events)
        first.publish(stored(2))
        await second.start()
        second.publish(stored(9))
        await until(lambda: len(here.sources) == 3)
        assert here.sources[-1] == "events"
        del here.events[:before]
        await here.believes({1, 2}, {9})
        assert "kv_events" not in here.worker.problems
        first.stop()
        second.stop()


async def test_the_port_of_another_rank_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_subscriber, "_TICK_S", 0.05)
    async with system(start=False) as here:
        here.publishers = [here.publisher(0), here.publisher(1, dp_rank=0)]
        for publisher in here.publishers:
            await publisher.start()
            publisher.publish(stored(1))
        here.up()
        await until(lambda: here.sources == ["events", "approximate"])
        assert "another DP rank" in here.worker.problems["kv_events"]
        assert here.held(1) == set()
        for publisher in here.publishers:
            publisher.stop()


async def test_only_the_workers_own_host_is_connected_to(caplog: Any) -> None:
    async with system() as here:
        here.source = KvEventsBlock(
            port=here.source.port, replay_port=here.source.replay_port, host="10.9.8.7"
        )
        here.up()
        here.up(chunk_tokens=5)
        ranks = here.subscriber._instances[URL].ranks
        assert [rank.endpoints.live for rank in ranks] == [
            f"tcp://127.0.0.1:{here.source.port + rank}" for rank in range(RANKS)
        ]
        assert len([r for r in caplog.records if "10.9.8.7" in r.getMessage()]) == 1


async def test_many_ranks_take_turns_with_their_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_subscriber, "_MAX_REPLAYS", 1)
    async with system() as here:
        here.publishers[0].publish(stored(1))
        here.publishers[1].publish(stored(2))
        here.up()
        await here.believes({1}, {2})


async def test_a_long_past_is_learned_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the engine's socket holds: what that drops is asked for again."""
    monkeypatch.setattr(kv_subscriber, "_REPLAY_SILENCE_S", 0.3)
    monkeypatch.setattr(kv_subscriber, "_TICK_S", 0.05)
    async with system() as here:
        first = here.publishers[0]
        filler = stored(*range(1_000_000, 1_000_500))
        for block in range(4000):
            first.publish(filler, stored(block), removed(block - 5))
        first.publish(removed(*filler["block_hashes"]))
        here.up()
        await here.believes(set(range(3995, 4000)))
        first.publish(stored(5000))
        await here.believes({*range(3995, 4000), 5000})
        assert here.count("lost") == 0


async def test_without_descriptors_for_replays_it_is_said_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thousand ranks that say so five times a second would leave time for nothing else."""
    monkeypatch.setattr(kv_subscriber, "_SUBSCRIBED_S", 0.01)

    def full(kind: int, hwm: int) -> Any:
        if kind == zmq.DEALER:
            raise zmq.ZMQError(errno.EMFILE)
        return KvEventSubscriber.socket(here.subscriber, kind, hwm)

    async with system() as here:
        here.publishers[0].publish(stored(1))
        monkeypatch.setattr(here.subscriber, "socket", full)
        here.up()
        await until(lambda: min(here.count("replays", rank) for rank in range(RANKS)) >= 5)
        assert caplog.text.count("following KV events of") == RANKS
        monkeypatch.undo()
        await here.believes({1})


async def test_an_engine_that_answers_no_replay_is_followed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_subscriber, "_REPLAY_SILENCE_S", 0.1)
    monkeypatch.setattr(kv_subscriber, "_TICK_S", 0.05)
    async with system(replay=False) as here:
        port = free_ports(RANKS)[0]
        here.source = KvEventsBlock(port=here.source.port, replay_port=port, host="*")
        here.up()
        await here.publishers[0].subscribed()
        await until(lambda: here.count("replays") >= 3 and here.count("lost") == 1)
        here.publishers[0].publish(stored(1))
        await here.believes({1})
