"""The policy is switched while requests wait and run: only the rule changes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from driver import Driver

from sglang_sbs.cli import main
from sglang_sbs.scheduling import (
    InstanceUp,
    PolicySwitched,
    RequestEnded,
    Scheduler,
    SchedulerConfig,
    policy_names,
    policy_registry,
)
from sglang_sbs.scheduling.eventlog import EventLogWriter, read_event_log
from sglang_sbs.scheduling.policy_registry import PolicySpec
from sglang_sbs.simulator.replay import replay


def busy(driver: Driver, *instances: str) -> None:
    """Full passes start at once and say nothing more."""
    for name in instances:
        for rank in range(2):
            driver.report(name, rank, kind="launch", forward_id=1, extend_tokens=1000)


def with_a_queue(requests: int, **config) -> Driver:
    """Two busy instances, and requests that the default policy holds."""
    driver = Driver(**config).up(prefill=2)
    for instance in range(2):
        for number in range(2):
            driver.arrive(f"first{instance}{number}", 1000)
    driver.wait(0.05)
    busy(driver, "p0", "p1")
    for number in range(requests):
        driver.arrive(f"r{number}", 400 + number)
    waiting = len(driver.scheduler.queue)
    assert waiting >= requests / 2, "the default policy holds most of them"
    return driver


@pytest.mark.parametrize("policy", [p for p in policy_names() if p != "sbs"])
def test_an_immediate_policy_places_at_once_all_that_waits(policy: str) -> None:
    driver = with_a_queue(30)
    before_s = driver.now_s
    driver.tell(PolicySwitched(policy=policy))
    driver.wait(0.0)
    assert driver.now_s == before_s
    assert len(driver.scheduler.queue) == 0
    assert Counter(dispatch.rid for dispatch in driver.dispatched).most_common(1)[0][1] == 1
    assert {f"r{number}" for number in range(30)} <= {
        dispatch.rid for dispatch in driver.dispatched
    }
    assert driver.refused == []
    state = driver.scheduler.snapshot(driver.now_s)
    assert (state.policy, state.trigger) == (policy, "immediate")


def test_what_waits_leaves_in_order_of_arrival() -> None:
    driver = with_a_queue(30)
    before, waiting = len(driver.dispatched), [request.rid for request in driver.scheduler.queue]
    driver.tell(PolicySwitched(policy="round_robin"))
    driver.wait(0.0)
    assert [dispatch.rid for dispatch in driver.dispatched[before:]] == waiting


def test_back_to_the_default_policy_requests_are_held_again_and_what_runs_is_known() -> None:
    driver = Driver(policy="eta").up(prefill=2)
    for number in range(4):
        assert driver.arrive(f"first{number}", 1000)
    busy(driver, "p0", "p1")
    driver.tell(PolicySwitched(policy="sbs"))
    held = driver.arrive("held")
    assert held == []
    assert driver.scheduler.in_flight_requests == 4
    for number in range(4):
        driver.tell(RequestEnded(rid=f"first{number}", outcome="completed", completion_tokens=5))
    driver.wait(3.0)
    assert Counter(dispatch.rid for dispatch in driver.dispatched) == Counter(
        [*(f"first{number}" for number in range(4)), "held"]
    )


def test_arrivals_under_another_policy_are_known_to_the_default_one() -> None:
    rates = []
    for policy in ("sbs", "eta"):
        driver = Driver(policy=policy).up(prefill=2)
        for number in range(20):
            driver.arrive(f"r{number}", 100)
        rates.append(driver.scheduler._policies.offered.token_rate)
    assert rates[0] == rates[1] > 0


def test_switching_to_the_policy_in_force_changes_nothing() -> None:
    driver = with_a_queue(3)
    policy = driver.scheduler.policy
    assert driver.tell(PolicySwitched(policy="sbs")) == []
    assert driver.scheduler.policy is policy


def test_what_a_policy_learned_is_there_when_it_comes_back() -> None:
    driver = Driver(policy="round_robin").up(prefill=2)
    places = [driver.arrive("a")[0].prefill]
    driver.tell(PolicySwitched(policy="eta"))
    driver.tell(PolicySwitched(policy="round_robin"))
    places.append(driver.arrive("b")[0].prefill)
    assert sorted(places) == ["p0", "p1"]


def test_the_paper_s_plain_mean_ends_with_the_paper_s_trigger() -> None:
    driver = Driver(trigger="paper").up()
    assert driver.scheduler.interval.literal
    driver.tell(PolicySwitched(policy="eta"))
    assert not driver.scheduler.interval.literal
    driver.tell(PolicySwitched(policy="sbs"))
    assert driver.scheduler.interval.literal


def test_urgent_requests_go_first_once_the_default_policy_is_back_and_turns_are_kept() -> None:
    """The default policy's order is another one than that of arrival."""
    driver = with_a_queue(0)
    for number, tenant in enumerate("aabb"):
        driver.arrive(f"r{number}", 400, tenant=tenant, priority=number)
    queue = driver.scheduler.queue
    before = [request.rid for request in queue.in_order()]
    queue.order_by(lambda request: -request.arrived_s - request.order)
    assert [request.rid for request in queue.in_order()] != before
    queue.order_by(driver.scheduler.policy.key_of)
    assert [request.rid for request in queue.in_order()] == before
    for request in list(queue):
        queue.remove(request.rid)
    assert len(queue) == 0


