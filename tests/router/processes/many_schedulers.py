"""Schedulers and front ends in one process, each scheduler with a network of its own to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from link_harness import IMMEDIATE, QUICK, FrontEnd, Net, SchedulerSide
from router_harness import until

from sglang_sbs.router.dispatch.scheduler_driver import SchedulerLike
from sglang_sbs.router.election import Election
from sglang_sbs.router.processes.leading.lead import Lead
from sglang_sbs.router.processes.leading.scheduler_choice import ChoiceTimes
from sglang_sbs.scheduling import SchedulerConfig


class Ballot:
    """An election whose outcome is the test's."""

    def __init__(self) -> None:
        self.leader: str | None = None
        self.exceeded: list[int] = []
        self.steps_down = True
        """When a front end shows a later term; a scheduler that believes in itself does not."""
        self.lapsed = False
        """The lead is over by the clock, and nobody has said so yet."""
        self.term = 0
        self._side: SchedulerSide | None = None

    def of(self, side: SchedulerSide) -> None:
        self._side = side

    async def run(self, lead: Callable[[int], None], follow: Callable[[], None]) -> None:
        await asyncio.Event().wait()

    def win(self, term: int) -> None:
        assert self._side is not None
        self.term = term
        self._side.hub.lead(term)

    def lose(self) -> None:
        assert self._side is not None
        self.term = 0
        self._side.hub.follow()

    def leads(self) -> bool:
        if self.lapsed:
            self.lapsed = False
            self.lose()
        return self.term > 0

    def exceed(self, term: int) -> None:
        self.exceeded.append(term)
        if self.term and self.steps_down and term >= self.term:
            self.lose()


class Several:
    """Schedulers ``a``, ``b``, … with ballots, and front ends that know all of them."""

    def __init__(self, choice_times: ChoiceTimes) -> None:
        self.nets: dict[str, Net] = {}
        self.sides: dict[str, SchedulerSide] = {}
        self.ballots: dict[str, Ballot] = {}
        self.front_ends: list[FrontEnd] = []
        self.times = QUICK
        self._choice_times = choice_times

    def scheduler(
        self,
        address: str,
        config: SchedulerConfig = IMMEDIATE,
        scheduler: SchedulerLike | None = None,
    ) -> SchedulerSide:
        ballot = self.ballots[address] = Ballot()
        side = self.boot(address, ballot, config, scheduler)
        ballot.of(side)
        return side

    def boot(
        self,
        address: str,
        election: Election,
        config: SchedulerConfig = IMMEDIATE,
        scheduler: SchedulerLike | None = None,
    ) -> SchedulerSide:
        net = self.nets.setdefault(address, Net())
        side = SchedulerSide(net, config, scheduler, lead=Lead(election, address), times=self.times)
        net.side = self.sides[address] = side
        return side

    def crash(self, address: str) -> None:
        self.nets[address].side = None
        self.sides.pop(address).close()

    async def front_end(self, nets: dict[str, Net] | None = None) -> FrontEnd:
        name, choice_times = f"front end {len(self.front_ends)}", self._choice_times
        front_end = FrontEnd(nets or self.nets, name, self.times, choice_times)
        self.front_ends.append(front_end)
        assert await front_end.link.start(5.0)
        return front_end

    def follows(self, front_end: FrontEnd, address: str) -> bool:
        view = front_end.link.lead()
        return view.connected and view.address == address

    async def all_follow(self, address: str) -> None:
        await until(lambda: all(self.follows(front_end, address) for front_end in self.front_ends))

    async def books_are_empty(self) -> None:
        await until(lambda: all(side.books == (0, 0, 0) for side in self.sides.values()))
        assert all(side.hub.requests == 0 for side in self.sides.values())
        assert all(front_end.link.open == 0 for front_end in self.front_ends)

    def close(self) -> None:
        for front_end in self.front_ends:
            front_end.link.close()
        for address in list(self.sides):
            self.crash(address)
