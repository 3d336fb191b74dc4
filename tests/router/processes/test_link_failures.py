"""A step between front end and scheduler fails: no request is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from link_harness import (
    HOLDING,
    IMMEDIATE,
    IMPATIENT,
    FakeLine,
    FrontEnd,
    World,
    too_many_files,
)
from router_harness import until

from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.processes import scheduler_link as link_module
from sglang_sbs.router.processes.dashboard_feed import RemoteFeed
from sglang_sbs.router.processes.messages import AbortElsewhere, Unwelcome


def failing(times: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Like ``function``, but the first calls fail."""
    left = iter(range(times))

    def call(*args: Any) -> Any:
        if next(left, None) is not None:
            raise too_many_files()
        return function(*args)

    return call


@pytest.mark.parametrize("noticed", ["silent", "takes nothing", "unknown there"])
async def test_without_descriptors_for_a_new_line_requests_are_placed_and_it_is_tried_again(
    world: World, caplog: pytest.LogCaptureFixture, noticed: str
) -> None:
    if noticed == "silent":
        world.times = IMPATIENT
    side = await world.boot(HOLDING)
    front_end = await world.front_end()
    running = await front_end.ask("running")
    waiting = [front_end.ask(f"waiting {number}") for number in range(4)]
    await until(lambda: side.books[0] == 4)
    line = front_end.link._line
    assert isinstance(line, FakeLine)
    world.net.full = True
    match noticed:
        case "silent":
            world.net.cut = True
        case "takes nothing":
            world.crash()
        case _:
            line.receive(Unwelcome())
    late = front_end.ask("late")  # its arrival may be what finds out
    assert len(await asyncio.gather(*waiting, late)) == 5
    assert front_end.alone.dispatches == 5
    assert not front_end.link.connected
    front_end.link.on_ended("waiting 0", "completed", 1)
    with pytest.raises(RouterError, match="no connection to the scheduler"):
        await front_end.link.ask(AbortElsewhere(rid="x"))
    world.net.mend()
    if world.net.side is None:
        side = await world.boot()
    not_made = world.net.not_made
    await until(lambda: world.net.not_made > not_made + 3)
    assert not front_end.link.connected
    assert caplog.text.count("OSError: [Errno 24] Too many open files") == 1
    world.net.full = False
    await until(lambda: front_end.link.connected)
    await until(lambda: side.books == (0, 5, 10) and side.hub.front_ends == 1)
    assert side.hub.find_owner("running", "prefill") == running.prefill


@pytest.mark.parametrize("step", ["connect", "close", "fallback", "books", "alone changed"])
async def test_whatever_step_of_going_alone_fails_all_of_them_are_taken_in_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    side = await world.boot(HOLDING)
    front_end = await world.front_end()
    link = front_end.link
    changes = front_end.alone_changes
    changes.clear()
    await front_end.ask("running")
    waiting = front_end.ask("waiting")
    await until(lambda: side.books[0] == 1)
    owner, name = {
        "connect": (link.choice, "connect"),
        "close": (link._line, "close"),
        "fallback": (link, "fallback"),
        "books": (front_end.registry, "announcements"),
        "alone changed": (link, "alone_changed"),
    }[step]
    monkeypatch.setattr(owner, name, failing(2, getattr(owner, name)))
    world.crash()
    assert (await waiting).prefill
    assert (await front_end.ask("late")).prefill
    await until(lambda: changes == [True])
    side = await world.boot()
    await until(lambda: link.connected)
    await until(lambda: side.books == (0, 3, 6) and side.hub.front_ends == 1)
    assert changes == [True, False]


async def test_an_open_dashboard_shows_a_late_fallback(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.boot()
    link = (await world.front_end()).link
    feed = RemoteFeed(link)
    link.alone_changed = lambda alone: feed.scheduler_changed()
    frames: list[bool] = []
    feed.watch(lambda payload, full: frames.append(full))
    monkeypatch.setattr(link, "fallback", failing(1, link.fallback))
    world.crash()
    await until(lambda: frames[:2] == [True, False])
    feed.close()


async def test_a_heartbeat_that_fails_is_followed_by_another(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side = await world.boot(HOLDING)
    front_end = await world.front_end()
    await front_end.ask("running")
    waiting = front_end.ask("waiting")
    await until(lambda: side.books[0] == 1)
    monkeypatch.setattr(link_module, "states_of", failing(3, link_module.states_of))
    monkeypatch.setattr(front_end.link._line, "drain", failing(1 << 30, lambda: None))
    assert (await waiting).prefill
    await until(lambda: caplog.text.count("heartbeat failed") >= 4)
    await until(lambda: front_end.link.connected)
    await until(lambda: side.books == (0, 2, 4) and side.hub.front_ends == 1)


async def test_a_welcome_that_cannot_be_answered_leaves_no_request_without_a_scheduler(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.boot(HOLDING)
    front_end = await world.front_end()
    await front_end.ask("running")
    world.crash()
    await until(lambda: not front_end.link.connected)
    monkeypatch.setattr(front_end.registry, "follow", failing(2, front_end.registry.follow))
    side = await world.boot(IMMEDIATE)
    asked = [front_end.ask(f"{number}") for number in range(3)]
    await until(lambda: front_end.link.connected)
    assert len(await asyncio.gather(*asked)) == 3
    await until(lambda: side.books == (0, 4, 8))


async def test_an_arrival_that_cannot_be_said_is_not_kept(world: World) -> None:
    side = await world.boot()
    front_end = await world.front_end()
    line = front_end.link._line
    assert isinstance(line, FakeLine)
    line.send_message = failing(2, line.send_message)  # type: ignore[method-assign]
    with pytest.raises(OSError, match="Too many"):
        await front_end.ask("a")
    assert front_end.link.open == 0
    assert (await front_end.ask("b")).prefill
    await until(lambda: side.books == (0, 1, 2))


async def test_a_front_end_that_cannot_make_its_first_line_does_not_start(world: World) -> None:
    world.net.full = True
    front_end = FrontEnd(world.net)
    world.front_ends.append(front_end)
    with pytest.raises(OSError, match="Too many"):
        await front_end.link.start(5.0)
