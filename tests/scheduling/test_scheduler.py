"""Behaviour of the whole scheduler object, event by event."""

from __future__ import annotations

import msgspec
import pytest
from driver import Driver

from sglang_sbs.scheduling import (
    InstanceDown,
    InstanceUp,
    LoadPolled,
    PrefillDone,
    RequestEnded,
    SchedulerConfig,
)

TRIGGERS = pytest.mark.parametrize("trigger", ["paper", "adaptive"])
POLICIES = pytest.mark.parametrize(
    "policy", ["sbs", "round_robin", "random", "random_rank", "least_requests", "least_tokens"]
)


@TRIGGERS
def test_a_request_to_an_idle_cluster_leaves_at_once(trigger):
    driver = Driver(trigger=trigger).up(prefill=3)
    (dispatch,) = driver.arrive("r")
    assert dispatch.rid == "r"
    assert dispatch.held_s == 0
    assert dispatch.reason


@TRIGGERS
def test_while_the_only_instance_computes_requests_wait_in_the_scheduler(trigger):
    driver = Driver(trigger=trigger, t_default_s=0.5).up()
    driver.arrive("first")
    driver.now_s += 0.01
    for rank in (0, 1):
        driver.report(
            "p0",
            rank,
            kind="launch",
            forward_id=1,
            tokens_per_rank=[100, 0],
            extend_tokens=100 if rank == 0 else 0,
            rids=["first"] if rank == 0 else [],
            accepted_requests=1 - rank,
        )
    driver.now_s += 0.1
    assert driver.arrive("a") == []
    assert driver.arrive("b") == []
    assert driver.scheduler.snapshot(driver.now_s).queue_requests == 2


def test_the_paper_trigger_sends_the_batch_at_end_forward_packed_over_the_ranks():
    driver = Driver(trigger="paper", t_default_s=0.3).up()
    driver.arrive("first", 100)
    driver.report(
        "p0",
        0,
        kind="launch",
        forward_id=1,
        tokens_per_rank=[100, 0],
        extend_tokens=100,
        rids=["first"],
        accepted_requests=1,
    )
    driver.wait(0.1)
    for rid, tokens in (("a", 900), ("b", 500), ("c", 400)):
        driver.arrive(rid, tokens)
    assert driver.wait(0.3) == []
    sent = driver.report(
        "p0", 0, forward_id=1, forward_s=0.4, tokens_per_rank=[100, 0], accepted_requests=1
    )
    ranks = {d.rid: d.prefill_rank for d in sent}
    assert set(ranks) == {"a", "b", "c"}
    assert ranks["b"] == ranks["c"] != ranks["a"]
    assert len({d.batch for d in sent}) == 1


def test_the_paper_trigger_serves_instances_in_rotation_one_interval_apart():
    driver = Driver(trigger="paper", t_default_s=0.3, initial_latency_s=0.0).up(prefill=3)
    targets = []
    for i in range(3):
        (dispatch,) = driver.arrive(f"r{i}") or driver.wait(0.1)
        targets.append((dispatch.prefill, round(driver.now_s, 3)))
        driver.wait(0.05)
    assert [t for t, _ in targets] == ["p0", "p1", "p2"]
    assert targets[1][1] - targets[0][1] == pytest.approx(0.1, abs=0.051)


def test_the_adaptive_trigger_dispatches_ahead_of_the_predicted_end():
    driver = Driver(t_default_s=0.4, initial_latency_s=0.02).up()
    driver.arrive("first", 1000)
    driver.now_s += 0.02
    driver.report(
        "p0",
        0,
        kind="launch",
        forward_id=1,
        tokens_per_rank=[1000, 0],
        extend_tokens=1000,
        rids=["first"],
        accepted_requests=1,
    )
    started_s = driver.now_s
    predicted_s = driver.prefill_state().predicted_free_in_s
    driver.now_s += 0.05
    assert driver.arrive("next", 500) == []
    (dispatch,) = driver.wait(10.0)
    assert dispatch.rid == "next"
    assert 0.05 < dispatch.held_s < predicted_s - 0.05
    assert started_s + 0.05 + dispatch.held_s > started_s + 0.5 * predicted_s


@TRIGGERS
def test_c_avail_is_the_chunk_minus_flight_minus_what_the_rank_reports_queued(trigger):
    driver = Driver(trigger=trigger).up()
    driver.arrive("r", 300)
    rank = driver.dispatched[0].prefill_rank
    assert driver.prefill_state().ranks[rank].c_avail == 700
    driver.report(
        "p0",
        rank,
        kind="heartbeat",
        rids=["r"],
        accepted_requests=1,
        bootstrapping_requests=1,
        bootstrapping_tokens=300,
    )
    state = driver.prefill_state().ranks[rank]
    assert (state.flight_tokens, state.queued_tokens, state.c_avail) == (0, 300, 700)
    driver.report("p0", rank, kind="launch", forward_id=1, extend_tokens=300, accepted_requests=1)
    assert driver.prefill_state().ranks[rank].c_avail == 1000


