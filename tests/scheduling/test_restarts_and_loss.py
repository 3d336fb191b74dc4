"""Single faults, one by one: each is a way in which the books once stayed wrong for good."""

from __future__ import annotations

import pytest
from driver import Driver
from model_engine import PrefillEngine
from msgspec import structs

from sglang_sbs.scheduling import (
    ForwardEnded,
    InstanceDown,
    InstanceUp,
    PrefillDone,
    RequestEnded,
    TimerFired,
)
from sglang_sbs.scheduling.policies.adaptive.pass_forecast import PassForecast
from sglang_sbs.scheduling.queue.request import RequestQueue
from sglang_sbs.scheduling.received.report_cursor import ReportCursor
from sglang_sbs.scheduling.request import Request


def prefill_up(dp: int = 2) -> InstanceUp:
    return InstanceUp(instance="p0", role="prefill", dp_size=dp, chunk_tokens=1000)


def test_a_timer_that_fired_early_is_set_again():
    driver = Driver(trigger="paper").up()
    driver.arrive("a")
    driver.arrive("b")
    asked_s, driver.wake_s = driver.wake_s, None
    driver.tell(TimerFired())
    assert driver.wake_s == asked_s


def test_a_request_sent_right_after_a_restart_outlives_the_new_boots_first_report():
    driver = Driver().up()
    driver.report("p0", 0, kind="heartbeat")
    driver.tell(InstanceDown(instance="p0"))
    driver.tell(prefill_up())
    (dispatch,) = driver.arrive("r", 300)
    driver.report("p0", dispatch.prefill_rank, kind="heartbeat", seq=0, boot_id="next")
    rank = driver.prefill_state().ranks[dispatch.prefill_rank]
    assert (rank.flight_tokens, rank.outstanding_requests) == (300, 1)


def test_a_late_report_of_the_engine_before_the_restart_is_ignored():
    driver = Driver().up()
    driver.report("p0", 0, kind="heartbeat", seq=5)
    driver.report("p0", 0, kind="heartbeat", seq=0, boot_id="next", waiting_tokens=4000)
    driver.report("p0", 0, kind="heartbeat", seq=6, waiting_tokens=9000)
    assert driver.prefill_state().ranks[0].queued_tokens == 3000, "one chunk is on its way"


def test_forward_ids_start_anew_with_a_new_boot():
    driver = Driver().up(dp=1)
    driver.report("p0", 0, dp=1, forward_id=900, forward_s=0.1, tokens_per_rank=[10])
    driver.report(
        "p0", 0, dp=1, seq=0, boot_id="next", forward_id=1, forward_s=0.1, tokens_per_rank=[10]
    )
    assert driver.prefill_state().passes == 2


def test_decode_forgets_what_ran_before_a_restart_but_not_what_was_sent_after_it():
    driver = Driver().up(decode_dp=1)
    driver.report("d0", 0, dp=1)
    driver.arrive("before", 100)
    driver.tell(InstanceDown(instance="d0"))
    driver.tell(InstanceUp(instance="d0", role="decode", dp_size=1))
    driver.wait(1.0)
    assert driver.arrive("after", 200)
    driver.report("d0", 0, dp=1, seq=0, boot_id="next")
    (load,) = driver.scheduler.decode["d0"].loads()
    assert load.running == 1
    assert 200 <= load.committed_tokens < 200 + 300


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_of_a_larger_instance_of_the_same_name_can_still_end(role):
    driver = Driver().up(dp=4, decode_dp=4)
    for i in range(4):
        driver.arrive(f"r{i}")
        driver.wait(1.0)
    driver.tell(InstanceUp(instance="p0" if role == "prefill" else "d0", role=role, dp_size=1))
    for i in range(4):
        driver.tell(PrefillDone(rid=f"r{i}"))
        driver.tell(RequestEnded(rid=f"r{i}", outcome="failed"))
    assert driver.scheduler.in_flight_requests == 0


def test_a_name_that_comes_back_in_the_other_role_leaves_the_first():
    driver = Driver().up(prefill=2)
    driver.tell(InstanceUp(instance="p0", role="decode", dp_size=1))
    assert set(driver.scheduler.prefill) == {"p1"}
    assert set(driver.scheduler.decode) == {"d0", "p0"}


