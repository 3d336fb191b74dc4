"""Units of a batch begin, wait and end a few at a time, and only what is needed of them is kept."""

from __future__ import annotations

import asyncio
import gc
import weakref
from itertools import pairwise
from typing import Any

from router_harness import Cluster, cluster, until

from sglang_sbs.router.lanes import LoopTurns
from sglang_sbs.router.relay import attempts, relay
from sglang_sbs.router.relay.pair import Pair
from sglang_sbs.scheduling.events import RequestArrived, RequestEnded
from tools.stand_ins.mock_engine import Behaviour


async def most_per_turn(c: Cluster, kind: type, until_there: int) -> int:
    """Return the most events of a kind that came to the scheduler in one turn of the event loop."""
    most = before = len(c.scheduler.of(kind))
    while before < until_there:
        await asyncio.sleep(0)
        now = len(c.scheduler.of(kind))
        most, before = max(most, now - before), now
    return most


async def test_batches_begin_and_end_a_few_units_at_a_time() -> None:
    async with cluster() as c:
        c.scheduler.hold = True
        batches = [asyncio.create_task(c.generate(text=["a"] * 100)) for _ in range(4)]
        assert await most_per_turn(c, RequestArrived, 400) <= 8
        for batch in batches:
            batch.cancel()
        assert await most_per_turn(c, RequestEnded, 400) <= 8
        await c.settled()
        c.check_books()


async def test_batches_that_are_let_go_at_once_are_sent_a_few_units_at_a_time() -> None:
    async with cluster() as c:
        c.scheduler.hold = True
        batches = [asyncio.create_task(c.generate(text=["a"] * 50)) for _ in range(4)]
        await until(lambda: len(c.scheduler.held) == 200)
        sent: list[int] = []
        worker = c.server.registry.get(c.prefill[0].url)
        assert worker is not None
        for event in list(c.scheduler.held.values()):
            c.server.dispatcher._on_decided(c.scheduler._place(event))
        while worker.dispatches < 200:
            before = worker.dispatches
            await asyncio.sleep(0)
            sent.append(worker.dispatches - before)
        assert max(sent) <= 8
        assert {status for status, _ in await asyncio.gather(*batches)} == {200}
        await c.settled()


async def test_senders_take_turns_a_few_in_each_turn_of_the_loop() -> None:
    turns = LoopTurns(2)
    order: list[str] = []

    async def piece(sender: str) -> None:
        await turns.take(sender)
        order.append(sender)

    await turns.take("first")
    await turns.take("first")  # there was room for both
    pieces = [asyncio.create_task(piece(sender)) for sender in "aaaaaab"]
    gone = asyncio.create_task(piece("gone"))
    await asyncio.sleep(0)
    gone.cancel()
    lengths = []
    while len(order) < 7:
        lengths.append(len(order))
        await asyncio.sleep(0)
    assert order.index("b") < 5, "who comes last with a little does not wait for all of the other"
    assert max(b - a for a, b in pairwise(lengths)) <= 2
    await asyncio.gather(*pieces)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not turns._refilling, "it stops when nobody works"


async def test_every_unit_counts_towards_admission() -> None:
    async with cluster("--max-concurrent-requests", "4", "--queue-size", "1") as c:
        c.scheduler.hold = True
        batch = asyncio.create_task(c.generate(text=["a"] * 4))
        await until(lambda: len(c.scheduler.held) == 4)
        waits = asyncio.create_task(c.generate(text="b"))
        await until(lambda: c.server.admission.queued == 1)
        status, _ = await c.generate(text="c")
        assert status == 429
        batch.cancel()
        await until(lambda: len(c.scheduler.held) == 1)  # the one that waited
        waits.cancel()
        await until(lambda: c.server.admission.running == 0)
        await c.settled()


async def test_a_batch_keeps_so_many_units_ahead_of_prefill(monkeypatch: Any) -> None:
    """Decoding requests are not counted: a batch has all the decode ranks there are."""
    monkeypatch.setattr(relay, "MOST_AHEAD", 8)
    async with cluster() as c:
        c.prefill[0].gate.close()
        c.decode[0].gate.close()
        asked = asyncio.create_task(c.generate(text=["a"] * 20))
        await until(lambda: len(c.prefill[0].requests) == 8)
        await asyncio.sleep(0.05)
        assert len(c.scheduler.of(RequestArrived)) == 8
        c.prefill[0].gate.open()
        await until(lambda: len(c.decode[0].requests) == 20)  # none of them has ended
        assert not c.scheduler.of(RequestEnded)
        c.decode[0].gate.open()
        status, answer = await asked
        assert (status, len(answer)) == (200, 20)
        await c.settled()


async def test_a_unit_that_fails_ends_a_batch_that_waits_for_prefill(monkeypatch: Any) -> None:
    monkeypatch.setattr(relay, "MOST_AHEAD", 8)
    async with cluster() as c:
        c.prefill[0].gate.close()
        c.decode[0].behaviours.append(Behaviour(status=400))
        status, _ = await c.generate(text=["a"] * 20)
        assert status == 400
        await c.settled()
        assert len(c.scheduler.of(RequestArrived)) == 8


async def test_of_what_a_batch_is_answered_only_the_answers_are_kept(monkeypatch: Any) -> None:
    pairs: list[weakref.ref[Pair]] = []

    class Watched(Pair):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            pairs.append(weakref.ref(self))

    monkeypatch.setattr(attempts, "Pair", Watched)
    async with cluster() as c:
        gate = c.decode[0].gate
        gate.close()
        asked = asyncio.create_task(c.generate(text=["a"] * 40))
        await gate.arrived(40)
        gate.release(39)
        await until(lambda: len(c.scheduler.of(RequestEnded)) == 39)
        gc.collect()
        assert sum(ref() is not None for ref in pairs) <= 3
        gate.open()
        assert (await asked)[0] == 200


async def test_a_batch_larger_than_the_door_gets_all_of_it() -> None:
    async with cluster("--max-concurrent-requests", "2") as c:
        status, answers = await c.generate(text=["a"] * 5)
        assert (status, len(answers)) == (200, 5)
        assert c.server.admission.running == 0
