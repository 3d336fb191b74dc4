"""The dispatcher: futures, timers, order of events, and a log that replays."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from router_harness import until

from sglang_sbs.router.dispatch.dispatcher import LocalDispatcher, Submitted
from sglang_sbs.router.errors import Refused, RouterError
from sglang_sbs.scheduling import Scheduler, SchedulerConfig
from sglang_sbs.scheduling.eventlog import EventLogWriter, read_event_log
from sglang_sbs.scheduling.events import (
    Command,
    Dispatch,
    Event,
    InstanceUp,
    Refuse,
    RequestArrived,
    RequestEnded,
    TimerFired,
    WakeAt,
)
from sglang_sbs.wire.gangs import SIZED_RID_PREFIX


def dispatch(rid: str) -> Dispatch:
    return Dispatch(
        rid=rid,
        prefill="http://p:1",
        prefill_rank=0,
        decode="http://d:1",
        decode_rank=0,
        batch=1,
        held_s=0.0,
        reason="test",
    )


def submitted(rid: str, prompt_tokens: int = 1) -> Submitted:
    return Submitted(arrival=RequestArrived(rid=rid, prompt_tokens=prompt_tokens))


class Scripted:
    """Answers each event with what ``answers`` says."""

    def __init__(self, answers: Any) -> None:
        self.events: list[Event] = []
        self._answers = answers

    def handle(self, event: Event, now_s: float) -> list[Command]:
        self.events.append(event)
        return list(self._answers(event, now_s))

    def snapshot(self, now_s: float) -> Any:
        return None


async def test_a_request_waits_until_a_timer_releases_it() -> None:
    def answers(event: Event, now_s: float) -> list[Command]:
        if isinstance(event, RequestArrived):
            return [WakeAt(time_s=now_s + 10), WakeAt(time_s=now_s + 0.01)]
        return [dispatch("a")] if isinstance(event, TimerFired) else []

    scheduler = Scripted(answers)
    dispatcher = LocalDispatcher(scheduler)
    placed = await asyncio.wait_for(dispatcher.dispatch(submitted("a", 5)), 5)
    assert placed.prefill == "http://p:1"
    assert dispatcher.waiting == 0
    assert dispatcher.open == 1
    dispatcher.on_ended("a", "completed")
    dispatcher.on_ended("a", "failed")
    assert scheduler.events[-1] == RequestEnded(rid="a", outcome="completed")
    assert dispatcher.open == 0


async def test_the_timer_fires_once_at_the_time_that_was_asked_for_last() -> None:
    asked_s: dict[str, float] = {}
    fired: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def answers(event: Event, now_s: float) -> list[Command]:
        if isinstance(event, RequestArrived):
            asked_s[event.rid] = now_s + {"soon": 0.005, "later": 0.05, "sooner": 0.02}[event.rid]
            return [WakeAt(time_s=asked_s[event.rid])]
        if isinstance(event, TimerFired):
            fired.set_result(now_s)  # raises if it fires again
        return []

    scheduler = Scripted(answers)
    dispatcher = LocalDispatcher(scheduler)
    for rid in ("soon", "later", "sooner"):
        dispatcher.submit(RequestArrived(rid=rid, prompt_tokens=1))
    assert await asyncio.wait_for(fired, 5) >= asked_s["sooner"] > asked_s["soon"]
    assert dispatcher.pump is not None
    assert dispatcher.pump._timer is None
    assert dispatcher.pump.errors == 0


async def test_a_gang_is_released_in_one_go_and_in_order() -> None:
    def answers(event: Event, now_s: float) -> list[Command]:
        if isinstance(event, RequestArrived) and event.rid == "c":
            return [dispatch("b"), dispatch("a"), dispatch("c")]
        return []

    dispatcher = LocalDispatcher(Scripted(answers))
    order: list[str] = []

    async def ask(rid: str) -> None:
        await dispatcher.dispatch(submitted(rid))
        order.append(rid)

    await asyncio.gather(ask("a"), ask("b"), ask("c"))
    assert sorted(order) == ["a", "b", "c"]


async def test_every_request_of_a_batch_gets_what_is_sent_beside_it() -> None:
    sized = SIZED_RID_PREFIX.__add__

    def at(rid: str, prefill: str, rank: int, batch: int) -> Dispatch:
        return msgspec.structs.replace(
            dispatch(sized(rid)), prefill=prefill, prefill_rank=rank, batch=batch
        )

    def answers(event: Event, now_s: float) -> list[Command]:
        if not isinstance(event, RequestArrived) or event.rid != sized("f"):
            return []
        return [
            *(at("a", "p0", 0, 1), at("b", "p0", 1, 1), at("c", "p0", 1, 1)),
            *(at("d", "p1", 0, 1), at("e", "p0", 0, 2), WakeAt(time_s=now_s + 9)),
            Refuse(rid=sized("f"), cause="queue_full", retry_after_s=1, message="full"),
        ]

    dispatcher = LocalDispatcher(Scripted(answers))
    results = await asyncio.gather(
        *(dispatcher.dispatch(submitted(sized(rid))) for rid in "abcdef"), return_exceptions=True
    )
    parts = [command.gang for command in results if isinstance(command, Dispatch)]
    assert all(part is not None for part in parts)
    assert [(part.members, part.ranks) for part in parts if part] == [
        *((2, 2), (2, 2), (2, 2), (1, 1), (2, 2)),
    ]
    tags = [part.tag for part in parts if part]
    assert tags[0] == tags[1] == tags[2] == tags[4] != tags[3]
    assert isinstance(results[5], Refused)


async def test_refusals_raise_and_end_the_request() -> None:
    def answers(event: Event, now_s: float) -> list[Command]:
        if isinstance(event, RequestArrived):
            return [Refuse(rid=event.rid, cause="queue_full", retry_after_s=2, message="full")]
        return []

    scheduler = Scripted(answers)
    dispatcher = LocalDispatcher(scheduler)
    with pytest.raises(Refused) as error:
        await dispatcher.dispatch(submitted("a"))
    assert error.value.status == 429
    dispatcher.on_ended("a", "failed")
    dispatcher.prefill_done("a")
    assert len(scheduler.events) == 1


@pytest.mark.parametrize("dispatched_first", [False, True])
async def test_what_is_cancelled_is_ended_once_also_in_the_instant_of_dispatch(
    dispatched_first: bool,
) -> None:
    scheduler = Scripted(lambda event, now_s: [])
    dispatcher = LocalDispatcher(scheduler)
    task = asyncio.create_task(dispatcher.dispatch(submitted("a")))
    await asyncio.sleep(0)
    if dispatched_first:
        scheduler._answers = lambda event, now_s: (
            [dispatch("a")] if isinstance(event, TimerFired) else []
        )
        dispatcher.submit(TimerFired())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(isinstance(event, RequestEnded) for event in scheduler.events)
    dispatcher.on_ended("a", "aborted")
    assert scheduler.events[-1] == RequestEnded(rid="a", outcome="aborted")
    assert dispatcher.open == dispatcher.waiting == 0


async def test_what_is_refused_in_the_instant_of_cancelling_has_no_other_end() -> None:
    scheduler = Scripted(lambda event, now_s: [])
    dispatcher = LocalDispatcher(scheduler)
    task = asyncio.create_task(dispatcher.dispatch(submitted("a")))
    await asyncio.sleep(0)
    refusal = Refuse(rid="a", cause="deadline", retry_after_s=1, message="late")
    scheduler._answers = lambda event, now_s: [refusal]
    task.cancel()
    dispatcher.submit(TimerFired())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [type(event) for event in scheduler.events] == [RequestArrived, TimerFired]
    assert dispatcher.open == 0


async def test_events_that_arise_while_handling_one_come_after_it() -> None:
    dispatcher: LocalDispatcher
    depth = 0
    deepest = 0

    def answers(event: Event, now_s: float) -> list[Command]:
        nonlocal depth, deepest
        depth += 1
        deepest = max(deepest, depth)
        if len(scheduler.events) < 5:
            dispatcher.submit(TimerFired())
        depth -= 1
        return []

    scheduler = Scripted(answers)
    dispatcher = LocalDispatcher(scheduler)
    dispatcher.submit(TimerFired())
    assert len(scheduler.events) == 5
    assert deepest == 1


def test_the_event_log_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    for before in (None, "of an earlier run, longer than a new beginning" * 100):
        if before is not None:
            path.write_text(before)
            path.chmod(0o644)
        EventLogWriter(path, SchedulerConfig()).close()
        assert path.stat().st_mode & 0o777 == 0o600
        assert len(list(read_event_log(path))) == 1
    EventLogWriter(Path("/dev/null"), SchedulerConfig()).close()


def test_a_restart_keeps_the_event_log_of_the_run_before(tmp_path: Path) -> None:
    path, link = tmp_path / "events.log", tmp_path / "link.log"
    link.symlink_to(path)
    path.write_text("no event log")
    for policy in ("round_robin", "least_tokens"):
        log = EventLogWriter(link, SchedulerConfig(policy=policy))
        log.write(1.0, TimerFired(), [])
        log.close()
    for _ in range(2):  # starts that fail before the first event
        EventLogWriter(link, SchedulerConfig(policy="eta")).close()
    for name, policy in (("events.log", "eta"), ("events.log.1", "least_tokens")):
        header, *_ = read_event_log(tmp_path / name)
        assert header.config is not None
        assert header.config.policy == policy
    assert link.is_symlink()


async def test_the_event_log_replays_to_the_same_commands(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    config = SchedulerConfig(policy="least_tokens")
    log = EventLogWriter(path, config)
    dispatcher = LocalDispatcher(Scheduler(config), event_log=log)
    for role, url in (("prefill", "http://p:1"), ("decode", "http://d:1")):
        dispatcher.submit(InstanceUp(instance=url, role=role, dp_size=2, chunk_tokens=1024))  # type: ignore[arg-type]
    for number in range(20):
        rid = f"r{number}"
        await asyncio.wait_for(dispatcher.dispatch(submitted(rid, 100 + number)), 5)
        dispatcher.prefill_done(rid, 100, 0)
        dispatcher.on_ended(rid, "completed", 5)
    dispatcher.close()
    header, *records = read_event_log(path)
    assert header.config == config
    replayed = Scheduler(header.config)
    dispatches = 0
    for record in records:
        assert record.event is not None
        assert replayed.handle(record.event, record.now_s) == record.commands
        dispatches += sum(isinstance(command, Dispatch) for command in record.commands)
    assert dispatches == 20


def test_a_torn_log_gives_its_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    log = EventLogWriter(path, SchedulerConfig())
    log.write(time.monotonic(), TimerFired(), [])
    log.close()
    path.write_bytes(path.read_bytes()[:-3])
    assert len(list(read_event_log(path))) == 1
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="not an sglang-sbs event log"):
        list(read_event_log(path))


async def test_a_request_the_scheduler_forgot_is_ended_in_the_end() -> None:
    scheduler = Scripted(lambda event, now_s: [])
    dispatcher = LocalDispatcher(scheduler, give_up_s=0.01)
    with pytest.raises(RouterError, match="scheduler failed"):
        await dispatcher.dispatch(submitted("r"))
    assert scheduler.events[-1] == RequestEnded(rid="r", outcome="failed")
    assert (dispatcher.open, dispatcher.waiting) == (0, 0)


async def test_a_request_that_was_decided_in_the_last_moment_is_not_given_up() -> None:
    """The process stood still: the decision and the end of the patience come in one turn."""
    scheduler = Scripted(lambda event, now_s: [])
    dispatcher = LocalDispatcher(scheduler, give_up_s=30.0)
    task = asyncio.create_task(dispatcher.dispatch(submitted("r")))
    await asyncio.sleep(0)
    dispatcher._requests["r"].decision.set_result(Dispatch("r", "p0", 0, "d0", 0, 1, 0.0, ""))
    dispatcher._give_up("r")
    await task
    assert not any(isinstance(event, RequestEnded) for event in scheduler.events)


async def test_a_scheduler_that_failed_is_asked_again_and_fills_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fired = asyncio.Event()

    def answers(event: Event, now_s: float) -> list[Command]:
        if isinstance(event, TimerFired):
            fired.set()
            return []
        raise RuntimeError("defect")

    dispatcher = LocalDispatcher(Scripted(answers))
    for number in range(50):
        dispatcher.submit(InstanceUp(instance=f"p{number}", role="prefill", dp_size=1))
    await asyncio.wait_for(fired.wait(), 10)
    assert dispatcher.scheduler_errors == 50
    assert len([r for r in caplog.records if "scheduler failed" in r.message]) == 1
    dispatcher.close()


@pytest.mark.parametrize("failing", ["timelines", "observer", "trial"])
async def test_a_record_that_fails_costs_no_request_its_decision(
    failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("defect")

    scheduler = Scripted(
        lambda event, now_s: [dispatch(event.rid)] if isinstance(event, RequestArrived) else []
    )
    dispatcher = LocalDispatcher(scheduler)
    if failing == "timelines":
        dispatcher.pump.timelines.observe = fail  # type: ignore[method-assign]
    else:
        setattr(dispatcher.pump, failing, fail)
    assert (await dispatcher.dispatch(submitted("r"))).rid == "r"
    assert dispatcher.scheduler_errors == 1
    assert "record" in caplog.text
    dispatcher.close()


async def test_the_event_log_is_written_soon_without_anybody_asking(tmp_path: Path) -> None:
    dispatcher = LocalDispatcher(
        Scheduler(), event_log=EventLogWriter(tmp_path / "log", SchedulerConfig())
    )
    dispatcher.pump.flush_s = 0.01
    size = 0
    for _ in range(2):
        size = (tmp_path / "log").stat().st_size
        dispatcher.submit(TimerFired())
        await until(lambda: (tmp_path / "log").stat().st_size > size)  # noqa: B023
    dispatcher.close()


async def test_a_full_disk_ends_the_event_log_and_nothing_else(tmp_path: Path) -> None:
    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...
        def close(self) -> None: ...

    for broken_at in ("write", "flush"):
        log = EventLogWriter(tmp_path / "log", SchedulerConfig())
        log._file = Full()  # type: ignore[assignment]
        scheduler = Scripted(
            lambda event, now_s: [dispatch(event.rid)] if isinstance(event, RequestArrived) else []
        )
        dispatcher = LocalDispatcher(scheduler, event_log=log)
        if broken_at == "flush":
            dispatcher.submit(TimerFired())
            dispatcher.pump.flush_log()
        assert (await dispatcher.dispatch(submitted("r"))).rid == "r"
        dispatcher.pump.flush_log()
        dispatcher.close()


async def test_text_that_cannot_be_encoded_ends_the_event_log_and_nothing_else(
    tmp_path: Path,
) -> None:
    both = [dispatch("first"), dispatch("second")]
    log = EventLogWriter(tmp_path / "log", SchedulerConfig())
    scheduler = Scripted(lambda event, now_s: both if event.rid == "second" else [])
    dispatcher = LocalDispatcher(scheduler, event_log=log)
    first = asyncio.create_task(dispatcher.dispatch(submitted("first")))
    await asyncio.sleep(0)
    odd = RequestArrived(rid="second", prompt_tokens=1, tenant="\udcff")
    assert (await dispatcher.dispatch(Submitted(arrival=odd))).rid == "second"
    assert (await first).rid == "first"
    assert dispatcher.pump.event_log is None
    dispatcher.close()
