"""One rank's KV events: whatever is lost, what the scheduler receives stays the truth."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from kv_batches import decode_kv_batch

from sglang_sbs.router.signals import kv_rank_feed
from sglang_sbs.router.signals.kv_messages import END_OF_REPLAY, KvBatch
from sglang_sbs.router.signals.kv_rank_feed import RankFeed
from sglang_sbs.scheduling.events import BlocksCleared, BlocksRemoved, BlocksStored, Event
from sglang_sbs.wire import MalformedMessage

pack = msgspec.msgpack.encode
Held = set[tuple[str, int]]


class Publisher:
    """SGLang's: a cache, numbered batches, and the last of them kept for replays."""

    def __init__(self, dp_rank: int = 1, keeps: int = 1000, since_s: float = 100.0) -> None:
        self.dp_rank = dp_rank
        self.keeps = keeps
        self.cache: Held = set()
        self.sent: list[bytes] = []
        self._now_s = since_s

    def publish(self, *events: dict[str, Any]) -> tuple[int, bytes]:
        self._now_s += 1
        for event in events:
            tier = "device" if event.get("medium", "GPU") == "GPU" else "host"
            names = {(tier, block) for block in event.get("block_hashes", ())}
            if event["type"] == "BlockStored":
                self.cache |= names
            elif event["type"] == "BlockRemoved":
                self.cache -= names
            else:
                self.cache.clear()
        self.sent.append(pack([self._now_s, list(events), self.dp_rank]))
        return len(self.sent) - 1, self.sent[-1]

    def store(self, *blocks: int, medium: str = "GPU") -> tuple[int, bytes]:
        return self.publish({"type": "BlockStored", "block_hashes": list(blocks), "medium": medium})

    def remove(self, *blocks: int) -> tuple[int, bytes]:
        return self.publish({"type": "BlockRemoved", "block_hashes": list(blocks)})

    def flush(self) -> tuple[int, bytes]:
        return self.publish({"type": "AllBlocksCleared"})

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        oldest = max(0, len(self.sent) - self.keeps)
        kept = [(seq, self.sent[seq]) for seq in range(max(start, oldest), len(self.sent))]
        return [*kept, (END_OF_REPLAY, b"")]


def batch_in(payload: bytes) -> KvBatch | None:
    try:
        return decode_kv_batch(payload)
    except MalformedMessage:
        return None


class Asking(RankFeed):
    """Notes where each replay is to begin."""

    asked: list[int]

    def _replay_from(self, seq: int) -> None:
        super()._replay_from(seq)
        self.asked.append(self.asked_from)


class Followed:
    """A feed and what the scheduler would believe after the events it was given."""

    def __init__(self, *, replays: bool = True) -> None:
        self.events: list[Event] = []
        self.belief: Held = set()
        self.asked: list[int] = []
        self.unread: list[tuple[int, bytes]] = []
        self.feed = Asking("http://p", 1, self.take, replays, Counter())
        self.feed.asked = self.asked

    def take(self, event: Event) -> None:
        self.events.append(event)
        match event:
            case BlocksStored():
                self.belief |= {(event.tier, block) for block in event.blocks}
            case BlocksRemoved():
                self.belief -= {(event.tier, block) for block in event.blocks}
            case BlocksCleared():
                self.belief.clear()
            case _:
                pytest.fail(f"{event}")
        assert (event.instance, event.dp_rank) == ("http://p", 1)

    def answer(self, publisher: Publisher, lose: Callable[[int], bool] = lambda seq: False) -> None:
        """Answer the replay it waits for."""
        for seq, payload in publisher.replay(self.asked.pop()):
            if not lose(seq):
                self.feed.replayed(seq, batch_in(payload))
        self.go_on()

    def replay_failed(self) -> None:
        self.feed.replay_failed()
        self.go_on()

    def live(self, seq: int, payload: bytes) -> None:
        self.unread.append((seq, payload))
        self.go_on()

    def go_on(self) -> None:
        """Read on like the socket, which holds messages during a replay."""
        while self.unread and not self.feed.replaying:
            seq, payload = self.unread.pop(0)
            self.feed.live(seq, batch_in(payload))


def connected_to(publisher: Publisher) -> Followed:
    followed = Followed()
    followed.feed.connected()
    followed.answer(publisher)
    return followed