def test_a_client_that_leaves_during_its_prefill_does_not_stop_an_instance_without_plugin():
    driver = Driver(trigger="paper").up()
    driver.arrive("gone")
    driver.wait(0.1)
    driver.tell(RequestEnded(rid="gone", outcome="aborted"))
    driver.wait(5.0)
    assert driver.prefill_state().ready
    assert driver.arrive("next")


def test_a_plugin_that_falls_silent_in_a_pass_does_not_stop_the_instance():
    driver = Driver(trigger="paper").up(dp=1)
    driver.arrive("r")
    driver.report(
        "p0", 0, dp=1, kind="launch", forward_id=1, tokens_per_rank=[100], extend_tokens=100,
        rids=["r"], accepted_requests=1,
    )  # fmt: skip
    driver.tell(PrefillDone(rid="r"))
    driver.arrive("next")
    assert driver.wait(10.0), "longer than usual: it may compile in its first pass"


def test_what_was_presumed_launched_returns_to_flight_whole_and_in_order():
    driver = Driver(trigger="adaptive", t_default_s=0.1, policy="least_tokens").up(dp=1)
    engine = PrefillEngine("p0", 1, 1000)
    for rid, tokens in (("a", 600), ("b", 700), ("c", 50)):
        driver.arrive(rid, tokens)
    driver.wait(0.05)
    flight = driver.scheduler.prefill["p0"].ranks[0].flight
    assert flight.total == 350, "the first chunk is presumed launched"
    engine.accept("x", 0, 10)
    for message in engine.launch():
        driver.tell(ForwardEnded(instance="p0", report=message))
    in_flight = [(request.rid, request.flight_tokens) for request in flight]
    assert in_flight == [("a", 600), ("b", 700), ("c", 50)]


def test_silence_does_not_make_a_long_prompt_young():
    driver = Driver(trigger="adaptive", t_default_s=0.1).up(dp=1)
    engine = PrefillEngine("p0", 1, 1000)
    (dispatch,) = driver.arrive("long", 3000)
    engine.accept("long", 0, 3000)
    for message in engine.launch():
        driver.tell(ForwardEnded(instance="p0", report=message))
    rank = driver.scheduler.prefill["p0"].ranks[dispatch.prefill_rank]
    driver.wait(5.0)
    assert driver.scheduler.prefill["p0"].watchdog.fires
    assert rank.pairs(1000) == 1000 * 1500, "its second chunk attends to the first"
    driver.tell(InstanceDown(instance="p0"))
    assert rank.pairs(1000) == 0


def test_an_instance_that_stays_down_is_forgotten_once_nothing_runs_there():
    driver = Driver().up(prefill=2)
    driver.arrive("r")
    driver.tell(InstanceUp(instance="d1", role="decode", dp_size=1))
    for name in ("p0", "d0"):
        driver.tell(InstanceDown(instance=name))
    driver.wait(700)
    driver.tell(InstanceUp(instance="p2", role="prefill", dp_size=1))
    assert set(driver.scheduler.prefill) == {"p1", "p2"}
    assert set(driver.scheduler.decode) == {"d0", "d1"}, "a request still runs on d0"
    driver.tell(RequestEnded(rid="r", outcome="completed"))
    driver.tell(InstanceDown(instance="p2"))
    assert set(driver.scheduler.decode) == {"d1"}


def test_deadlines_of_requests_long_gone_take_no_memory():
    queue = RequestQueue()
    for i in range(5000):
        queue.add(Request(f"r{i}", i, 1, None, float(i), float(i) + 1e6))
        queue.remove(f"r{i - 1}")
    assert len(queue._deadlines) < 200
    assert queue.next_deadline_s() == 4999 + 1e6


def test_the_cursor_counts_what_lost_messages_acknowledged():
    cursor = ReportCursor()
    engine = PrefillEngine("p0", 1, 1000)
    first = engine.message(0, "heartbeat")
    for rid in ("a", "b"):
        engine.accept(rid, 0, 10)
    lost = engine.message(0, "heartbeat")
    engine.accept("c", 0, 10)
    last = engine.message(0, "heartbeat")
    assert cursor.take(first, 1.0) == (False, 0)
    assert cursor.take(last, 2.0) == (False, 2)
    assert cursor.take(lost, 3.0) is None
    assert cursor.take(last, 4.0) is None
    assert cursor.reported_s == 2.0