@TRIGGERS
def test_duplicate_and_reordered_reports_change_nothing(trigger):
    driver = Driver(trigger=trigger).up()
    driver.arrive("r", 300)
    rank = driver.dispatched[0].prefill_rank
    driver.report(
        "p0",
        rank,
        kind="launch",
        forward_id=1,
        extend_tokens=300,
        rids=["r"],
        seq=0,
        accepted_requests=1,
    )
    driver.report(
        "p0", rank, forward_id=1, forward_s=0.2, extend_tokens=300, seq=1, accepted_requests=1
    )
    before = msgspec.structs.asdict(driver.scheduler.snapshot(driver.now_s))
    driver.report(
        "p0", rank, forward_id=1, forward_s=9.9, extend_tokens=300, seq=1, waiting_tokens=7
    )
    driver.report("p0", rank, kind="launch", forward_id=1, extend_tokens=300, seq=0)
    assert msgspec.structs.asdict(driver.scheduler.snapshot(driver.now_s)) == before


def test_a_lost_message_heals_through_the_cumulative_counter():
    driver = Driver(policy="least_tokens").up(dp=1)
    for i in range(3):
        driver.arrive(f"r{i}", 100)
    assert driver.prefill_state().ranks[0].flight_tokens == 300
    driver.report("p0", 0, dp=1, kind="heartbeat", seq=0)
    # seq 1, which acknowledged r0 and r1, was lost.
    driver.report("p0", 0, dp=1, kind="heartbeat", seq=2, accepted_requests=2)
    assert driver.prefill_state().ranks[0].flight_tokens == 100


def test_an_engine_restart_forgets_what_was_in_flight_there():
    driver = Driver(policy="least_tokens").up(dp=1)
    driver.report("p0", 0, dp=1, kind="heartbeat")
    driver.arrive("r", 100)
    driver.report("p0", 0, dp=1, kind="heartbeat", boot_id="second", seq=0)
    state = driver.prefill_state().ranks[0]
    assert (state.flight_tokens, state.outstanding_requests) == (0, 0)


@TRIGGERS
def test_a_silent_instance_gets_nothing_before_it_answers_and_then_is_served(trigger):
    driver = Driver(trigger=trigger, t_default_s=0.2, default_timeout_s=1000).up()
    driver.arrive("lost", 1000)
    driver.report("p0", 0, kind="heartbeat")
    driver.wait(3.0)
    driver.arrive("next", 100)
    state = driver.prefill_state()
    assert state.watchdog_fires >= 1
    assert state.tier == "interval"
    assert [d.rid for d in driver.dispatched] == ["lost"]
    driver.wait(30.0)  # what is so old may be lost
    assert [d.rid for d in driver.dispatched] == ["lost", "next"]
    driver.tell(PrefillDone(rid="next"))
    for i in range(5):
        driver.arrive(f"more{i}", 100)
        driver.wait(1.0)
        driver.tell(PrefillDone(rid=f"more{i}"))
    assert len(driver.dispatched) == 7


@TRIGGERS
def test_without_a_plugin_http_answers_keep_it_going(trigger):
    driver = Driver(trigger=trigger, t_default_s=0.2).up()
    driver.arrive("a", 500)
    driver.now_s += 0.1
    driver.arrive("b", 500)
    driver.wait(0.15)
    driver.tell(PrefillDone(rid="a"))
    driver.wait(0.1)
    assert [d.rid for d in driver.dispatched] == ["a", "b"]
    assert driver.prefill_state().tier == "http"


def test_a_load_poll_is_the_tier_in_force_until_end_forward_arrives():
    driver = Driver().up()
    driver.tell(
        LoadPolled(instance="p0", queued_tokens=[700, 0], running_requests=[0, 0], kv_tokens=[0, 0])
    )
    assert driver.prefill_state().tier == "load_poll"
    assert [r.c_avail for r in driver.prefill_state().ranks] == [300, 1000]
    driver.report("p0", 0, kind="heartbeat")
    assert driver.prefill_state().tier == "endforward"


@TRIGGERS
def test_decode_without_room_holds_the_request_before_prefill(trigger):
    driver = Driver(trigger=trigger, default_output_tokens=100).up(
        decode_dp=1, kv_capacity_tokens=1000
    )
    driver.arrive("a", 500)
    driver.tell(PrefillDone(rid="a"))
    driver.wait(5.0)
    assert driver.arrive("b", 500) == []
    driver.wait(5.0)
    assert [d.rid for d in driver.dispatched] == ["a"]
    driver.tell(RequestEnded(rid="a", outcome="completed"))
    driver.wait(2.0)
    assert [d.rid for d in driver.dispatched] == ["a", "b"]


