"""Requests wait for a while when the last instance of a role is gone, and each of them ends
once."""

from __future__ import annotations

from collections import Counter

import pytest
from driver import Driver
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sbs.scheduling import InstanceDown, InstanceUp, RequestEnded
from sglang_sbs.scheduling.reasons import WaitReason

HOLD_S = 5.0
QUEUE_TIMEOUT_S = 30.0
POLICIES = pytest.mark.parametrize("policy", ["sbs", "eta", "round_robin"])
ROLES = pytest.mark.parametrize("role", ["prefill", "decode"])
LAST = {"prefill": "p0", "decode": "d0"}


def back(driver: Driver, name: str) -> None:
    role = "prefill" if name.startswith("p") else "decode"
    driver.tell(InstanceUp(instance=name, role=role, dp_size=2, chunk_tokens=1000))


@POLICIES
@ROLES
@pytest.mark.parametrize("drained", [False, True], ids=["down", "drained"])
def test_a_short_outage_refuses_nobody(policy: str, role: str, drained: bool) -> None:
    driver = Driver(policy=policy, outage_hold_s=HOLD_S).up()
    driver.tell(InstanceDown(instance=LAST[role], drained=drained))
    for number in range(58):
        driver.arrive(f"r{number}", 10)
        driver.wait(0.05)
    assert (driver.dispatched, driver.refused) == ([], [])
    back(driver, LAST[role])
    driver.wait(1.0)
    assert {dispatch.rid for dispatch in driver.dispatched} == {
        f"r{number}" for number in range(58)
    }
    driver.wait(2 * QUEUE_TIMEOUT_S)
    assert driver.refused == []


@POLICIES
@ROLES
def test_a_long_outage_refuses_waiting_requests_once_and_late_ones_at_once(
    policy: str, role: str
) -> None:
    driver = Driver(policy=policy, outage_hold_s=HOLD_S).up()
    driver.tell(InstanceDown(instance=LAST[role]))
    driver.arrive("first")
    driver.wait(HOLD_S - 1)
    driver.arrive("second")
    driver.wait(0.9)
    assert driver.refused == []
    driver.wait(0.2)
    assert Counter((refusal.rid, refusal.cause) for refusal in driver.refused) == {
        ("first", f"no_{role}"): 1,
        ("second", f"no_{role}"): 1,
    }
    driver.arrive("late")
    assert (driver.refused[-1].rid, driver.refused[-1].cause) == ("late", f"no_{role}")
    driver.wait(2 * QUEUE_TIMEOUT_S)
    assert len(driver.refused) == 3
    back(driver, LAST[role])  # and a second outage is held for anew
    driver.tell(InstanceDown(instance=LAST[role]))
    driver.arrive("again")
    driver.wait(HOLD_S / 2)
    back(driver, LAST[role])
    driver.wait(1.0)
    assert [dispatch.rid for dispatch in driver.dispatched] == ["again"]


@ROLES
def test_what_waits_when_the_last_one_goes_is_held_too_and_says_for_what(role: str) -> None:
    driver = Driver(trigger="paper", t_default_s=1.0, outage_hold_s=HOLD_S).up()
    for number in range(12):
        driver.arrive(f"r{number}", 2000)
    waiting = {request.rid for request in driver.scheduler.queue}
    assert waiting
    driver.tell(InstanceDown(instance=LAST[role]))
    driver.arrive("new", 2000)
    driver.now_s += 0.1
    for rid in (*waiting, "new"):
        explanation = driver.scheduler.why(rid, driver.now_s)
        assert explanation is not None
        assert explanation.waits[-1].reason is WaitReason(f"no_{role}")
    driver.wait(HOLD_S)
    assert {refusal.rid for refusal in driver.refused} == {*waiting, "new"}


