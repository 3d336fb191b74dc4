"""Limits on waiting: priorities and SLOs move a request by a bounded time only."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sbs.scheduling import InstanceUp, RequestArrived, Scheduler, SchedulerConfig
from sglang_sbs.scheduling.prefill.interval import IntervalController
from sglang_sbs.scheduling.queue.priority import (
    LEAST_SLO_S,
    MOST_PRIORITY,
    MOST_SLO_S,
    STEP_PASSES,
    Urgency,
    clamped_priority,
    clamped_slo_s,
    class_of,
)
from sglang_sbs.scheduling.queue.request import arrived
from sglang_sbs.scheduling.request import Request
from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.cluster.cost import COSTS
from sglang_sbs.simulator.cluster.simulation import simulate
from sglang_sbs.simulator.cluster.spec import ClusterSpec

PASS_S = 0.1
priorities = st.integers(-(10**20), 10**20)
slos_s = st.none() | st.floats(allow_nan=True, allow_infinity=True)


def urgency(step_s: float = 2.0) -> Urgency:
    interval = IntervalController(t_default_s=PASS_S, window=10, latency_s=0.01)
    return Urgency(interval, step_s)


def request(priority: int = 0, slo_s: float | None = None, **more) -> Request:
    event = RequestArrived(rid="r", prompt_tokens=100, priority=priority, ttft_slo_s=slo_s, **more)
    return arrived(event, 0, 10.0, 60.0)


def test_a_request_that_asks_for_nothing_stays_where_it_is():
    rule = urgency()
    assert rule.shift_s(request(), 0.3) == 0.0
    assert not rule.matters(10.0)


def test_a_level_of_priority_is_worth_a_step_of_waiting():
    assert urgency().shift_s(request(1), 0.3) == -2.0
    assert urgency().shift_s(request(-2), 0.3) == 4.0
    assert urgency(step_s=0.01).shift_s(request(1), 0.3) == -STEP_PASSES * PASS_S


def test_an_slo_counts_by_its_slack():
    rule = urgency()
    assert rule.shift_s(request(slo_s=PASS_S), 0.3) == pytest.approx(-2.0)
    assert rule.shift_s(request(slo_s=1.0 + PASS_S), 0.3) == pytest.approx(-1.0)
    assert rule.shift_s(request(slo_s=2.0 + PASS_S), 0.3) == pytest.approx(0.0)
    assert rule.shift_s(request(slo_s=100.0), 0.3) == pytest.approx(2.0)
    # A prompt of three chunks takes three passes, which leave less slack.
    assert rule.shift_s(request(slo_s=1.0), 3.0) < rule.shift_s(request(slo_s=1.0), 0.3)


def test_urgent_requests_matter_for_a_while():
    rule = urgency()
    rule.shift_s(request(1), 0.3)
    assert rule.matters(11.0)
    assert not rule.matters(100.0)


def test_tenants_matter_once_there_are_two():
    rule = urgency()
    rule.shift_s(request(), 0.3)
    assert not rule.matters(11.0)
    rule.shift_s(request(tenant="a"), 0.3)
    assert rule.matters(11.0)


def test_requests_that_all_bring_the_same_slo_do_not_differ():
    rule = urgency()
    rule.shift_s(request(slo_s=2.0), 0.3)
    assert not rule.matters(11.0)
    for chunks in (0.1, 0.9, 2.0):
        rule.shift_s(request(slo_s=2.0), chunks)
    assert not rule.matters(11.0)
    rule.shift_s(request(slo_s=0.2), 0.3)
    assert rule.matters(11.0)


@given(priorities, slos_s, st.text(max_size=200))
def test_what_a_client_says_is_bounded(priority, slo_s, tenant):
    asked = request(priority, slo_s, tenant=tenant)
    assert abs(asked.priority) <= MOST_PRIORITY
    assert asked.ttft_slo_s is None or LEAST_SLO_S <= asked.ttft_slo_s <= MOST_SLO_S
    assert len(asked.tenant) <= 64
    assert math.isfinite(urgency().shift_s(asked, 1.0))


@given(priorities, priorities)
def test_a_larger_priority_never_goes_later(first, other):
    low, high = sorted((first, other))
    assert urgency().shift_s(request(high), 0.3) <= urgency().shift_s(request(low), 0.3)
    assert clamped_priority(low) <= clamped_priority(high)


def test_classes_are_three():
    assert [class_of(priority) for priority in (-7, 0, 3)] == ["low", "normal", "high"]
    assert clamped_slo_s(math.nan) is None


def scheduler_with_work(**config) -> Scheduler:
    """Its only instance is busy, so that requests wait."""
    scheduler = Scheduler(SchedulerConfig(**config))
    for event in (
        InstanceUp(instance="p0", role="prefill", dp_size=1, chunk_tokens=1000),
        InstanceUp(instance="d0", role="decode", dp_size=1),
        RequestArrived(rid="first", prompt_tokens=1000),
    ):
        scheduler.handle(event, 0.0)
    return scheduler


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 3.0), st.integers(-9, 9), slos_s, st.integers(1, 5000)),
        min_size=2,
        max_size=40,
    )
)
def test_nobody_is_ahead_who_came_later_than_the_bound(arrivals):
    """Whatever classes come: in the queue nobody is behind one that arrived more than the stated
    bound later."""
    scheduler = scheduler_with_work(priority_step_s=0.001, t_default_s=0.01, max_hold_s=1e6)
    now_s = 0.0
    for number, (gap_s, priority, slo_s, tokens) in enumerate(arrivals):
        now_s += gap_s
        scheduler.queue.add(
            arrived(
                RequestArrived(
                    rid=f"r{number}", prompt_tokens=tokens, priority=priority, ttft_slo_s=slo_s
                ),
                number,
                now_s,
                1e6,
            )
        )
    policy = scheduler.policy
    bound_s = policy._urgency.most_s + policy._ageing_s() + 1e-9
    order = list(scheduler.queue.in_order())
    latest_s = -math.inf
    for waiting in order:
        assert latest_s <= waiting.arrived_s + bound_s
        latest_s = max(latest_s, waiting.arrived_s)


@settings(deadline=None, max_examples=6)
@given(st.integers(0, 10**6), st.sampled_from([0.5, 0.9]))
def test_the_lowest_class_is_served_under_a_flood_of_the_highest(seed, high_share):
    """One rank that is offered more than it computes, most of it of the highest class. A request of
    the lowest goes before every request that arrives more than the bound after it, but for what was
    in its last batches."""
    rng = random.Random(seed)
    arrivals, now_s = [], 0.0
    while now_s < 30.0:
        now_s += rng.expovariate(16.0)
        priority = MOST_PRIORITY if rng.random() < high_share else -MOST_PRIORITY
        arrivals.append(Arrival(now_s, rng.randint(50, 900), 10, priority=priority))
    spec = ClusterSpec(
        cost=COSTS["mixed"], prefill_instances=1, dp_size=1, chunk_tokens=1000, decode_dp_size=2
    )
    config = SchedulerConfig(
        priority_step_s=0.01,
        t_default_s=0.17,  # a pass with a full chunk
        default_timeout_s=1e6,
        n_limit=10**6,
        max_queue_requests=10**6,
    )
    bound_s = 0.0

    def observe(scheduler: Scheduler, _now_s: float) -> None:
        nonlocal bound_s
        policy = scheduler.policy
        bound_s = max(bound_s, policy._urgency.most_s + policy._ageing_s())

    outcome = simulate(arrivals, config, spec, observe=observe, drain_s=600.0)
    records = outcome.requests
    assert all(record.ends == 1 and record.refused is None for record in records)
    batches_s = 5 * max(a_pass.end_s - a_pass.start_s for a_pass in outcome.passes)
    for record in records:
        if arrivals[record.index].priority > 0:
            continue
        after_s = record.arrived_s + bound_s
        overtaken = [
            other
            for other in records
            if other.arrived_s > after_s and other.dispatched_s < record.dispatched_s - batches_s
        ]
        assert overtaken == []
