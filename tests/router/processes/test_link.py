"""The session between front ends and scheduler, without sockets or processes: faults on command."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from typing import Any

import pytest
from link_harness import (
    HOLDING,
    IMMEDIATE,
    IMPATIENT,
    FakeLine,
    FrontEnd,
    OneAtATime,
    World,
    submitted,
)
from router_harness import until

from sglang_sbs.dashboard.feed import LocalFeed
from sglang_sbs.router.errors import Refused, RouterError, transport_failure
from sglang_sbs.router.processes import scheduler_link as link_module
from sglang_sbs.router.processes.messages import (
    AbortElsewhere,
    AddWorker,
    Adopted,
    RemoveWorker,
    Unwelcome,
    WatchDashboard,
)
from sglang_sbs.router.processes.session_times import SessionTimes
from sglang_sbs.router.processes.summed_metrics import add_pages
from sglang_sbs.router.workers.served_ranks import WINDOW
from sglang_sbs.scheduling import Command, Dispatch
from sglang_sbs.scheduling.events import (
    Event,
    RequestAdopted,
    RequestArrived,
    RequestEnded,
)


async def test_a_worker_added_again_still_has_its_earlier_requests(world: World) -> None:
    side = await world.boot()
    front_end = await world.front_end()
    for rid in ("a", "b"):
        await front_end.ask(rid)
    side.remove_worker(side.registry.get("http://d0:1"))
    side.add_worker("http://d0:1", "decode", None)
    await front_end.ask("c")
    front_end.link.on_ended("a", "completed")
    front_end.link.on_ended("b", "completed")
    await until(lambda: side.hub.requests == 1)
    worker = side.registry.get("http://d0:1")
    assert worker is not None and worker.active == 1
    front_end.link.on_ended("c", "completed")
    await until(lambda: side.books == (0, 0, 0))


async def test_a_request_from_arrival_to_end(world: World) -> None:
    side = await world.boot()
    front_end = await world.front_end()
    dispatch = await front_end.ask("a")
    assert dispatch.prefill.startswith("http://p")
    assert side.books == (0, 1, 2)
    assert side.hub.find_owner("a", "prefill") == dispatch.prefill
    front_end.link.prefill_done("a", 10, 0)
    await until(lambda: side.books == (0, 1, 1))
    front_end.link.on_ended("a", "completed", 5)
    front_end.link.on_ended("a", "failed")
    await until(lambda: side.books == (0, 0, 0))
    assert side.hub.requests == front_end.link.open == 0
    assert side.hub.foreign == 0
    assert not front_end.alone.dispatches


async def test_the_scheduler_hears_of_blocks_and_session_and_the_front_end_lets_go_of_them(
    world: World,
) -> None:
    side = await world.boot()
    received = []
    handle = side.scheduler.handle

    def listen(event: Event, now_s: float) -> list[Command]:
        received.append(event)
        return handle(event, now_s)

    side.scheduler.handle = listen  # type: ignore[method-assign]
    front_end = await world.front_end()
    blocks = [-(1 << 63), 5, (1 << 63) - 1]
    request = submitted("a", 200, blocks=blocks, block_tokens=64, session="talk")
    await front_end.link.dispatch(request)
    (arrival,) = [event for event in received if isinstance(event, RequestArrived)]
    assert (arrival.blocks, arrival.block_tokens, arrival.session) == (blocks, 64, "talk")
    assert request.arrival.blocks == []


async def test_priority_slo_and_tenant_reach_the_scheduler(world: World) -> None:
    side = await world.boot()
    received = []
    handle = side.scheduler.handle

    def listen(event: Event, now_s: float) -> list[Command]:
        received.append(event)
        return handle(event, now_s)

    side.scheduler.handle = listen  # type: ignore[method-assign]
    front_end = await world.front_end()
    request = submitted("a", 2, priority=-2, ttft_slo_s=0.5, tenant="gold")
    await front_end.link.dispatch(request)
    (arrival,) = [event for event in received if isinstance(event, RequestArrived)]
    assert (arrival.priority, arrival.ttft_slo_s, arrival.tenant) == (-2, 0.5, "gold")


async def test_refusals_come_through_and_cancelling_withdraws(world: World) -> None:
    side = await world.boot(HOLDING)
    front_end = await world.front_end()
    with pytest.raises(Refused):
        await front_end.link.dispatch(submitted("long", 1 << 30))
    placed = [await front_end.ask(f"placed {number}") for number in range(1)]
    waiting = front_end.ask("waiting")
    await until(lambda: side.books[0] == 1)
    waiting.cancel()
    await until(lambda: side.books[0] == 0)
    assert front_end.link.open == side.hub.requests == len(placed)


async def test_what_waits_is_placed_at_once_when_the_scheduler_is_silent(
    world: World,
) -> None:
    world.times = IMPATIENT
    side = await world.boot(HOLDING)
    front_end = await world.front_end()
    running = await front_end.ask("running")
    waiting = [front_end.ask(f"waiting {number}") for number in range(4)]
    await until(lambda: side.books[0] == 4)
    world.net.frozen = True
    placed = await asyncio.gather(*waiting)
    assert front_end.alone.dispatches == 4
    # By its own books: the busy rank is the last choice.
    assert all(
        d.prefill_rank != running.prefill_rank or d.prefill != running.prefill for d in placed[:3]
    )
    late = await front_end.ask("late")
    front_end.link.on_ended("waiting 0", "completed", 1)
    world.net.thaw()
    await until(lambda: front_end.link.connected)
    # The scheduler forgot what it believed and knows what is.
    await until(lambda: side.books == (0, 5, 10))
    assert side.hub.find_owner("late", "prefill") == late.prefill
    for rid in ("running", "waiting 1", "waiting 2", "waiting 3", "late"):
        front_end.link.on_ended(rid, "completed", 1)
    await until(lambda: side.books == (0, 0, 0))


async def test_a_scheduler_that_was_only_slow_is_given_longer_and_a_new_one_is_not(
    world: World,
) -> None:
    world.times = IMPATIENT
    await world.boot()
    front_end = await world.front_end()
    patience_s = [front_end.link._patience_s]
    for _ in range(2):
        world.net.frozen = True
        await until(lambda: not front_end.link.connected)
        world.net.thaw()
        await until(lambda: front_end.link.connected)
        patience_s.append(front_end.link._patience_s)
    assert patience_s == pytest.approx([0.2, 0.4, 0.8])
    world.crash()
    await until(lambda: not front_end.link.connected)
    await world.boot()
    await until(lambda: front_end.link.connected)
    assert front_end.link._patience_s == 0.2


async def test_a_restarted_scheduler_learns_everything_from_its_front_ends(world: World) -> None:
    await world.boot()
    front_ends = [await world.front_end() for _ in range(2)]
    for number, front_end in enumerate(front_ends):
        for request in range(600):  # more than one message of them
            await front_end.ask(f"{number}/{request}", 1)
        front_end.link.prefill_done(f"{number}/0")
    world.crash()
    await until(lambda: not any(front_end.link.connected for front_end in front_ends))
    during = await front_ends[0].ask("during")
    side = await world.boot()
    await until(lambda: side.hub.front_ends == 2 and side.hub.requests == 1201)
    assert side.books == (0, 1201, 2 * 1201 - 2)
    assert side.hub.find_owner("during", "decode") == during.decode
    for number, front_end in enumerate(front_ends):
        for request in range(600):
            front_end.link.on_ended(f"{number}/{request}", "completed", 1)
    front_ends[0].link.on_ended("during", "completed", 1)
    await until(lambda: side.books == (0, 0, 0))


def test_a_pause_of_a_front_end_never_counts_as_silence_of_the_scheduler() -> None:
    with pytest.raises(ValueError, match="lost_s"):
        SessionTimes(beat_s=0.1, lost_s=0.2)


async def test_a_silent_front_end_loses_its_requests_and_gets_them_back(
    world: World,
) -> None:
    world.times = IMPATIENT
    side = await world.boot()
    front_ends = [await world.front_end() for _ in range(2)]
    for front_end in front_ends:
        await front_end.ask(f"of {id(front_end)}")
    stopped = front_ends[0].link
    line = stopped._line
    assert isinstance(line, FakeLine)
    line.send_message = lambda message: True  # type: ignore[method-assign]
    await until(lambda: side.hub.front_ends == 1)
    assert side.books == (0, 1, 2)
    ended = [event for event in side.events if isinstance(event, RequestEnded)]
    del line.send_message
    # It did not notice; the next thing it says is answered that it is unknown.
    await until(lambda: side.hub.front_ends == 2)
    await until(lambda: side.books == (0, 2, 4))
    assert not ended


async def test_a_front_end_that_parts_leaves_nothing(world: World) -> None:
    side = await world.boot()
    front_end = await world.front_end()
    await front_end.ask("a")
    front_end.link.close()
    await until(lambda: side.hub.front_ends == 0)
    assert side.books == (0, 0, 0)


async def test_the_end_of_a_session_ends_all_its_requests_whatever_the_scheduler_makes_of_it(
    world: World,
) -> None:
    scheduler = OneAtATime()
    side = await world.boot(scheduler=scheduler)
    front_end = await world.front_end()
    asked = [front_end.ask(rid) for rid in "abcd"]
    await until(lambda: len(scheduler.waiting) == 4)
    front_end.link.close()
    await until(lambda: sorted(scheduler.ended) == ["a", "b", "c", "d"])
    assert side.hub.requests == side.hub.front_ends == 0
    assert sum(worker.active for worker in side.registry) == 0
    for task in asked:
        task.cancel()


async def test_workers_are_one_set_for_all(world: World) -> None:
    side = await world.boot()
    first, other = [await world.front_end() for _ in range(2)]
    worker_id = (
        await first.link.ask(AddWorker(url="http://p9:1", role="prefill", bootstrap_port=9000))
    ).worker_id
    assert first.registry.by_id(worker_id) is not None
    await until(lambda: other.registry.by_id(worker_id) is not None)
    with pytest.raises(ValueError, match="already"):
        await other.link.ask(AddWorker(url="http://p9:1", role="prefill", bootstrap_port=9000))
    await other.link.ask(RemoveWorker(worker_id=worker_id))
    await until(lambda: first.registry.by_id(worker_id) is None)
    with pytest.raises(ValueError, match="unknown worker"):
        await other.link.ask(RemoveWorker(worker_id=worker_id))
    await first.link.ask(RemoveWorker(worker_id=side.registry.of_role("prefill")[0].id))
    before = {worker.url: worker.id for worker in side.registry}
    world.crash()
    await until(lambda: not first.link.connected)
    with pytest.raises(RouterError) as error:
        await first.link.ask(AddWorker(url="http://p8:1", role="prefill", bootstrap_port=9000))
    assert error.value.code == "scheduler_unavailable"
    # Its flags name two prefill workers; the front ends know better.
    after = await world.boot()
    await until(lambda: after.hub.front_ends == 2)
    assert {worker.url: worker.id for worker in after.registry} == before


async def test_blame_goes_to_the_scheduler_and_its_verdict_to_everybody(world: World) -> None:
    side = await world.boot()
    first, other = [await world.front_end() for _ in range(2)]
    url = side.registry.of_role("prefill")[0].url
    failure = transport_failure("prefill", url, "refused", unreachable=True)
    first.registry.leg_failed(failure)
    mirrored = other.registry.get(url)
    assert mirrored is not None
    await until(lambda: not mirrored.healthy)
    assert side.registry.get(url).failures == 1  # type: ignore[union-attr]
    # Alone, a front end judges for itself.
    world.crash()
    await until(lambda: not first.link.connected)
    second = side.registry.of_role("prefill")[1].url
    first.registry.leg_failed(transport_failure("prefill", second, "refused", unreachable=True))
    with pytest.raises(Refused, match="prefill"):
        await first.ask("nowhere to go")


async def test_rooms_left_on_prefill_are_counted_by_the_scheduler_for_everybody(
    world: World,
) -> None:
    side = await world.boot()
    first, other = [await world.front_end() for _ in range(2)]
    url = side.registry.of_role("prefill")[0].url
    first.registry.room_left(url)
    other.registry.room_left(url)
    worker = side.registry.get(url)
    assert worker is not None
    await until(lambda: worker.rooms_left == 2)
    assert worker.failures == 0, "that is nobody's blame"
    first.registry.leg_failed(transport_failure("prefill", url, "reset"))
    await until(lambda: worker.failures == 1)
    assert worker.rooms_left == 2
    mirrored = other.registry.get(url)
    assert mirrored is not None
    await until(lambda: mirrored.rooms_left == 2)


async def test_every_front_end_learns_that_a_worker_takes_ranks_as_hints(world: World) -> None:
    side = await world.boot()
    first, other = [await world.front_end() for _ in range(2)]
    worker = side.registry.of_role("prefill")[0]
    for number in range(WINDOW):
        side.registry.accepted(worker, f"r{number}", named_rank=0, rank=1)
    mirrored = [front_end.registry.get(worker.url) for front_end in (first, other)]
    await until(lambda: all(each is not None and each.rank_is_a_hint for each in mirrored))
    late = (await world.front_end()).registry.get(worker.url)
    assert late is not None
    assert late.rank_is_a_hint
    assert "as a hint" in late.problems["rank-is-a-hint"]


async def test_a_lost_worker_and_an_abort_are_sent_to_all(world: World) -> None:
    side = await world.boot()
    first, other = [await world.front_end() for _ in range(2)]
    worker = side.registry.of_role("decode")[0]
    side.registry.silenced(worker)
    await until(lambda: other.silenced == [worker.url])
    assert (await first.link.ask(AbortElsewhere(rid="x"))).count == 2
    assert (first.aborted, other.aborted) == ([], ["x"])
    assert await side.hub.metrics_pages() == ["# front end 0\n", "# front end 1\n"]


async def test_counters_of_a_front_end_that_was_cut_off_count_once(world: World) -> None:
    world.times = IMPATIENT
    side = await world.boot()
    front_end = await world.front_end()
    name = "sbs_attempts_total"
    front_end.link.metrics_page = lambda: f"# TYPE {name} counter\n{name} 1000.0\n"

    async def attempts() -> list[str]:
        page = add_pages(await side.hub.metrics_pages())
        return [line for line in page.splitlines() if line.startswith(name)]

    assert await attempts() == [f"{name} 1000.0"]
    for _ in range(2):
        world.net.cut = True
        await until(lambda: side.hub.front_ends == 0)
        assert await attempts() == [f"{name} 1000.0"], "the total does not drop"
        world.net.mend()
        await until(lambda: side.hub.front_ends == 1 and front_end.link.connected)
        assert await attempts() == [f"{name} 1000.0"]


async def test_frames_of_the_dashboard_come_while_somebody_looks_and_the_session_lasts(
    world: World,
) -> None:
    side = await world.boot()
    feed = LocalFeed(side.hub.pump)
    side.hub.frames = feed.watch
    first, other = [await world.front_end() for _ in range(2)]
    frames: list[bool] = []
    first.link.dashboard_frame = lambda payload, full: frames.append(full)
    for _ in range(2):
        first.link.send_message(WatchDashboard(history=True))
        await until(lambda: any(full and not then for full, then in pairwise(frames)))
        assert len(feed.watchers) == 1
        frames.clear()
    before = list(feed.watchers)
    first.link.send_message(WatchDashboard())  # as an earlier release renews what it wants
    await first.link.ask(AbortElsewhere(rid="x"))
    assert list(feed.watchers) == before
    first.link.send_message(WatchDashboard(ended=True))
    await until(lambda: len(feed.watchers) == 0)
    for front_end in (first, other):
        front_end.link.send_message(WatchDashboard(history=True))
    await until(lambda: len(feed.watchers) == 2)
    first.link.close()
    await until(lambda: len(feed.watchers) == 1)
    side.hub.follow()
    assert len(feed.watchers) == 0
    feed.close()


async def test_another_version_is_refused_and_the_front_end_serves_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await world.boot()
    monkeypatch.setattr(link_module, "VERSION", 99)
    monkeypatch.setattr(link_module, "OLDEST", 98)
    front_end = FrontEnd(world.net)
    world.front_ends.append(front_end)
    assert not await front_end.link.start(0.2)
    assert caplog.text.count("uses version 99") == 1
    with pytest.raises(Refused):
        await front_end.ask("no workers known")


async def test_messages_of_strangers_change_nothing(world: World) -> None:
    side = await world.boot()
    received: list[Any] = []
    line = world.net.connect(received.append)
    assert line.send_message(RequestEnded(rid="a", outcome="completed"))
    await until(lambda: received == [Unwelcome(term=1)])
    front_ends = [await world.front_end() for _ in range(2)]
    await front_ends[0].ask("a")
    thief = front_ends[1].link._line
    assert thief is not None
    thief.send_message(RequestEnded(rid="a", outcome="completed"))
    stolen = RequestAdopted(
        rid="a",
        prompt_tokens=1,
        prefill="http://p0:1",
        prefill_rank=0,
        decode="http://d0:1",
        decode_rank=0,
    )
    thief.send_message(Adopted(requests=[stolen]))
    await until(lambda: side.hub.foreign == 1)
    assert side.books == (0, 1, 2)


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_every_request_is_answered_and_ends_once(
    world: World, seed: int
) -> None:
    world.times = IMPATIENT
    chance = random.Random(seed)
    side = await world.boot(chance.choice([IMMEDIATE, HOLDING]))
    front_ends = [await world.front_end() for _ in range(2)]
    running: dict[str, FrontEnd] = {}
    asked: list[asyncio.Task[Dispatch]] = []

    async def ask(front_end: FrontEnd, rid: str) -> Dispatch:
        dispatch = await front_end.link.dispatch(submitted(rid))
        running[rid] = front_end
        return dispatch

    for step in range(120):
        front_end = chance.choice(front_ends)
        rid = f"{seed}/{step}"
        match chance.randrange(12):
            case 0:
                world.net.frozen = True
            case 1:
                world.net.thaw()
            case 2:
                world.crash()
            case 3 if world.net.side is None:
                world.net.thaw()
                side = await world.boot(IMMEDIATE)
            case 4:
                world.net.mend() if world.net.cut else setattr(world.net, "cut", True)
            case 5 if running:
                ended = chance.choice(list(running))
                running.pop(ended).link.on_ended(ended, "completed", 3)
            case 6 if running:
                done = chance.choice(list(running))
                running[done].link.prefill_done(done)
            case 7:
                world.net.full = not world.net.full
            case _:
                asked.append(asyncio.create_task(ask(front_end, rid)))
        await asyncio.sleep(chance.choice([0, 0, 0.005, 0.03]))
    world.net.full = False
    world.net.mend()
    world.net.thaw()
    if world.net.side is None or side.scheduler.config is HOLDING:
        world.crash()
        side = await world.boot(IMMEDIATE)
    await asyncio.wait(asked, timeout=20)
    assert all(task.done() for task in asked)
    refused = sum(task.exception() is not None for task in asked)
    assert refused == 0
    await until(lambda: all(f.link.connected for f in front_ends))
    await until(lambda: side.books[1] == len(running))
    for rid, owner in running.items():
        owner.link.on_ended(rid, "completed", 3)
    await until(lambda: side.books == (0, 0, 0))
    assert side.hub.requests == 0
    assert sum(f.link.open for f in front_ends) == 0