def test_a_connection_begins_with_what_is_left_of_the_past() -> None:
    publisher = Publisher()
    publisher.store(1, 2, 3)
    publisher.store(2, medium="CPU_PINNED")
    publisher.remove(1)
    followed = connected_to(publisher)
    assert followed.belief == publisher.cache == {("device", 2), ("device", 3), ("host", 2)}
    assert [type(event) for event in followed.events] == [BlocksStored, BlocksStored]


def test_one_event_per_kind_of_a_message_in_its_order() -> None:
    publisher = Publisher()
    followed = connected_to(publisher)
    followed.live(
        *publisher.publish(
            {"type": "BlockRemoved", "block_hashes": [9]},
            {"type": "BlockStored", "block_hashes": [1]},
            {"type": "BlockStored", "block_hashes": [9]},
        )
    )
    followed.live(*publisher.flush())
    followed.live(*publisher.store(4))
    assert [type(event) for event in followed.events] == [
        *(BlocksRemoved, BlocksStored, BlocksCleared, BlocksStored)
    ]
    assert followed.belief == publisher.cache


def test_very_many_blocks_come_in_several_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_rank_feed, "MAX_BLOCKS_PER_EVENT", 10)
    publisher = Publisher()
    followed = connected_to(publisher)
    followed.live(*publisher.store(*range(25)))
    assert [len(event.blocks) for event in followed.events] == [10, 10, 5]  # type: ignore[union-attr]
    assert followed.belief == publisher.cache


def test_what_comes_during_the_replay_follows_it_once() -> None:
    publisher = Publisher()
    publisher.store(1)
    followed = Followed()
    followed.feed.connected()
    followed.live(*publisher.store(2))
    followed.live(*publisher.remove(1))
    assert followed.events == []
    followed.answer(publisher)
    followed.live(*publisher.store(3))
    assert followed.belief == publisher.cache
    assert followed.feed.counts["gaps"] == 0


def test_a_gap_is_replayed_from_there() -> None:
    publisher = Publisher()
    followed = connected_to(publisher)
    followed.live(*publisher.store(1, 2))
    publisher.remove(1)
    publisher.store(3)
    followed.live(*publisher.store(4))
    followed.live(*publisher.store(5))
    assert followed.asked == [1]
    followed.answer(publisher)
    assert followed.belief == publisher.cache
    assert followed.feed.counts["gaps"] == 1
    assert followed.feed.counts["lost"] == 0
    assert BlocksCleared not in {type(event) for event in followed.events}


@pytest.mark.parametrize("keeps", [0, 1, 2])
def test_a_gap_that_the_engine_has_forgotten_clears_the_rank(keeps: int) -> None:
    publisher = Publisher(keeps=keeps)
    followed = connected_to(publisher)
    followed.live(*publisher.store(1, 2))
    publisher.remove(1)
    publisher.store(3)
    followed.live(*publisher.store(4))
    followed.answer(publisher)
    assert followed.feed.counts["lost"] == 1
    assert ("device", 4) in followed.belief
    assert followed.belief <= publisher.cache
    followed.live(*publisher.store(6))
    assert ("device", 6) in followed.belief
    assert followed.asked == []


def test_without_replays_a_gap_clears_the_rank() -> None:
    publisher = Publisher()
    followed = Followed(replays=False)
    publisher.store(9)
    followed.feed.connected()
    followed.live(*publisher.store(1))
    publisher.remove(1)
    followed.live(*publisher.store(4))
    assert followed.belief == {("device", 4)}


def test_a_batch_that_cannot_be_read_is_a_loss() -> None:
    publisher = Publisher()
    followed = connected_to(publisher)
    followed.live(*publisher.store(1))
    publisher.remove(1)
    followed.live(1, b"\xc1")
    followed.live(*publisher.store(2))
    assert followed.belief == {("device", 2)}
    assert followed.feed.counts["malformed"] == 1


def test_a_malformed_batch_in_a_replay_is_skipped() -> None:
    publisher = Publisher()
    publisher.store(1)
    publisher.remove(1)
    publisher.store(2)
    publisher.sent[1] = b"\xc1"
    assert connected_to(publisher).belief == {("device", 2)}


def test_a_broken_connection_forgets_and_begins_anew() -> None:
    publisher = Publisher()
    followed = connected_to(publisher)
    followed.live(*publisher.store(1))
    followed.feed.disconnected()
    assert followed.belief == set()
    again = Publisher(since_s=500.0)
    again.store(7)
    followed.feed.connected()
    followed.answer(again)
    followed.live(*again.store(8))
    assert followed.belief == again.cache == {("device", 7), ("device", 8)}