def test_bounds_hold_while_requests_are_held() -> None:
    driver = Driver(outage_hold_s=HOLD_S, max_queue_requests=3).up(kv_capacity_tokens=5000)
    driver.tell(InstanceDown(instance="d0"))
    driver.arrive("urgent", deadline_s=driver.now_s + 1.0)
    driver.arrive("long", 6000)
    driver.arrive("a")
    driver.arrive("b")
    driver.arrive("c")
    assert [(refusal.rid, refusal.cause) for refusal in driver.refused] == [
        ("long", "too_long"),
        ("c", "queue_full"),
    ]
    driver.wait(1.1)
    assert (driver.refused[-1].rid, driver.refused[-1].cause) == ("urgent", "deadline")
    assert driver.refused[-1].limit == "decode"


def test_other_instances_that_come_and_go_prolong_no_outage() -> None:
    driver = Driver(outage_hold_s=HOLD_S).up(prefill=2)
    driver.tell(InstanceDown(instance="d0"))
    driver.arrive("r")
    for number in range(5):
        driver.wait(HOLD_S / 5 - 0.01)
        driver.tell(InstanceDown(instance=f"p{number % 2}"))
        back(driver, f"p{number % 2}")
    driver.wait(0.1)
    assert [refusal.cause for refusal in driver.refused] == ["no_decode"]


@POLICIES
def test_nothing_is_planned_in_an_outage(policy: str) -> None:
    driver = Driver(policy=policy, outage_hold_s=HOLD_S).up()
    driver.tell(InstanceDown(instance="d0"))
    asked: list[float] = []
    driver.scheduler.policy.plan = lambda *_: asked.append(driver.now_s)
    driver.arrive("r")
    driver.wait(HOLD_S)
    assert asked == []


def test_without_a_hold_time_an_outage_refuses_requests_at_once() -> None:
    driver = Driver(outage_hold_s=0.0).up()
    driver.tell(InstanceDown(instance="p0"))
    driver.arrive("r")
    assert [refusal.cause for refusal in driver.refused] == ["no_prefill"]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.sampled_from([None, None, 0.5, 8.0])),
        st.tuples(st.sampled_from(["down", "drain", "up"]), st.sampled_from(["p0", "p1", "d0"])),
        st.tuples(st.just("wait"), st.sampled_from([0.01, 0.3, 2.0, 6.0])),
        st.tuples(st.just("leave"), st.integers(0, 5)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(steps=STEPS, policy=st.sampled_from(["sbs", "eta", "round_robin"]))
def test_every_request_ends_exactly_once_whatever_the_outages(steps, policy) -> None:
    config = {"outage_hold_s": HOLD_S, "default_timeout_s": QUEUE_TIMEOUT_S}
    driver = Driver(policy=policy, **config).up(prefill=2)
    up = {"p0", "p1", "d0"}
    arrived: list[str] = []
    left: set[str] = set()

    def complete() -> bool:
        return "d0" in up and bool(up & {"p0", "p1"})

    for what, value in steps:
        match what:
            case "arrive":
                arrived.append(f"r{len(arrived)}")
                deadline_s = None if value is None else driver.now_s + value
                driver.arrive(arrived[-1], deadline_s=deadline_s)
            case "up":
                back(driver, value)
                up.add(value)
            case "wait":
                before = len(driver.refused)
                driver.wait(value)
                causes = {refusal.cause for refusal in driver.refused[before:]}
                assert not (complete() and causes & {"no_prefill", "no_decode"})
            case "leave" if value < len(arrived):
                driver.tell(RequestEnded(rid=arrived[value], outcome="aborted"))
                left.add(arrived[value])
            case "down" | "drain":
                driver.tell(InstanceDown(instance=value, drained=what == "drain"))
                up.discard(value)
    driver.wait(QUEUE_TIMEOUT_S + 1)
    ends = Counter(decision.rid for decision in (*driver.dispatched, *driver.refused))
    assert set(ends.values()) <= {1}
    assert set(arrived) - left <= ends.keys() <= set(arrived)
    assert len(driver.scheduler.queue) == 0
