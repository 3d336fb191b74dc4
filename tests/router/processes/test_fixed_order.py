"""The leader in a fixed order, by what each sees of the others; no clock and no socket here."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from functools import partial
from itertools import pairwise

import pytest
from many_schedulers import Several
from router_harness import until

from sglang_sbs.router.processes.leading.fixed_order import FixedOrder, Order, OrderTimes
from sglang_sbs.router.processes.leading.scheduler_choice import ChoiceTimes
from sglang_sbs.router.processes.messages import Look, Standing
from sglang_sbs.router.processes.sockets import FrontEndSocket

USUAL = OrderTimes()
STANDBY = Standing(term=1, ready=True)
F = "front end"


def leading(term: int) -> Standing:
    return Standing(term=term, active=True, ready=True)


def test_the_first_leads_as_soon_as_all_have_answered_that_they_do_not() -> None:
    order = Order(0, 10.0)
    assert order.decide([None, None], 10.0) is None
    assert order.decide([None, STANDBY], 10.1) == 2


def test_a_scheduler_without_answers_waits_a_moment_and_leads() -> None:
    for own in (0, 1):
        order = Order(own, 0.0)
        now_s = 0.0
        while now_s < USUAL.start_s - USUAL.tick_s:
            assert order.decide([None, None], now_s) is None
            now_s += USUAL.tick_s
        assert order.decide([None, None], USUAL.start_s) == 1


def test_a_later_one_does_not_lead_while_an_earlier_one_answers() -> None:
    order = Order(1, 0.0)
    steps = [n * USUAL.tick_s for n in range(100)]
    assert all(order.decide([STANDBY, None], now_s) is None for now_s in steps)


def test_a_front_end_that_is_served_keeps_the_others_from_leading_until_it_is_silent() -> None:
    order = Order(1, 0.0)
    now_s = 0.0
    for _ in range(100):
        now_s += USUAL.tick_s
        order.on_look(Look(who=F, term=4, served=True), now_s)
        assert order.decide([None, None], now_s) is None
    last_s = now_s
    while order.decide([None, None], now_s) is None:
        now_s += USUAL.tick_s
    assert USUAL.served_s <= now_s - last_s < USUAL.served_s + 2 * USUAL.tick_s
    assert order.term == 5, "a later one than the front end knew"


def test_a_front_end_that_is_served_no_more_stands_in_nobodys_way() -> None:
    order = Order(1, 0.0)
    now_s = 0.0
    while now_s < USUAL.start_s + 1:
        now_s += USUAL.tick_s
        order.on_look(Look(who=F, term=4, served=True), now_s)
        order.decide([None, None], now_s)
    order.on_look(Look(who=F, term=4), now_s)
    assert order.decide([None, None], now_s) == 5


@pytest.mark.parametrize("own", [0, 1])
def test_of_two_that_lead_the_one_in_the_earlier_term_steps_down_and_in_the_same_the_later_one(
    own: int,
) -> None:
    def sees(term: int) -> list[Standing | None]:
        return [None, leading(term)] if own == 0 else [leading(term), None]

    def fresh() -> Order:
        order = Order(own, 0.0)
        order.on_look(Look(who=F, term=6), 0.0)
        standings: list[Standing | None] = [STANDBY, STANDBY]
        standings[own] = None
        now_s = 0.0
        while own and now_s < USUAL.start_s:  # it does not lead while the first answers
            now_s += USUAL.tick_s
            order.decide([None, None], now_s)
        assert order.decide(standings if own == 0 else [None, None], now_s) == 7
        return order

    now_s = USUAL.tick_s if own == 0 else USUAL.start_s + USUAL.tick_s
    assert fresh().decide(sees(8), now_s) is None
    assert (fresh().decide(sees(7), now_s) is None) == (own == 1)
    assert fresh().decide(sees(6), now_s) == 7


def test_a_lead_goes_back_to_the_first_when_it_has_been_ready_for_a_while() -> None:
    order = Order(1, 0.0)
    now_s = 0.0
    while order.decide([None, None], now_s) is None:
        now_s += USUAL.tick_s
    back_s = now_s
    not_ready = Standing(term=1)
    while now_s - back_s < 2 * USUAL.return_s:
        now_s += USUAL.tick_s
        assert order.decide([not_ready, None], now_s) is not None
    ready_s = now_s
    while order.decide([STANDBY, None], now_s) is not None:
        now_s += USUAL.tick_s
    assert USUAL.return_s <= now_s - ready_s < USUAL.return_s + 2 * USUAL.tick_s


def test_a_process_that_did_nothing_for_a_while_asks_before_it_leads_again() -> None:
    order = Order(0, 0.0)
    assert order.decide([None, STANDBY], 0.0) is not None
    assert not order.stalled(USUAL.lost_s)
    now_s = 0.0 + 3 * USUAL.lost_s
    assert order.stalled(now_s)
    assert order.term is None
    assert order.decide([None, None], now_s) is None
    assert order.decide([None, leading(9)], now_s + USUAL.tick_s) is None
    assert order.decide([None, STANDBY], now_s + 2 * USUAL.tick_s) == 10


def test_a_later_term_ends_a_lead_and_the_next_is_later_still() -> None:
    order = Order(0, 0.0)
    assert order.decide([None, STANDBY], 0.0) == 2
    order.exceed(1)
    assert order.term == 2
    order.exceed(6)
    assert order.term is None
    assert order.decide([None, STANDBY], USUAL.tick_s) == 7


class _Model:
    """Schedulers and front ends that see some of each other. A front end follows the latest term
    that it sees, and says so to all it sees, as :mod:`scheduler_choice` does."""

    def __init__(self, schedulers: int, front_ends: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.count = schedulers
        self.orders = [Order(own, 0.0) for own in range(schedulers)]
        self.front_ends = front_ends
        self.known = [0] * front_ends
        self.followed: list[int | None] = [None] * front_ends
        self.cut: set[tuple[str, int, int]] = set()
        self.now_s = 0.0
        self.terms: list[int] = []

    def sees(self, kind: str, asker: int, scheduler: int) -> bool:
        return (kind, asker, scheduler) not in self.cut

    def step(self) -> None:
        self.now_s += USUAL.tick_s
        standings = [
            Standing(term=o.term or o._highest, active=o.term is not None, ready=True)
            for o in self.orders
        ]
        for own, order in enumerate(self.orders):
            received = [
                standings[i] if i != own and self.sees("s", own, i) else None
                for i in range(self.count)
            ]
            before = order.term
            after = order.decide(received, self.now_s)
            if after is not None and before is None:
                self.terms.append(after)
        for front_end in range(self.front_ends):
            self._front_end(front_end)

    def _front_end(self, number: int) -> None:
        seen = [i for i in range(self.count) if self.sees("f", number, i)]
        leaders = [(t, i) for i in seen if (t := self.orders[i].term) is not None]
        self.followed[number] = None
        if leaders and max(leaders)[0] >= self.known[number]:
            self.known[number], self.followed[number] = max(leaders)
        served = self.followed[number] is not None
        for i in seen:
            self.orders[i].on_look(
                Look(who=f"{number}", term=self.known[number], served=served), self.now_s
            )
            if self.orders[i].term is not None and self.known[number] > self.orders[i].term:
                self.orders[i].exceed(self.known[number])

    def leaders(self) -> list[int]:
        return [i for i, order in enumerate(self.orders) if order.term is not None]


@pytest.mark.parametrize("seed", range(20))
def test_after_any_cuts_all_follow_the_first_again_and_no_term_was_led_twice(seed: int) -> None:
    model = _Model(3, 4, seed)
    every = [("s", a, b) for a in range(3) for b in range(3) if a != b]
    every += [("f", a, b) for a in range(4) for b in range(3)]
    for _ in range(30):
        model.cut = {edge for edge in every if model.chance.random() < 0.3}
        for _ in range(model.chance.randrange(5, 60)):
            model.step()
    model.cut = set()
    for _ in range(int((2 * USUAL.return_s + USUAL.served_s + USUAL.start_s) / USUAL.tick_s)):
        model.step()
    assert model.leaders() == [0]
    assert model.followed == [0] * 4


def test_two_schedulers_that_do_not_reach_each_other_do_not_split_the_front_ends() -> None:
    """Every front end reaches both: all follow the same one, all the time."""
    model = _Model(2, 3, 0)
    for _ in range(40):
        model.step()
    assert model.leaders() == [0]
    model.cut = {("s", 0, 1), ("s", 1, 0)}
    for _ in range(600):
        model.step()
        assert model.followed == [0] * 3
    # One that reaches only the standby gets nobody to schedule for it alone.
    model.cut.add(("f", 2, 0))
    for _ in range(600):
        model.step()
        assert model.followed == [0, 0, None]
    assert model.terms == [1]


def test_terms_of_one_scheduler_only_rise() -> None:
    model = _Model(3, 2, 7)
    every = [("s", a, b) for a in range(3) for b in range(3) if a != b]
    every += [("f", a, b) for a in range(2) for b in range(3)]
    seen: list[list[int]] = [[], [], []]
    for _ in range(40):
        model.cut = {edge for edge in every if model.chance.random() < 0.5}
        for _ in range(30):
            model.step()
            for own, order in enumerate(model.orders):
                if order.term is not None and [order.term] != seen[own][-1:]:
                    seen[own].append(order.term)
    assert sum(map(len, seen)) > 5
    assert all(a < b for terms in seen for a, b in pairwise(terms))


# With real sessions, in one process ---------------------------------------------------------------


@pytest.fixture
async def several() -> AsyncIterator[Several]:
    made = Several(ChoiceTimes(look_every_s=0.03, fresh_s=0.3))
    yield made
    made.close()


async def test_the_second_takes_over_from_the_first_and_gives_back(several: Several) -> None:
    runs = {}

    def boot(own: int) -> None:
        def dial(address: str, receive):  # type: ignore[no-untyped-def]
            return several.nets[address].connect(receive)

        times = OrderTimes(tick_s=0.02, return_s=0.5, served_s=0.3)
        election = FixedOrder("ab", own, dial, times)
        hub = several.boot("ab"[own], election).hub
        runs["ab"[own]] = asyncio.create_task(election.run(hub.lead, hub.follow))

    async def end(address: str) -> None:
        runs[address].cancel()
        await asyncio.gather(runs[address], return_exceptions=True)

    several.nets = {}
    boot(0)
    boot(1)
    try:
        front_ends = [await several.front_end() for _ in range(2)]
        await several.all_follow("a")
        for number, front_end in enumerate(front_ends):
            await front_end.ask(f"{number}")
        await end("a")
        several.crash("a")
        await several.all_follow("b")
        await until(lambda: several.sides["b"].books == (0, 2, 4))
        boot(0)
        await several.all_follow("a")
        await until(lambda: several.sides["a"].books == (0, 2, 4))
        assert several.sides["b"].books == (0, 0, 0)
        for number, front_end in enumerate(front_ends):
            assert front_end.link.lead().changes == 2
            front_end.link.on_ended(f"{number}", "completed", 1)
        await several.books_are_empty()
    finally:
        for address in runs:
            await end(address)


async def test_only_an_elected_scheduler_warns_of_being_late(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is asked ten times a second, also while it still looks at the workers and does not run."""
    dial, late = partial(FrontEndSocket, None), OrderTimes(lost_s=-1.0)
    election = FixedOrder(["tcp://a:1", "tcp://b:1"], 0, dial, late)
    assert not election.leads()
    assert caplog.text == ""
    election._order.term = 1
    assert not election.leads()
    assert "another may be active" in caplog.text