def test_a_jump_of_the_sequence_number_is_not_believed_while_the_stream_goes_on():
    cursor, said = ReportCursor(), PrefillEngine("p0", 1, 1000).message(0, "heartbeat")
    for second in range(10):
        assert cursor.take(structs.replace(said, seq=second), float(second))
        for ahead in (2**40, 2**40 + 1):
            assert cursor.take(structs.replace(said, seq=ahead), second + 0.5) is None


def test_after_a_forged_sequence_number_the_true_stream_is_believed_again():
    cursor, said = ReportCursor(), PrefillEngine("p0", 1, 1000).message(0, "heartbeat")
    assert cursor.take(structs.replace(said, seq=2**40), 0.0)
    taken = [cursor.take(structs.replace(said, seq=n), float(n)) for n in range(1, 10)]
    assert [state is not None for state in taken] == [False, False, *[True] * 7]
    assert all(state == (False, 0) for state in taken[2:])


def test_a_boot_that_was_taken_to_be_over_is_believed_when_the_other_is_silent():
    cursor, said = ReportCursor(), PrefillEngine("p0", 1, 1000).message(0, "heartbeat")
    assert cursor.take(said, 0.0)
    assert cursor.take(structs.replace(said, boot_id="forged"), 0.1)
    assert cursor.take(structs.replace(said, seq=1), 0.2) is None
    assert cursor.take(structs.replace(said, seq=3), 2.1)


def test_an_instance_that_is_silent_since_a_client_left_is_ready_after_the_watchdog():
    driver = Driver(trigger="paper").up(dp=1)
    driver.report("p0", 0, dp=1, kind="heartbeat")
    driver.arrive("gone")
    driver.tell(RequestEnded(rid="gone", outcome="aborted"))
    assert driver.arrive("next") == [], "it has not said that it is free"
    assert driver.wait(10.0)


def test_what_others_are_said_to_have_queued_costs_no_more_than_it_can_matter():
    driver = Driver().up(dp=1)
    driver.report("p0", 0, dp=1, kind="heartbeat", waiting_requests=1, waiting_tokens=2**40)
    forecast = PassForecast(driver.scheduler.prefill["p0"]).fork(driver.now_s, closed=False)
    assert len(forecast._passes) <= 64
    driver.report("p0", 0, dp=1, kind="heartbeat", waiting_requests=2**40, waiting_tokens=1)
    assert driver.scheduler.prefill["p0"].ranks.charged_tokens <= 64


def test_a_pass_cannot_have_taken_longer_than_it_was_watched():
    driver = Driver().up(dp=1)
    fields = {"dp": 1, "tokens_per_rank": [100], "extend_tokens": 100}
    driver.report("p0", forward_id=1, forward_s=3600.0, **fields)
    driver.now_s += 4.0
    for forward_id in range(2, 50):
        driver.report("p0", forward_id=forward_id, forward_s=4.0, **fields)
    assert driver.scheduler.prefill["p0"].watchdog.timeout_s <= 5 * 4.0
    assert driver.prefill_state().passes == 1


def test_launches_that_never_end_take_no_memory():
    driver = Driver().up(dp=1)
    for forward_id in range(1000):
        driver.report(
            "p0", dp=1, kind="launch", forward_id=forward_id, tokens_per_rank=[1], extend_tokens=1
        )
    assert len(driver.scheduler.prefill["p0"].passes) <= 16


def test_what_a_silent_rank_said_last_is_forgotten_while_another_speaks():
    driver = Driver(t_default_s=1.0).up()
    driver.report("p0", 1, kind="heartbeat", waiting_requests=1, waiting_tokens=10**9)
    for _ in range(8):
        driver.report("p0", 0, kind="heartbeat")
        driver.wait(1.0)
    assert driver.scheduler.prefill["p0"].watchdog.fires == 0
    assert driver.scheduler.prefill["p0"].idle
    assert [rank.c_avail for rank in driver.prefill_state().ranks] == [1000, 1000]