@pytest.mark.parametrize("missed", [0, 1, 3])
def test_numbers_that_go_back_are_another_publisher(missed: int) -> None:
    publisher = Publisher()
    followed = connected_to(publisher)
    for block in range(5):
        followed.live(*publisher.store(block))
    again = Publisher(since_s=500.0)
    for block in range(missed):
        again.store(100 + block)
    followed.live(*again.store(200))
    if missed:
        followed.answer(again)
    followed.live(*again.store(201))
    assert followed.belief == again.cache


def test_batches_of_another_rank_are_not_taken() -> None:
    followed = connected_to(Publisher())
    followed.live(*Publisher(dp_rank=0).store(1))
    assert followed.events == []
    assert followed.feed.counts["foreign"] == 1


def test_a_long_replay_of_which_parts_are_dropped_is_completed() -> None:
    """An engine's ROUTER drops what exceeds its high-water mark."""
    publisher = Publisher()
    for block in range(100):
        publisher.store(block)
        publisher.remove(block // 2)
    followed = Followed()
    followed.feed.connected()
    for upto in (60, 120, 180, 200):
        followed.answer(publisher, lose=lambda seq, upto=upto: not 0 <= seq < upto)  # type: ignore[misc]
        followed.replay_failed()  # silence: the end was dropped too
    followed.answer(publisher)
    assert followed.belief == publisher.cache
    assert followed.feed.counts["replays"] == 5


def test_the_end_of_a_long_replay_is_not_believed_at_once() -> None:
    publisher = Publisher()
    for block in range(300):
        publisher.store(block)
    publisher.flush()
    followed = Followed()
    followed.feed.connected()
    followed.answer(publisher, lose=lambda seq: seq >= 290)
    assert followed.asked == [290]
    followed.answer(publisher)
    assert followed.belief == publisher.cache == set()
    assert not followed.feed.replaying


def test_a_hole_in_a_replay_is_asked_for_again() -> None:
    publisher = Publisher()
    for block in range(10):
        publisher.store(block)
    followed = Followed()
    followed.feed.connected()
    followed.answer(publisher, lose=lambda seq: seq == 4)
    assert followed.asked == [4]
    followed.answer(publisher)
    assert followed.belief == publisher.cache


def test_an_engine_that_answers_no_replay_is_followed_from_now_on() -> None:
    publisher = Publisher()
    publisher.store(1)
    followed = Followed()
    followed.feed.connected()
    followed.live(*publisher.store(2))
    for _ in range(3):
        followed.replay_failed()
    followed.live(*publisher.store(3))
    assert followed.belief == {("device", 2), ("device", 3)}
    followed.asked.clear()
    publisher.remove(3)
    followed.live(*publisher.store(4))
    assert followed.asked == []
    assert followed.belief == {("device", 4)}


@pytest.mark.parametrize("seed", range(200))
def test_under_any_losses_nothing_is_believed_that_is_not_there(seed: int) -> None:
    """And nothing lacks in the end, unless something could not be had again."""
    draw = random.Random(seed)
    publisher = Publisher(keeps=draw.choice([3, 10, 1000, 1000]))
    replays = draw.random() < 0.8
    followed = Followed(replays=replays)
    followed.feed.connected()

    def settle(losing: bool) -> None:
        while followed.asked:
            if losing and draw.random() < 0.2:
                followed.asked.pop()
                followed.replay_failed()
            else:
                lossy = losing and draw.random() < 0.5
                followed.answer(publisher, lambda seq, p=0.1 * lossy: draw.random() < p)  # type: ignore[misc]
                if followed.feed.replaying and not followed.asked:
                    followed.replay_failed()  # the end was lost

    for _ in range(120):
        kind = draw.random()
        if kind < 0.6:
            message = publisher.store(*draw.sample(range(30), 3))
        elif kind < 0.95:
            message = publisher.remove(*draw.sample(range(30), 3))
        elif kind < 0.97:
            message = publisher.flush()
        else:
            publisher = Publisher(keeps=publisher.keeps, since_s=1e3 * len(publisher.sent) + 1e6)
            followed.feed.disconnected()
            followed.feed.connected()
            message = publisher.store(1)
        if draw.random() < 0.9:
            followed.live(*message)
            settle(losing=True)
            # The end of a replay may be there and what was before it not, until the next batch.
            assert followed.belief <= publisher.cache or replays
    followed.live(*publisher.store(31))
    settle(losing=False)
    assert followed.belief <= publisher.cache
    if followed.feed.counts["lost"] == 0 and publisher.keeps == 1000:
        assert followed.belief == publisher.cache
