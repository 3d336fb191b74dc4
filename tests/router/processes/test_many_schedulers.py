"""Several schedulers, one of which leads: take-over, split brain, cut networks, other releases."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from link_harness import HOLDING, IMPATIENT, FrontEnd, OneAtATime
from many_schedulers import Several
from router_harness import until

from sglang_sbs.router.election import ElectionTimes
from sglang_sbs.router.election.campaign import Campaign, boot_clock
from sglang_sbs.router.election.candidate import Record
from sglang_sbs.router.processes import front_end_sessions as hub_module
from sglang_sbs.router.processes import messages
from sglang_sbs.router.processes import scheduler_link as link_module
from sglang_sbs.router.processes.messages import (
    AddWorker,
    Alive,
    Decisions,
    Hello,
    RemoveWorker,
    encode,
)
from sglang_sbs.scheduling import Dispatch


async def test_a_front_end_finds_the_one_that_leads_wherever_it_is_in_the_list(
    several: Several,
) -> None:
    for address in "abc":
        several.scheduler(address)
    several.ballots["b"].win(1)
    front_end = await several.front_end()
    await several.all_follow("b")
    await front_end.ask("one")
    assert several.sides["b"].books == (0, 1, 2)
    assert several.sides["a"].hub.requests == several.sides["c"].hub.requests == 0
    front_end.link.on_ended("one", "completed", 1)
    await several.books_are_empty()


async def test_a_standby_says_who_leads(several: Several) -> None:
    several.scheduler("a")
    ballot = several.ballots["a"]
    ballot.leader = "b"
    front_end = FrontEnd({"a": several.nets["a"]})
    several.front_ends.append(front_end)
    received: list[object] = []
    line = several.nets["a"].connect(received.append)
    line.send_message(Hello(version=1, front_end="f", name="f"))
    await until(lambda: received == [messages.Unwelcome(standby=True, active="b")])
    # Behind the one address there may be another next time: it is dialled anew.
    assert not await front_end.link.start(0.02)
    first = front_end.link._line
    await until(lambda: front_end.link._line is not first)
    ballot.win(1)
    await several.all_follow("a")


async def test_a_scheduler_that_takes_over_receives_what_is_in_flight(several: Several) -> None:
    side, other = several.scheduler("a"), several.scheduler("b")
    several.ballots["a"].win(1)
    front_ends = [await several.front_end() for _ in range(2)]
    for number, front_end in enumerate(front_ends):
        for request in range(5):
            await front_end.ask(f"{number}/{request}")
    assert side.books == (0, 10, 20)
    several.crash("a")
    await until(lambda: not any(front_end.link.connected for front_end in front_ends))
    # Without a scheduler requests are placed at once, and submitted to the next one.
    await front_ends[0].ask("0/during")
    several.ballots["b"].win(2)
    await several.all_follow("b")
    await until(lambda: other.books == (0, 11, 22))
    for number, front_end in enumerate(front_ends):
        for request in range(5):
            front_end.link.on_ended(f"{number}/{request}", "completed", 1)
    front_ends[0].link.on_ended("0/during", "completed", 1)
    await several.books_are_empty()


async def test_a_scheduler_that_loses_the_lead_drops_all_requests(
    several: Several,
) -> None:
    side, other = several.scheduler("a", HOLDING), several.scheduler("b")
    several.ballots["a"].win(1)
    front_end = await several.front_end()
    await front_end.ask("placed")
    waiting = [front_end.ask(f"waiting {number}") for number in range(4)]
    await until(lambda: side.books[0] == 4)
    dispatches = sum(worker.dispatches for worker in side.registry)
    several.ballots["a"].lose()
    assert side.books == (0, 0, 0)
    assert sum(worker.dispatches for worker in side.registry) == dispatches
    several.ballots["b"].win(2)
    await asyncio.gather(*waiting)
    await several.all_follow("b")
    await until(lambda: other.books == (0, 5, 10))
    for rid in ("placed", *(f"waiting {number}" for number in range(4))):
        front_end.link.on_ended(rid, "completed", 1)
    await several.books_are_empty()


async def test_when_a_lead_ends_those_that_wait_are_forgotten_before_those_that_run(
    several: Several,
) -> None:
    """Else the end of one that runs would be the dispatch of one that waits."""
    scheduler = OneAtATime()
    several.scheduler("a", scheduler=scheduler)
    several.ballots["a"].win(1)
    front_end = await several.front_end()
    asked = [front_end.ask(rid) for rid in ("first", "runs", "waits")]
    await until(lambda: len(scheduler.waiting) == 3)
    front_end.link.on_ended("first", "aborted")
    await asyncio.wait({asked[1]}, timeout=5)
    front_end.link.close()
    scheduler.ended.clear()
    several.ballots["a"].lose()
    assert scheduler.ended == ["waits", "runs"]
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_a_leader_of_an_earlier_term_gets_no_front_ends(
    several: Several,
) -> None:
    several.scheduler("a")
    several.ballots["a"].steps_down = False
    several.scheduler("b")
    several.ballots["a"].win(1)
    front_end = await several.front_end()
    several.ballots["b"].win(2)
    await several.all_follow("b")
    several.crash("b")
    await until(lambda: not front_end.link.connected)
    exceeded = len(several.ballots["a"].exceeded)
    await until(lambda: len(several.ballots["a"].exceeded) > exceeded + 10)  # it receives the term
    assert not front_end.link.connected
    await front_end.ask("alone")
    assert front_end.alone.dispatches == 1
    several.ballots["a"].lose()
    several.ballots["a"].win(3)
    await several.all_follow("a")
    front_end.link.on_ended("alone", "completed", 1)
    await several.books_are_empty()


async def test_of_two_that_believe_in_their_lead_all_follow_the_later(several: Several) -> None:
    side, other = several.scheduler("a"), several.scheduler("b")
    several.ballots["a"].steps_down = False
    several.ballots["a"].win(1)
    front_ends = [await several.front_end() for _ in range(3)]
    await front_ends[0].ask("before")
    assert side.books == (0, 1, 2)
    several.ballots["b"].win(2)
    await several.all_follow("b")
    await until(lambda: several.ballots["a"].exceeded)  # the first receives the later term
    for number, front_end in enumerate(front_ends):
        await front_end.ask(f"after {number}")
    await until(lambda: other.books == (0, 4, 8))
    # It holds nothing of what it had, and nobody comes back to it.
    await until(lambda: side.books == (0, 0, 0))
    for number, front_end in enumerate(front_ends):
        front_end.link.on_ended(f"after {number}", "completed", 1)
    front_ends[0].link.on_ended("before", "completed", 1)
    await several.books_are_empty()


async def test_a_decision_of_an_earlier_term_reaches_nobody(several: Several) -> None:
    several.scheduler("a", HOLDING)
    several.ballots["a"].win(3)
    front_end = await several.front_end()
    await front_end.ask("fills it")
    waiting = front_end.ask("waits")
    await until(lambda: several.sides["a"].books[0] == 1)
    line = front_end.link._line
    assert line is not None
    stale = Dispatch(
        rid="waits",
        prefill="http://p9:1",
        prefill_rank=0,
        decode="http://d0:1",
        decode_rank=0,
        batch=9,
        held_s=0.0,
        reason="of a scheduler that was replaced",
    )
    # As if the network had kept it: on the line of the session, and said in an earlier term.
    line.receive(messages.decode_from_scheduler(encode(Decisions(commands=[stale], term=2))))
    assert front_end.link.fenced == 1
    assert (await waiting).prefill != "http://p9:1"
    line = front_end.link._line
    assert line is not None
    line.receive(Alive(term=0))  # a release that knows no terms
    assert front_end.link.fenced == 1


async def test_a_lead_that_has_lapsed_sends_nothing_more(several: Several) -> None:
    """A process that was stopped goes on: what it decided then must not leave."""
    side = several.scheduler("a")
    several.ballots["a"].win(1)
    front_end = await several.front_end()
    line = front_end.link._line
    assert line is not None
    received: list[object] = []
    line._receive = received.append
    side.hub._ticker.cancel()  # it would say so, but may come later
    several.ballots["a"].lapsed = True
    waiting = front_end.ask("late")
    await until(lambda: received and isinstance(received[-1], messages.Unwelcome))
    assert not any(isinstance(message, Decisions) for message in received)
    assert side.books == (0, 0, 0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_worker_added_before_is_there_after(several: Several) -> None:
    several.scheduler("a")
    two = several.scheduler("b")
    several.ballots["a"].win(1)
    front_end = await several.front_end()
    await front_end.link.ask(AddWorker(url="http://p9:1", role="prefill", bootstrap_port=9000))
    gone = two.registry.of_role("prefill")[0].url
    (known,) = [w for w in front_end.registry if w.url == gone]
    await front_end.link.ask(RemoveWorker(worker_id=known.id))
    assert two.registry.get("http://p9:1") is None
    several.ballots["a"].lose()
    several.ballots["b"].win(2)
    await several.all_follow("b")
    assert two.registry.get("http://p9:1") is not None
    assert two.registry.get(gone) is None
    # And back, though the first one has known of workers before.
    await front_end.link.ask(AddWorker(url="http://p8:1", role="prefill", bootstrap_port=9000))
    several.ballots["b"].lose()
    several.ballots["a"].win(3)
    await several.all_follow("a")
    assert several.sides["a"].registry.get("http://p8:1") is not None


async def test_a_rolling_upgrade_is_spoken_in_the_version_that_both_know(
    several: Several, monkeypatch: pytest.MonkeyPatch
) -> None:
    several.scheduler("a")
    several.ballots["a"].win(1)
    monkeypatch.setattr(link_module, "VERSION", 7)  # a front end of a later release
    front_end = await several.front_end()
    assert front_end.link.connected
    hello = Hello(version=7, oldest=1, front_end="f", name="f")
    assert messages.spoken(hello) == messages.VERSION
    monkeypatch.setattr(messages, "VERSION", 9)  # and a scheduler of one later still
    monkeypatch.setattr(messages, "OLDEST", 7)
    assert messages.spoken(hello) == 7
    monkeypatch.setattr(messages, "OLDEST", 8)
    assert messages.spoken(hello) is None
    assert messages.spoken(Hello(version=1, front_end="f", name="f")) is None


async def test_a_front_end_refuses_a_version_that_it_does_not_speak(
    several: Several, monkeypatch: pytest.MonkeyPatch
) -> None:
    several.scheduler("a")
    several.ballots["a"].win(1)
    monkeypatch.setattr(hub_module, "spoken", lambda hello: 9)
    front_end = FrontEnd(several.nets)
    several.front_ends.append(front_end)
    assert not await front_end.link.start(0.2)
    assert not front_end.link.connected


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_to_schedulers_no_request_is_lost_and_books_end_empty(
    several: Several, seed: int
) -> None:
    """Crashes, stops, cut networks and leads that move, while requests come and go."""
    chance = random.Random(seed)
    several.times = IMPATIENT
    for address in "ab":
        several.scheduler(address)
    term = 1
    several.ballots["a"].win(term)
    front_ends = [await several.front_end() for _ in range(3)]
    running: dict[str, FrontEnd] = {}
    for step in range(60):
        match chance.randrange(8):
            case 0:
                term += 1
                for ballot in several.ballots.values():
                    if ballot.term and chance.random() < 0.5:
                        ballot.lose()  # else it does not know yet
                several.ballots[chance.choice("ab")].win(term)
            case 1:
                net = several.nets[chance.choice("ab")]
                net.cut = True
            case 2:
                several.nets[chance.choice("ab")].frozen = True
            case 3:
                for net in several.nets.values():
                    net.thaw()
                    net.mend()
            case 4 if running:
                rid = chance.choice(list(running))
                running.pop(rid).link.on_ended(rid, "completed", 1)
            case _:
                front_end, rid = chance.choice(front_ends), f"r{step}"
                async with asyncio.timeout(10):
                    await front_end.ask(rid)
                running[rid] = front_end
        await asyncio.sleep(chance.random() * 0.04)
    for net in several.nets.values():
        net.thaw()
        net.mend()
    several.ballots["b"].win(term + 1)
    await several.all_follow("b")
    await until(lambda: several.sides["b"].books[1] == len(running))
    for rid, front_end in running.items():
        front_end.link.on_ended(rid, "completed", 1)
    await several.books_are_empty()


class Hanging:
    """A store that answers until the lock is taken."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def open(self) -> None: ...

    async def read(self) -> Record:
        return Record()

    async def take(self, seen: Record, holder: str, term: int) -> Record:
        return Record(holder, term)

    async def renew(self, mine: Record) -> Record:
        self.asked.set()
        return await asyncio.get_running_loop().create_future()

    async def release(self, mine: Record) -> None: ...

    async def close(self) -> None: ...


async def test_a_leader_that_cannot_renew_stops_deciding(
    several: Several,
) -> None:
    store: Any = Hanging()
    campaign = Campaign(store, "a", ElectionTimes(lease_s=60, renew_s=50, retry_s=0.05))
    side = several.boot("a", campaign)
    run = asyncio.create_task(campaign.run(side.hub.lead, side.hub.follow))
    front_end = await several.front_end()
    assert campaign.term == 1
    await store.asked.wait()  # for 25 s
    campaign._clock = lambda: boot_clock() + 50.0
    await until(lambda: side.hub.front_ends == 0 and not front_end.link.connected)
    assert campaign.term is None
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