def test_a_log_with_switches_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "router.events"
    log = EventLogWriter(path, SchedulerConfig())
    driver = Driver()
    handle = driver.scheduler.handle

    def logged(event, now_s):
        commands = handle(event, now_s)
        log.write(now_s, event, commands)
        return commands

    driver.scheduler.handle = logged  # type: ignore[method-assign]
    driver.up(prefill=2)
    policies = ["eta", "sbs", "random", "sbs", "power_of_two", "sbs"]
    for turn, policy in enumerate(policies):
        for number in range(12):
            driver.arrive(f"{turn}-{number}", 300 + 50 * number)
            driver.wait(0.01)
        busy(driver, "p0", "p1")
        driver.tell(PolicySwitched(policy=policy))
        driver.wait(0.5)
    driver.wait(5.0)
    log.close()
    assert len({dispatch.rid for dispatch in driver.dispatched}) == len(driver.dispatched) == 72
    result = replay(path)
    assert result.difference == ""
    assert result.events > 100
    # Without the switches the same events are answered differently.
    unswitched, records = Scheduler(SchedulerConfig()), list(read_event_log(path))
    assert any(
        unswitched.handle(record.event, record.now_s) != record.commands
        for record in records
        if record.event is not None and not isinstance(record.event, PolicySwitched)
    )


def test_a_log_tells_a_person_of_its_switches(tmp_path: Path, capsys) -> None:
    path = tmp_path / "router.events"
    log = EventLogWriter(path, SchedulerConfig())
    scheduler = Scheduler(SchedulerConfig())
    up = InstanceUp(instance="p0", role="prefill", dp_size=1)
    for now_s, event in ((10.0, up), (12.5, PolicySwitched(policy="eta"))):
        log.write(now_s, event, scheduler.handle(event, now_s))
    log.close()
    assert main(["log", str(path)]) == 0
    assert "the policy was switched: eta at +2.5 s" in capsys.readouterr().out


def test_what_is_held_before_a_switch_is_put_in_the_new_policy_s_order() -> None:
    driver = Driver(policy="eta").up(prefill=2)
    for number in range(4):
        driver.arrive(f"first{number}", 1000)
    busy(driver, "p0", "p1")
    driver.tell(PolicySwitched(policy="sbs"))
    driver.arrive("plain", 400)
    driver.wait(0.001)
    driver.arrive("urgent", 400, priority=5)
    waiting = [request.rid for request in driver.scheduler.queue.in_order()]
    assert waiting == ["urgent", "plain"]


def test_a_policy_that_cannot_be_made_leaves_the_one_in_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(_context):
        raise RuntimeError("code of others")

    words = dict.fromkeys(("summary", "choose_when", "trade_offs"), "Never.")
    monkeypatch.setitem(
        policy_registry._specs, "broken", PolicySpec(name="broken", make=make, **words)
    )
    driver = with_a_queue(2)
    with pytest.raises(RuntimeError, match="code of others"):
        driver.tell(PolicySwitched(policy="broken"))
    assert driver.scheduler.config.policy == "sbs"
    assert driver.tell(PolicySwitched(policy="least_tokens"))
