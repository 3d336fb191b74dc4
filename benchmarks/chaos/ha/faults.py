"""Faults of schedulers and front ends, and how each ends."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.chaos.ha.places import Part, Places

HELD_S = 6.0
"""Until what is stopped goes on, what is cut heals, what is killed starts again."""
_BELIEVE_S = 20.0

Deed = Callable[[Places, Part], Awaitable[None]]


@dataclass(slots=True)
class Struck:
    places: Places
    parts: Sequence[Part]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fault:
    """``strike`` returns when it is done, ``heal`` when it is undone."""

    name: str
    summary: str
    strike: Callable[[Places], Awaitable[Struck]]
    heal: Callable[[Struck], Awaitable[None]]
    needs_store: bool = False


async def active_scheduler(places: Places) -> list[Part]:
    return (await places.active())[:1]


async def a_front_end(places: Places) -> list[Part]:
    return places.front_ends[:1]


async def both(places: Places) -> list[Part]:
    return [*await active_scheduler(places), *await a_front_end(places)]


async def _stop(places: Places, part: Part) -> None:
    places.signal(part, signal.SIGSTOP)


async def _go_on(places: Places, part: Part) -> None:
    places.signal(part, signal.SIGCONT)


async def _cut(_places: Places, part: Part) -> None:
    part.cut()


async def _heal(_places: Places, part: Part) -> None:
    part.heal()


async def _end(places: Places, part: Part) -> None:
    places.signal(part, signal.SIGTERM)


async def _gone_and_back(places: Places, part: Part) -> None:
    await places.kill(part)
    await places.start_again(part)


def _done_to(
    name: str,
    what: str,
    whom: str,
    which: Callable[[Places], Awaitable[list[Part]]],
    deed: Deed,
    undo: Deed,
) -> Fault:
    async def strike(places: Places) -> Struck:
        parts = await which(places)
        await asyncio.gather(*(deed(places, part) for part in parts))
        return Struck(places, parts, [", ".join(part.name for part in parts)])

    async def heal(struck: Struck) -> None:
        for part in struck.parts:
            await undo(struck.places, part)

    return Fault(name, f"{what} {whom}", strike, heal)


_WHOM = (
    ("scheduler", "the scheduler that schedules", active_scheduler),
    ("front-end", "one of two front ends", a_front_end),
    ("both", "both of these at once", both),
)
_DEEDS: tuple[tuple[str, str, Deed, Deed], ...] = (
    ("kill", "kill -9 of", Places.kill, Places.start_again),
    ("stop", f"SIGSTOP for {HELD_S:.0f} s of", _stop, _go_on),
    ("cut", f"the network is cut for {HELD_S:.0f} s of", _cut, _heal),
)


async def _believe_both(places: Places) -> Struck:
    """The standby is started anew with a lock, or an order, of its own, in which it is alone."""
    (standby,) = [part for part in places.schedulers if part not in await places.active()]
    flag = "--sbs-election" if places.stores else "--sbs-scheduler"
    words = standby.plan.argv
    own = f"{words[words.index(flag) + 1]}-alone" if places.stores else standby.public
    await places.kill(standby)
    await places.start_again(standby, [flag, own])
    deadline_s = time.monotonic() + _BELIEVE_S
    while time.monotonic() < deadline_s:
        standing = [scheduler for scheduler in await places.standing() if scheduler.active]
        if len(standing) == len(places.schedulers):
            said = (
                f"{scheduler.part.name} leads {scheduler.front_ends} front ends "
                f"in term {scheduler.term}"
                for scheduler in standing
            )
            return Struck(places, [standby], list(said))
        await asyncio.sleep(0.02)
    return Struck(places, [standby], ["they were never seen to believe it both at one moment"])


async def _one_belief(struck: Struck) -> None:
    for part in struck.parts:
        await _gone_and_back(struck.places, part)


async def _cut_stores(places: Places) -> Struck:
    for way in places.stores:
        way.cut()
    return Struck(places, [], ["etcd"])


async def _heal_stores(struck: Struck) -> None:
    for way in struck.places.stores:
        way.heal()


ALL = (
    *(
        _done_to(f"{deed}-{name}", what, whom, which, do, undo)
        for name, whom, which in _WHOM
        for deed, what, do, undo in _DEEDS
    ),
    _done_to(
        "end-scheduler",
        "SIGTERM to",
        "the scheduler that schedules",
        active_scheduler,
        _end,
        _gone_and_back,
    ),
    Fault("split-brain", "two schedulers that both believe they lead", _believe_both, _one_belief),
    Fault(
        "cut-store",
        f"no scheduler reaches etcd for {HELD_S:.0f} s",
        _cut_stores,
        _heal_stores,
        needs_store=True,
    ),
)
BY_NAME = {fault.name: fault for fault in ALL}
