"""Most of what a large cluster sends moves nothing: no look at everybody, and nothing missed."""

from __future__ import annotations

import pytest
from model_engine import DecodeEngine

from sglang_sbs.scheduling import (
    Dispatch,
    ForwardEnded,
    InstanceUp,
    PrefillDone,
    RequestAdopted,
    RequestArrived,
    RequestEnded,
    Scheduler,
    SchedulerConfig,
    TimerFired,
    WakeAt,
)
from sglang_sbs.wire import EndForward


@pytest.fixture
def looks(monkeypatch):
    """How often everybody was looked at."""
    seen: list[float] = []
    drive = Scheduler._drive

    def counted(self, now_s, out):
        seen.append(now_s)
        return drive(self, now_s, out)

    monkeypatch.setattr(Scheduler, "_drive", counted)
    return seen


def scheduler(**decode_limits: int) -> Scheduler:
    made = Scheduler(SchedulerConfig(policy="sbs"))
    made.handle(InstanceUp(instance="p0", role="prefill", dp_size=2, chunk_tokens=1000), 0.0)
    made.handle(InstanceUp(instance="d0", role="decode", dp_size=1, **decode_limits), 0.0)
    return made


def dispatched(commands) -> list[str]:
    return [command.rid for command in commands if isinstance(command, Dispatch)]


def test_a_decode_report_is_taken_without_a_look_at_everybody(looks):
    made = scheduler()
    looks.clear()
    report = DecodeEngine("d0", 1).message(0)
    assert made.handle(ForwardEnded(instance="d0", report=report), 1.0) == []
    assert looks == []


def test_a_decode_report_that_makes_room_lets_go_what_waits_for_it():
    made = scheduler(max_running_requests=1)
    decode = DecodeEngine("d0", 1)
    made.handle(ForwardEnded(instance="d0", report=decode.message(0)), 0.1)
    first = made.handle(RequestArrived(rid="a", prompt_tokens=100), 0.2)
    assert dispatched(first) == ["a"]
    decode.accept("a", 0, 100)
    made.handle(PrefillDone(rid="a"), 0.3)
    made.handle(ForwardEnded(instance="d0", report=decode.message(0)), 0.4)
    assert dispatched(made.handle(RequestArrived(rid="b", prompt_tokens=100), 0.5)) == []
    decode.end("a")
    out = made.handle(RequestEnded(rid="a", outcome="completed", completion_tokens=5), 0.6)
    out += made.handle(ForwardEnded(instance="d0", report=decode.message(0)), 0.7)
    assert dispatched(out) == ["b"]


def test_thousands_that_are_adopted_cost_one_look(looks):
    made = scheduler()
    looks.clear()
    wakes = []
    for number in range(1000):
        event = RequestAdopted(
            rid=f"r{number}",
            prompt_tokens=10,
            prefill="p0",
            prefill_rank=0,
            decode="d0",
            decode_rank=0,
            prefilled=number % 2 == 0,
        )
        out = made.handle(event, 1.0)
        wakes += [command.time_s for command in out if isinstance(command, WakeAt)]
    assert looks == []
    assert len(wakes) == 1
    assert made.in_flight_requests == 1000
    made.handle(TimerFired(), wakes[0])
    assert len(looks) == 1


def test_the_end_of_a_request_in_decode_is_no_news_to_prefill_but_in_prefill_it_is(looks):
    made = scheduler()
    for rid in ("decoding", "prefilling"):
        made.handle(RequestArrived(rid=rid, prompt_tokens=100), 1.0)
    made.handle(PrefillDone(rid="decoding"), 2.0)
    looks.clear()
    made.handle(RequestEnded(rid="decoding", outcome="completed", completion_tokens=5), 2.01)
    assert looks == []
    made.handle(RequestEnded(rid="prefilling", outcome="aborted"), 2.02)
    assert looks == [2.02]


def test_thousands_that_are_given_up_cost_few_looks(looks):
    made = scheduler()
    for number in range(1000):
        made.handle(RequestArrived(rid=str(number), prompt_tokens=100), 1.0)
    looks.clear()
    asked = []
    for number in range(1000):
        now_s = 2.0 + 1e-5 * number
        asked += made.handle(RequestEnded(rid=str(number), outcome="aborted"), now_s)
    assert len(looks) == 1
    (wake,) = (command for command in asked if isinstance(command, WakeAt))
    made.handle(TimerFired(), wake.time_s)
    assert looks[1:] == [wake.time_s]


def launch(rank: int, rids: list[str]) -> ForwardEnded:
    report = EndForward(
        instance_id="p0",
        boot_id=f"boot{rank}",
        seq=1,
        role="prefill",
        dp_rank=rank,
        dp_size=2,
        kind="launch",
        forward_id=1,
        extend_tokens=100,
        tokens_per_rank=[100, 100],
        accepted_requests=len(rids),
        rids=rids,
    )
    return ForwardEnded(instance="p0", report=report)


def test_what_all_ranks_say_of_one_pass_costs_one_look_and_another_soon(looks):
    made = scheduler()
    made.handle(RequestArrived(rid="a", prompt_tokens=100), 0.1)
    made.handle(RequestArrived(rid="b", prompt_tokens=100), 0.1)
    looks.clear()
    made.handle(launch(0, ["a"]), 0.11)
    assert looks == [0.11]
    out = made.handle(launch(1, ["b"]), 0.1101)
    assert looks == [0.11]
    (wake,) = [command for command in out if isinstance(command, WakeAt)]
    assert wake.time_s <= 0.1101 + 0.001
    made.handle(TimerFired(), wake.time_s)
    assert looks == [0.11, wake.time_s]


def test_answers_are_no_news_of_an_instance_that_reports_its_passes(looks):
    made = scheduler()
    made.handle(RequestArrived(rid="a", prompt_tokens=100), 0.1)
    made.handle(launch(0, ["a"]), 0.11)
    looks.clear()
    made.handle(PrefillDone(rid="a"), 0.2)
    assert looks == []


def test_answers_are_all_that_is_known_of_an_instance_that_does_not(looks):
    made = scheduler()
    made.handle(RequestArrived(rid="a", prompt_tokens=100), 0.1)
    looks.clear()
    made.handle(PrefillDone(rid="a"), 0.2)
    assert looks == [0.2]
