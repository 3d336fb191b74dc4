"""KV events over real sockets: the past and what happens, replays and restarts."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

import msgspec
import pytest
from kv_system import URL, system
from router_harness import TIMEOUT_S, until

from sglang_sbs.router.signals import kv_rank_feed, kv_subscriber
from sglang_sbs.router.signals.kv_messages import MAX_EVENT_BLOCKS
from sglang_sbs.router.signals.kv_times import KvTimes
from sglang_sbs.router.workers.server_info import (
    SbsBlock,
)
from sglang_sbs.scheduling.events import (
    BlocksCleared,
)
from tools.stand_ins.kv_publisher import _END, cleared, removed, stored


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


async def test_very_many_blocks_are_sent_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop has other things to do between any two of them."""
    async with system(times=KvTimes(turn_s=0.0)) as here:
        here.up()
        await until(lambda: here.subscriber.counts_of(URL, 0)["replays"] > 0)
        sent_turns: list[int] = []
        turns = 0
        monkeypatch.setattr(here.subscriber, "_submit", lambda event: sent_turns.append(turns))
        here.publishers[0].publish(stored(*range(10 * kv_rank_feed.MAX_BLOCKS_PER_EVENT)))
        while len(sent_turns) < 10:
            turns += 1
            await asyncio.sleep(0)
        assert sorted(set(sent_turns)) == sent_turns
        here.publishers[0].publish(stored(*range(MAX_EVENT_BLOCKS + 1)))
        await until(lambda: here.count("malformed") == 1)


async def test_others_get_turns_while_a_large_message_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Messages behind it wait, as they report later changes of the same blocks."""
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
    async with system(times=KvTimes(turn_s=0.0)) as here:
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
    """The messages stay in its socket, and nothing polls there all the time."""
    looks = 0
    turn = kv_subscriber._RankConnection._turn

    async def counted(rank: Any) -> None:
        nonlocal looks
        looks += 1
        await turn(rank)

    monkeypatch.setattr(kv_subscriber._RankConnection, "_turn", counted)
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


async def test_what_comes_during_a_replay_is_bounded_by_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dropped messages are asked for again."""
    monkeypatch.setattr(kv_subscriber, "_MOST_HELD_BYTES", 5000)
    async with system() as here:
        first, loop = here.publishers[0], asyncio.get_running_loop()
        first.publish(stored(100))
        loop.remove_reader(first._fd)
        here.up()
        await until(lambda: here.count("replays") == 1)
        assert first._replay.poll(1000)
        asked, *_ = first._replay.recv_multipart()
        for block in range(50):
            first.publish(stored(block))
        rank = here.subscriber._instances[URL].ranks[0]
        await until(lambda: rank._held and rank._held[-1][1] == (50).to_bytes(8, "big"))
        assert sum(64 + len(frame) for frame in chain(*rank._held)) <= 5000
        first._replay.send_multipart([asked, b"", b"", bytes(8), first._sent[0]])
        first._replay.send_multipart([asked, b"", b"", _END, b""])
        loop.add_reader(first._fd, first._answer)
        await here.believes({*range(50), 100})
        assert (here.count("gaps"), here.count("replays"), here.count("lost")) == (1, 2, 0)


async def test_while_the_scheduler_is_behind_nothing_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_subscriber, "_MOST_QUEUED", 1)
    async with system() as here:
        here.up()
        await here.publishers[0].subscribed()
        here.publishers[0].publish(stored(9))
        await here.believes({9})
        before = here.count("events")
        with monkeypatch.context() as busy:
            busy.setattr(here.subscriber, "_submit_soon", lambda: None)
            for block in range(5):
                here.publishers[0].publish(stored(block))
            await asyncio.sleep(0.2)
            assert here.count("events") <= before + 1
        here.subscriber._submit_soon()
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


async def test_without_a_replay_endpoint_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with system(replay=False) as here:
        first, followed = here.publishers[0], asyncio.Event()
        here.up()
        feed = here.subscriber._instances[URL].ranks[0].feed
        connected = feed.connected
        monkeypatch.setattr(feed, "connected", lambda: (connected(), followed.set()))
        await first.subscribed()
        await followed.wait()  # what came before is passed over
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


async def test_the_cache_of_a_worker_that_stays_down_is_forgotten() -> None:
    async with system(times=KvTimes(keep_s=0.0, tick_s=0.05)) as here:
        here.up()
        await here.publishers[0].subscribed()
        here.publishers[0].publish(stored(1))
        await here.believes({1})
        here.registry.set_healthy(here.worker, False, "test")
        await here.believes(set())
        before = len(here.events)
        here.publishers[0].publish(stored(2))
        await asyncio.sleep(0.05)
        assert len(here.events) == before
        here.registry.set_healthy(here.worker, True)
        await here.believes({1, 2})


async def test_the_cache_of_a_restarted_worker_is_forgotten_at_once() -> None:
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


async def test_the_cache_of_a_removed_worker_is_forgotten() -> None:
    async with system() as here:
        here.up()
        here.publishers[0].publish(stored(1))
        await here.believes({1})
        here.registry.remove(here.worker)
        here.subscriber.removed(URL)
        assert here.held(0) == set()
        assert not [line for family in here.subscriber.families() for line in family.samples]