@POLICIES
def test_nothing_goes_to_an_instance_that_is_down(policy):
    driver = Driver(policy=policy).up(prefill=2)
    driver.tell(InstanceDown(instance="p0"))
    for i in range(8):
        driver.arrive(f"r{i}")
        driver.wait(1.0)
    assert {d.prefill for d in driver.dispatched} == {"p1"}


@TRIGGERS
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_waits_is_refused_when_the_last_instance_of_a_role_goes(trigger, role):
    driver = Driver(trigger=trigger, t_default_s=1.0, outage_hold_s=0.0).up(prefill=2, dp=1)
    for i in range(12):
        driver.arrive(f"r{i}", 2000)
    waiting = {r.rid for r in driver.scheduler.queue}
    assert waiting
    driver.tell(InstanceDown(instance="p0"))
    assert driver.refused == []
    if role == "decode":
        waiting = {r.rid for r in driver.scheduler.queue}
    driver.tell(InstanceDown(instance="p1" if role == "prefill" else "d0"))
    assert {(r.rid, r.cause) for r in driver.refused} == {(rid, f"no_{role}") for rid in waiting}
    assert driver.scheduler.snapshot(driver.now_s).queue_requests == 0
    assert driver.scheduler.in_flight_requests == 12 - len(waiting)
    driver.wait(60.0)  # nor is any of them refused again at its deadline
    assert len(driver.refused) == len(waiting)


@POLICIES
def test_no_instance_is_a_clear_refusal(policy):
    driver = Driver(policy=policy)
    driver.arrive("a")
    driver.tell(InstanceUp(instance="p0", role="prefill", dp_size=1))
    driver.arrive("b")
    assert [(r.rid, r.cause) for r in driver.refused] == [("a", "no_prefill"), ("b", "no_decode")]
    assert all(r.retry_after_s > 0 and r.message for r in driver.refused)


@TRIGGERS
def test_the_queue_is_bounded_and_says_when_to_come_back(trigger):
    driver = Driver(trigger=trigger, max_queue_requests=3, t_default_s=10.0).up()
    for i in range(30):
        driver.arrive(f"r{i}", 1000)
    assert {r.cause for r in driver.refused} == {"queue_full"}
    assert len(driver.dispatched) + len(driver.refused) + 3 == 30
    assert all(r.retry_after_s >= 1 for r in driver.refused)


@TRIGGERS
def test_a_deadline_in_the_queue_is_a_refusal_not_a_hang(trigger):
    driver = Driver(trigger=trigger, t_default_s=50.0, max_hold_s=500.0).up()
    driver.arrive("runs", 2000)
    driver.arrive("also", 2000)
    driver.now_s += 1
    driver.arrive("late", 2000, deadline_s=driver.now_s + 2)
    driver.wait(3.0)
    assert [(r.rid, r.cause) for r in driver.refused] == [("late", "deadline")]


def test_after_n_limit_cycles_flow_control_refuses_new_requests_until_the_old_one_leaves():
    driver = Driver(trigger="paper", n_limit=2, t_default_s=0.1, default_timeout_s=1000).up(
        dp=1, chunk=100
    )
    driver.arrive("big", 100)
    for cycle in range(4):
        driver.arrive(f"long{cycle}", 99)
        driver.arrive(f"short{cycle}", 1)
        driver.wait(0.2)
        driver.report(
            "p0",
            0,
            dp=1,
            forward_id=cycle + 1,
            forward_s=0.1,
            waiting_requests=1,
            waiting_tokens=100,
        )
        driver.wait(0.2)
    assert driver.scheduler.throttled
    driver.arrive("new")
    assert driver.refused[-1].cause == "flow_control"
    for cycle in range(40):
        sent = [d.rid for d in driver.dispatched]
        driver.report("p0", 0, dp=1, forward_id=cycle + 10, forward_s=0.1, rids=sent)
        driver.wait(0.3)
    assert not driver.scheduler.throttled
    assert driver.scheduler.snapshot(driver.now_s).queue_requests == 0


def test_a_retry_avoids_the_instances_it_failed_on_while_there_are_others():
    driver = Driver().up(prefill=2)
    for i in range(4):
        driver.arrive(f"r{i}", exclude=("p0",))
        driver.wait(3.0)
    assert {d.prefill for d in driver.dispatched} == {"p1"}
    driver.tell(InstanceDown(instance="p1"))
    driver.arrive("last", exclude=("p0",))
    driver.wait(3.0)
    assert driver.dispatched[-1].prefill == "p0"


