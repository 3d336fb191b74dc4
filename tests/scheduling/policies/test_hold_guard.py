"""When holding stops, and when it is tried again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from harness.prefill_reports import fresh, report

from sglang_sbs.scheduling import Scheduler, SchedulerConfig
from sglang_sbs.scheduling.events import (
    Command,
    Dispatch,
    ForwardEnded,
    InstanceUp,
    RequestArrived,
)
from sglang_sbs.scheduling.policies.adaptive.hold_guard import HoldGuard, place_at_once
from sglang_sbs.scheduling.policies.immediate import Eta
from sglang_sbs.scheduling.policies.policy import Plan
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.prefill.interval import IntervalController
from sglang_sbs.scheduling.prefix.places import Hits
from sglang_sbs.scheduling.queue.request import RequestQueue, arrived
from sglang_sbs.scheduling.reasons import WaitReason
from sglang_sbs.simulator.cluster.cost import COSTS
from sglang_sbs.simulator.cluster.simulation import simulate
from sglang_sbs.simulator.cluster.spec import ClusterSpec
from sglang_sbs.simulator.experiments.sweep import scheduler_config
from sglang_sbs.simulator.workloads.arrivals import synthetic, uniform_like


def test_holding_stops_with_a_long_lead_and_is_tried_again_ever_more_rarely() -> None:
    guard = HoldGuard()
    assert not guard.update(0.25, 0.0, 0.0)
    assert not guard.on
    off_s, now_s = [], 1.0
    for _ in range(5):
        assert not guard.update(0.3, 0.0, now_s)
        assert guard.on
        began_s = now_s
        while not guard.update(0.3, 0.0, now_s):
            now_s += 1.0
        assert not guard.on
        off_s.append(now_s - began_s)
    assert off_s == [40.0, 80.0, 160.0, 160.0, 160.0]


def test_a_trial_that_goes_well_is_forgotten() -> None:
    guard = HoldGuard()
    guard.update(0.3, 0.0, 0.0)
    assert guard.update(0.0, 0.0, 40.0)
    assert not guard.update(0.05, 0.0, 80.0)
    guard.update(0.3, 0.0, 81.0)
    assert guard.update(0.0, 0.0, 121.0)


def test_a_trial_ends_at_the_first_split_batches_but_not_at_late_ones() -> None:
    guard = HoldGuard()
    assert not guard.update(0.05, 0.05, 0.0)
    assert not guard.on, "not on trial"
    guard.update(0.3, 0.0, 1.0)
    assert guard.update(0.0, 0.0, 41.0)
    assert not guard.update(0.05, 0.02, 41.2)
    assert not guard.on, "late"
    guard.update(0.05, 0.04, 41.3)
    assert guard.on, "split"


@pytest.mark.parametrize(("intake_s", "on"), [(0.0, False), (0.0083, True)])
def test_one_busy_intake_for_all_ends_the_holding(intake_s: float, on: bool) -> None:
    """A batch waits for its last request at nine tenths of what the intake can take."""
    states: list[bool] = []
    spec = ClusterSpec(cost=COSTS["mixed"], dispatch_latency_s=0.005, intake_s=intake_s)
    simulate(
        synthetic(108.0, 20.0, uniform_like(3000), 7),
        scheduler_config("sbs", 7),
        spec,
        observe=lambda scheduler, now_s: states.append(scheduler.snapshot(now_s).holding),
    )
    assert (not all(states)) == on


def test_near_capacity_requests_are_held_whatever_the_guard_has_seen() -> None:
    """Jitter spreads the requests of a batch as far as a busy host does."""
    states: list[bool] = []
    spec = ClusterSpec(
        cost=COSTS["mixed"],
        overlap=True,
        dispatch_latency_s=0.1,
        dispatch_jitter=0.15,
        dispatch_serial_s=0.0005,
        gang_gate_s=0.04,
    )
    simulate(
        synthetic(195.0, 22.0, uniform_like(3000), 71),
        scheduler_config("sbs", 71),
        spec,
        observe=lambda scheduler, now_s: states.append(scheduler.snapshot(now_s).holding),
    )
    assert all(states[len(states) // 2 :])


def waiting(overlap: bool = True) -> tuple[PrefillInstance, Callable[[float], Plan]]:
    """An instance, and what is placed on it at a time while a request of 100 tokens waits."""
    instance = fresh(overlap=overlap)
    queue = RequestQueue()
    event = RequestArrived(rid="r", prompt_tokens=100)
    queue.add(arrived(event, 0, 100.0, 60.0))
    eta = Eta(IntervalController(t_default_s=0.3, window=8, latency_s=0.01))
    return instance, lambda now_s: place_at_once(
        queue, [instance], lambda _request: True, eta, now_s
    )


LAUNCH = report(kind="launch", forward_id=1, extend_tokens=500, tokens_per_rank=[500])


def test_nothing_is_sent_where_a_pass_is_queued_behind_the_running_one() -> None:
    """The engine would form every batch a pass ahead from then on (overlap scheduling)."""
    instance, plan = waiting()
    assert len(plan(100.0).placements) == 1
    instance.on_report(LAUNCH, 100.0)
    assert len(plan(100.01).placements) == 1
    instance.on_report(msgspec.structs.replace(LAUNCH, seq=1, forward_id=2), 100.02)
    waits = plan(100.03)
    assert not waits.placements
    assert waits.wake_s == pytest.approx(instance.passes[-1].start_s + 0.05)
    assert len(plan(waits.wake_s).placements) == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_sent_that_does_not_fit_into_the_next_pass(overlap: bool) -> None:
    """Tokens beyond a full chunk are in the pass after the next one (overlap scheduling)."""
    instance, plan = waiting(overlap)
    instance.on_report(LAUNCH, 100.0)
    instance.on_dispatched("first", 0, 900, 100.01)
    assert len(plan(100.02).placements) == 1
    instance.on_dispatched("second", 0, 1, 100.03)
    sent = plan(100.04)
    assert len(sent.placements) == (not overlap)
    if overlap:
        assert sent.wake_s > instance.passes[-1].end_s


def test_what_is_sent_at_once_goes_where_its_prefix_is() -> None:
    instance = fresh(dp_size=2)
    event = RequestArrived(rid="r", prompt_tokens=800, blocks=[1], block_tokens=600)
    request = arrived(event, 0, 100.0, 60.0)
    request.hits = Hits({"p0": [0, 600]}, 600)
    interval = IntervalController(t_default_s=0.3, window=8, latency_s=0.01)
    places = [
        Eta(interval, knows_caches=knows).choose(request, [instance], 100.0)[1]
        for knows in (False, True)
    ]
    assert places == [0, 1]


def test_a_request_is_explained_though_no_decision_has_looked_at_the_instances_since() -> None:
    scheduler = Scheduler(SchedulerConfig(), remembers=9)
    for name, role in (("p0", "prefill"), ("d0", "decode")):
        up = InstanceUp(instance=name, role=role, dp_size=1, chunk_tokens=1000, overlap=True)
        scheduler.handle(up, 99.0)

    def launch(forward_id: int, now_s: float, **more: Any) -> None:
        launched = msgspec.structs.replace(LAUNCH, seq=forward_id, forward_id=forward_id, **more)
        scheduler.handle(ForwardEnded(instance="p0", report=launched), now_s)

    def arrive(rid: str, now_s: float) -> list[Command]:
        return scheduler.handle(RequestArrived(rid=rid, prompt_tokens=100), now_s)

    launch(1, 100.0)
    assert not any(isinstance(command, Dispatch) for command in arrive("a", 100.01)), "p0 computes"
    guard = scheduler.policy.guard
    guard.on, guard._until_s = True, math.inf
    assert sum(isinstance(command, Dispatch) for command in arrive("b", 100.02)) == 2
    launch(2, 100.03, waiting_requests=1, waiting_tokens=100)
    assert not any(isinstance(command, Dispatch) for command in arrive("c", 100.04)), (
        "a pass is queued"
    )
    why = scheduler.why("c", 100.05)
    assert why is not None
    assert [(wait.reason, wait.instance) for wait in why.waits] == [(WaitReason.NOT_YET, "")]


def test_a_lone_request_is_not_expected_to_take_as_long_as_a_batch_did() -> None:
    """The one that ends its pass first is reached in time, though a batch would be late there."""
    soon, later = fresh("soon"), fresh("later")
    soon.on_report(msgspec.structs.replace(LAUNCH, instance_id="soon"), 99.8)
    later.on_report(msgspec.structs.replace(LAUNCH, instance_id="later"), 99.92)
    interval = IntervalController(t_default_s=0.3, window=8, latency_s=0.01)
    interval.observe([0.13], 99.9, [9])
    assert soon.free_at_s(100.0, 0.01) < 100.13 < later.free_at_s(100.0, 0.01)
    event = RequestArrived(rid="r", prompt_tokens=100)
    request = arrived(event, 0, 100.0, 60.0)
    assert Eta(interval).choose(request, [soon, later], 100.0)[0] is soon
