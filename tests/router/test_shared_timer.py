"""Timeouts that share a timer end each in its own time."""

from __future__ import annotations

import asyncio

import pytest
from router_harness import until

from sglang_sbs.router.shared_timer import SharedTimer

LIMIT_S = 0.05


async def test_each_key_has_its_whole_time_and_one_that_is_discarded_never_ends() -> None:
    loop = asyncio.get_running_loop()
    ended: dict[str, float] = {}
    timer: SharedTimer[str] = SharedTimer(LIMIT_S, lambda key: ended.setdefault(key, loop.time()))
    began: dict[str, float] = {}
    for key in ("first", "dropped", "second"):
        began[key] = loop.time()
        timer.add(key)
    timer.discard("dropped")
    await asyncio.sleep(LIMIT_S / 2)
    began["late"] = loop.time()
    timer.add("late")
    await until(lambda: "late" in ended)
    assert list(ended) == ["first", "second", "late"]
    for key, ended_s in ended.items():
        assert ended_s >= began[key] + LIMIT_S
    timer.add("again")
    await until(lambda: "again" in ended)
    timer.discard("again")  # does nothing


async def test_what_ends_in_time_sets_no_timer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, timers = asyncio.get_running_loop(), []
    call_at = loop.call_at

    def counted(*args: object, **kwargs: object) -> asyncio.TimerHandle:
        timers.append(args)
        return call_at(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_at", counted)
    timer: SharedTimer[int] = SharedTimer(3600.0, lambda _key: pytest.fail("it is over"))
    for key in range(100):
        timer.add(key)
        timer.discard(key)
    assert len(timers) == 1


async def test_a_key_may_start_another_timeout_when_its_own_ends() -> None:
    left = [3]

    def expired(key: str) -> None:
        left[0] -= 1
        if left[0]:
            timer.add(key)

    timer: SharedTimer[str] = SharedTimer(LIMIT_S / 10, expired)
    timer.add("a")
    await until(lambda: left == [0])


async def test_a_handler_that_fails_does_not_keep_other_keys_from_their_timeout() -> None:
    ended: list[str] = []

    def expired(key: str) -> None:
        if key == "faulty":
            raise ValueError(key)
        ended.append(key)

    timer: SharedTimer[str] = SharedTimer(LIMIT_S / 10, expired)
    timer.add("faulty")
    timer.add("other")
    await until(lambda: ended == ["other"])