@TRIGGERS
def test_a_request_aborted_in_the_queue_is_never_dispatched(trigger):
    driver = Driver(trigger=trigger, t_default_s=1.0).up()
    driver.arrive("runs", 2000)
    driver.arrive("more", 2000)
    driver.now_s += 0.1
    driver.arrive("gone", 2000)
    driver.tell(RequestEnded(rid="gone", outcome="aborted"))
    driver.wait(20.0)
    assert "gone" not in {d.rid for d in driver.dispatched}


@POLICIES
def test_unknown_requests_and_instances_are_ignored(policy):
    driver = Driver(policy=policy).up()
    driver.tell(PrefillDone(rid="nobody"))
    driver.tell(RequestEnded(rid="nobody", outcome="failed"))
    driver.tell(InstanceDown(instance="nowhere"))
    driver.report("nowhere")
    driver.report("p0", rank=1, dp=9, kind="heartbeat")
    assert driver.arrive("r")


def test_a_bad_setting_names_the_field_and_what_is_allowed():
    with pytest.raises(ValueError, match=r"policy='fast' is not one of sbs, round_robin"):
        SchedulerConfig(policy="fast")
    with pytest.raises(ValueError, match="t_default_s must be greater than 0"):
        SchedulerConfig(t_default_s=0)


@pytest.mark.parametrize(("trigger", "mean_s"), [("paper", 3.5), ("adaptive", 0.2)])
def test_only_the_paper_s_trigger_takes_its_mean_literally(trigger, mean_s):
    driver = Driver(trigger=trigger).up()
    driver.report("p0", kind="heartbeat")
    for number, forward_s in enumerate([10.1, *[0.2] * 2]):
        driver.now_s += forward_s
        fields = {"forward_id": number + 1, "extend_tokens": 100, "tokens_per_rank": [100, 100]}
        driver.report("p0", forward_s=forward_s, **fields)
    assert driver.scheduler.snapshot(driver.now_s).mean_forward_s == pytest.approx(mean_s)


def test_only_a_counted_prompt_is_too_long():
    driver = Driver().up(kv_capacity_tokens=1000)
    assert driver.arrive("estimated", 10**9, estimated=True)
    assert driver.arrive("counted", 10**9) == []
    assert [(refusal.rid, refusal.cause) for refusal in driver.refused] == [("counted", "too_long")]


def test_an_answer_longer_than_any_can_be_does_not_empty_a_decode_rank():
    driver = Driver().up(decode_dp=1, kv_capacity_tokens=10_000)
    assert driver.arrive("r", 100, max_new_tokens=50)
    driver.report(
        "d0", 0, dp=1, rids=["r"], accepted_requests=1, running_requests=9, kv_tokens=5000
    )
    driver.tell(PrefillDone(rid="r"))
    driver.tell(RequestEnded(rid="r", outcome="completed", completion_tokens=2**41))
    (load,) = driver.scheduler.decode["d0"].loads()
    assert load.kv_tokens >= 5000 - 150


def test_thousands_at_once_are_planned_in_parts_and_the_first_leave_before_the_last_are():
    driver = Driver().up(prefill=20, dp=1, chunk=100, decode_dp=1, max_running_requests=1)
    for number in range(20):
        driver.arrive(f"r{number}")
    first = driver.tell(InstanceUp(instance="d1", role="decode", dp_size=2))
    assert 0 < len(first) < 10 and driver.wake_s == driver.now_s
    assert len(first + driver.wait(0.0)) == 19


def test_a_refusal_for_want_of_decode_names_it():
    """KV for one request on the only decode rank."""
    config = {"default_output_tokens": 10, "t_default_s": 0.3, "default_timeout_s": 2.0}
    driver = Driver(**config).up(decode_dp=1, kv_capacity_tokens=1_000)
    driver.arrive("first", 900)
    driver.tell(PrefillDone(rid="first"))
    driver.arrive("second", 900)
    for _ in range(3):
        driver.wait(0.7)
        driver.report("p0", 0, kind="heartbeat")
    refused = next(refusal for refusal in driver.refused if refusal.rid == "second")
    assert (refused.cause, refused.limit) == ("deadline", "decode")
    assert "the limit is decode: no decode rank has room" in refused.message


def test_a_refusal_for_want_of_prefill_names_it():
    driver = Driver(t_default_s=0.3, max_queue_requests=1).up(dp=1)
    driver.arrive("first", 1000)
    tokens = {"tokens_per_rank": [1000], "extend_tokens": 1000, "dp": 1}
    driver.report("p0", 0, kind="launch", forward_id=1, rids=["first"], **tokens)
    driver.arrive("second", 1000)
    driver.arrive("third", 1000)
    (refused,) = driver.refused
    assert (refused.cause, refused.limit) == ("queue_full", "prefill")
