"""KV events over real sockets: which engines are listened to, and those that cannot be reached."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest
import zmq
from kv_system import RANKS, URL, system
from router_harness import until

from sglang_sbs.router.options.config import PrefixWish
from sglang_sbs.router.signals import kv_subscriber
from sglang_sbs.router.signals.kv_subscriber import KvEventSubscriber
from sglang_sbs.router.signals.kv_times import KvTimes
from sglang_sbs.router.workers.server_info import (
    KvEventsBlock,
)
from tools.stand_ins.kv_publisher import removed, stored
from tools.stand_ins.ports import free_ports


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
            await asyncio.sleep(2 * here.subscriber.times.subscribed_s)
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
        here.up()
        assert "kv_events" not in here.worker.problems, "it was started again, with other flags"


async def test_ranks_that_cannot_be_reached_fall_back_until_they_can() -> None:
    async with system(start=False, times=KvTimes(patience_s=0.3, tick_s=0.05)) as here:
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


@pytest.mark.parametrize(("wish", "problem"), [("auto", None), ("events", "--kv-events-config")])
async def test_events_that_did_not_arrive_are_no_problem_of_an_engine_that_publishes_none(
    wish: PrefixWish, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with system(wish, times=KvTimes(patience_s=0.1, tick_s=0.05)) as here:
        here.source = KvEventsBlock(port=free_ports(RANKS)[0], host="*")
        here.up()
        await until(lambda: "kv_events" in here.worker.problems)
        here.up()
        assert "no KV events from" in here.worker.problems["kv_events"]
        here.up(kv_events=None)
        found = here.worker.problems.get("kv_events")
        assert found is None if problem is None else found is not None and problem in found


async def test_the_port_of_another_rank_is_noticed() -> None:
    async with system(start=False, times=KvTimes(tick_s=0.05)) as here:
        here.publishers = [here.publisher(0), here.publisher(1, dp_rank=0)]
        for publisher in here.publishers:
            await publisher.start()
            publisher.publish(stored(1))
        here.up()
        await until(lambda: here.sources == ["events", "approximate"])
        assert "a DP rank other than" in here.worker.problems["kv_events"]
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


async def test_a_long_past_is_learned_to_its_end() -> None:
    """More than the engine's socket holds: what that drops is asked for again."""
    async with system(times=KvTimes(replay_silence_s=0.3, tick_s=0.05)) as here:
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

    def full(kind: int, hwm: int) -> Any:
        if kind == zmq.DEALER:
            raise zmq.ZMQError(errno.EMFILE)
        return KvEventSubscriber.socket(here.subscriber, kind, hwm)

    async with system(times=KvTimes(subscribed_s=0.01)) as here:
        here.publishers[0].publish(stored(1))
        monkeypatch.setattr(here.subscriber, "socket", full)
        here.up()
        await until(lambda: min(here.count("replays", rank) for rank in range(RANKS)) >= 5)
        assert caplog.text.count("following KV events of") == RANKS
        monkeypatch.undo()
        await here.believes({1})


async def test_an_engine_that_answers_no_replay_is_followed_all_the_same() -> None:
    async with system(replay=False, times=KvTimes(replay_silence_s=0.1, tick_s=0.05)) as here:
        port = free_ports(RANKS)[0]
        here.source = KvEventsBlock(port=here.source.port, replay_port=port, host="*")
        here.up()
        await here.publishers[0].subscribed()
        await until(lambda: here.count("replays") >= 3 and here.count("lost") == 1)
        here.publishers[0].publish(stored(1))
        await here.believes({1})
