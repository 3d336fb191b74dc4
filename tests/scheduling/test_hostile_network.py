"""The scheduler learns the network from batches that arrive split, late, or not at all."""

from __future__ import annotations

import random
from typing import Any

import pytest
from harness.prefill_reports import fresh, report
from msgspec.structs import replace

from sglang_sbs.scheduling import (
    ForwardEnded,
    InstanceUp,
    RequestArrived,
    RequestEnded,
    Scheduler,
    SchedulerConfig,
)
from sglang_sbs.scheduling.policies.adaptive.trigger import AdaptiveTrigger
from sglang_sbs.scheduling.prefill.forward_model import ForwardModel
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.prefill.interval import NetworkLatency
from sglang_sbs.simulator.cluster.cost import COSTS
from sglang_sbs.simulator.cluster.simulation import simulate
from sglang_sbs.simulator.cluster.spec import ClusterSpec
from sglang_sbs.simulator.experiments.sweep import scheduler_config
from sglang_sbs.simulator.workloads.arrivals import synthetic, uniform_like
from sglang_sbs.wire import EndForward
from sglang_sbs.wire.endforward import Started

MINUTE_S = 60.0
HOUR_S = 3600.0


def learned_latencies_s(spec: ClusterSpec, qps: float, duration_s: float = 40.0) -> list[float]:
    """L_net after every event."""
    seen: list[float] = []
    simulate(
        synthetic(qps, duration_s, uniform_like(3000), 7),
        scheduler_config("sbs", 7),
        spec,
        observe=lambda scheduler, _now_s: seen.append(scheduler.interval.latency_s),
    )
    return seen


@pytest.mark.parametrize("cost", ["mixed", "table"])
@pytest.mark.parametrize("qps", [20.0, 70.0, 140.0])
def test_split_batches_are_no_latency(cost: str, qps: float):
    """The requests of a batch come a millisecond apart, so an idle instance starts with one of them
    and leaves the others behind for a whole pass."""
    truth_s = 0.006
    spec = ClusterSpec(
        cost=COSTS[cost], dispatch_latency_s=0.005, dispatch_serial_s=0.001, overlap=True
    )
    seen = learned_latencies_s(spec, qps)
    assert abs(seen[-1] - truth_s) < 0.001
    later = seen[len(seen) // 4 :]
    assert max(later) < truth_s + 0.001


@pytest.mark.parametrize("jitter", [0.15, 0.3, 0.5])
def test_jitter_moves_the_latency_no_further_than_it_moves_requests(jitter: float):
    spec = ClusterSpec(
        cost=COSTS["mixed"], dispatch_latency_s=0.01, dispatch_jitter=jitter, overlap=True
    )
    seen = learned_latencies_s(spec, 60.0)
    # Half of all requests are there within 10 ms, and hardly one takes three times as long.
    assert max(seen[len(seen) // 4 :]) < 0.03


def test_a_latency_far_above_what_was_assumed_is_learned():
    """The launch is presumed long before it is reported."""
    spec = ClusterSpec(cost=COSTS["mixed"], dispatch_latency_s=0.3, overlap=True)
    assert learned_latencies_s(spec, 60.0, 10.0)[-1] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("latency_s", "qps", "most"),
    [
        pytest.param(1.2, 60.0, 1.2, id="several passes"),
        pytest.param(0.3, 205.0, 1.15, id="nearly a pass, with more waiting than all can take"),
    ],
)
def test_what_is_on_its_way_for_a_pass_is_not_held(latency_s: float, qps: float, most: float):
    """One batch per pass and instance would be a batch per latency."""
    spec = ClusterSpec(cost=COSTS["mixed"], dispatch_latency_s=latency_s, overlap=True)
    mean_s = {}
    for policy in ("sbs", "eta"):
        arrivals = synthetic(qps, 50.0, uniform_like(3000), 7)
        requests = simulate(arrivals, scheduler_config(policy, 7), spec).requests
        mean_s[policy] = sum(request.prefilled_s - request.arrived_s for request in requests) / len(
            requests
        )
    assert mean_s["sbs"] < most * mean_s["eta"]


def test_a_latency_of_several_passes_stays_known_although_no_instance_is_idle():
    spec = ClusterSpec(cost=COSTS["mixed"], dispatch_latency_s=1.2, overlap=True)
    assert learned_latencies_s(spec, 60.0, 50.0)[-1] == pytest.approx(1.2, rel=0.2)


def test_a_latency_is_forgotten_without_an_idle_instance_to_learn_from():
    network = NetworkLatency(0.02)
    hostile(network)
    for step in range(1200):
        network.observe([], HOUR_S + step / 10)
    assert network.latency_s < 0.021


def test_within_a_minute_of_the_truth_nothing_is_left_of_a_hostile_hour():
    network = NetworkLatency(0.02)
    hostile(network)
    assert network.latency_s > 1.0
    for step in range(600):
        network.observe([0.004] if step % 40 == 0 else [], HOUR_S + step / 10)
    assert network.latency_s == pytest.approx(0.004)


def hostile(network: NetworkLatency) -> None:
    rng = random.Random(1)
    for second in range(int(HOUR_S)):
        network.observe([rng.uniform(0.3, 900.0)], float(second))


def test_one_wild_latency_moves_nothing():
    network = NetworkLatency(0.02)
    for step in range(20):
        network.observe([0.005], step * 0.1)
    assert network.observe([4.0], 2.0) == pytest.approx(0.005)


def of_batches(network: NetworkLatency, sizes: list[int], base_s: float, each_s: float) -> None:
    for step, size in enumerate(sizes):
        network.observe([base_s + each_s * (size - 1)], step * 0.1, [size])


def test_what_a_batch_takes_longer_than_a_single_request_is_learned_from_batches():
    network = NetworkLatency(0.02)
    of_batches(network, [40, 50, 60, 70, 80], 0.005, 0.0005)
    assert network.serial_s == pytest.approx(0.0005)
    assert network.lone_s == pytest.approx(0.005)
    assert network.latency_s == pytest.approx(0.005 + 59 * 0.0005)


def test_an_engine_that_says_it_began_before_it_was_sent_anything_makes_no_latency_negative():
    network = NetworkLatency(0.02)
    of_batches(network, [40, 50, 60], -3600.0, 0.0)
    assert (network.latency_s, network.serial_s, network.lone_s) == (0.0, 0.0, 0.0)


def test_size_is_not_blamed_for_what_it_does_not_explain():
    network = NetworkLatency(0.02)
    of_batches(network, [40, 50, 60, 70, 80], 0.005, 0.0005)
    network.observe([4.0], 0.5, [70])
    assert network.serial_s < 0.001 and 0 <= network.lone_s <= network.latency_s
    of_batches(network, [8] * 64, 0.007, 0.0)
    assert (network.serial_s, network.lone_s) == (0.0, network.latency_s)


def test_a_few_batches_do_not_show_that_a_lone_request_takes_longer():
    """Behind one busy intake each of them waited for the one before."""
    network = NetworkLatency(0.02)
    network.observe([0.013] * 5, 0.0)
    for step in range(500):
        network.observe([], step / 10)
    network.observe([0.13, 0.12], 50.0, [9, 14])
    assert network.latency_s == pytest.approx(0.13)
    assert network.lone_s == pytest.approx(0.013)
    network.observe([0.13] * 6, 51.0, [9] * 6)
    assert network.lone_s == pytest.approx(0.13), "eight batches show a slow network"


def test_the_forward_model_recovers_from_a_hostile_hour():
    model = ForwardModel(t_default_s=0.3, chunk_tokens=3072)
    rng = random.Random(2)
    for _ in range(10_000):
        tokens = [rng.randrange(3072) for _ in range(8)]
        model.observe(tokens, rng.choice([1e-3, 0.2, 3.0, 60.0]))
    cost = COSTS["mixed"]
    now_s, errors = 0.0, []
    while now_s < 2 * MINUTE_S:
        tokens = [rng.randrange(3072) for _ in range(8)]
        forward_s = cost.pass_s(tokens, [0.0] * 8, [1] * 8)
        now_s += forward_s
        if now_s > MINUTE_S:
            errors.append(abs(model.predict_s(tokens) / forward_s - 1))
        model.observe(tokens, forward_s)
    assert max(errors) < 0.1


def test_expected_outputs_recover_from_answers_of_any_length():
    scheduler = Scheduler(SchedulerConfig())
    for name, role in (("p0", "prefill"), ("d0", "decode")):
        scheduler.handle(
            InstanceUp(
                instance=name,
                role=role,
                dp_size=1,
                chunk_tokens=4096,
                kv_capacity_tokens=100_000,
            ),
            0.0,
        )

    def serve(index: int, completion_tokens: int) -> None:
        rid = f"r{index}"
        scheduler.handle(RequestArrived(rid=rid, prompt_tokens=10), float(index))
        ended = RequestEnded(rid=rid, outcome="completed", completion_tokens=completion_tokens)
        scheduler.handle(ended, float(index))
        for kind in ("launch", "idle"):
            seq = 2 * index + (kind == "idle")
            message = report(seq=seq, kind=kind, forward_id=index)
            scheduler.handle(ForwardEnded(instance="p0", report=message), float(index))

    for index in range(200):
        serve(index, 2**41)
    for index in range(200, 400):
        serve(index, 100)
    probe = RequestArrived(rid="probe", prompt_tokens=10)
    scheduler.handle(probe, 400.0)
    assert scheduler._requests["probe"].total_tokens < 300


def running() -> tuple[PrefillInstance, EndForward]:
    """An instance of one rank in its first pass since 100.0 s, and the message about its launch."""
    instance = fresh()
    launch = {"kind": "launch", "forward_id": 1, "launch_s": 49.7}
    base = report(**launch, extend_tokens=500, tokens_per_rank=[500])
    instance.on_report(base, 100.0)
    return instance, base


@pytest.mark.parametrize(
    ("queued_s", "schedulable_s", "rested", "idled"),
    [
        (50.01, 50.02, True, False),
        (50.09, 50.1, True, True),
        (50.01, 50.09, True, True),
        (0.0, 0.0, True, True),
        (0.0, 0.0, False, False),
    ],
    ids=["there", "late", "late at decode", "not reported", "never idle"],
)
def test_a_pause_of_the_engine_is_not_taken_for_a_late_batch(
    queued_s: float, schedulable_s: float, rested: bool, idled: bool
):
    """The engine took 100 ms to start what it had; leaving earlier would change nothing."""
    instance, base = running()
    instance.on_dispatched("r", 0, 500, 100.25)
    ended = replace(base, seq=1, kind="forward", end_s=50.0, forward_s=0.3)
    instance.on_report(ended, 100.3)
    if rested:
        instance.on_report(replace(base, seq=2, kind="idle"), 100.31)
    started = [Started("r", queued_s, schedulable_s)]
    next_one = replace(base, seq=3, forward_id=2, launch_s=50.1, rids=["r"], started=started)
    seen = instance.on_report(next_one, 100.4)
    assert (bool(seen.idled_s), bool(seen.landed_s)) == (idled, not idled)


def learned_leads_s(pause_s: float, duration_s: float) -> list[float]:
    """Return by how much the lead exceeds L_net whenever something happens after the first second,
    for a router that starts in front of engines that pause between passes."""
    over_s: list[float] = []

    def look(scheduler: Scheduler, now_s: float) -> None:
        policy = scheduler.policy
        assert isinstance(policy, AdaptiveTrigger)
        if now_s > 1.0:
            over_s.append(policy.lead_s - scheduler.interval.lone_s)

    simulate(
        synthetic(70.0, duration_s, uniform_like(3000), 7),
        scheduler_config("sbs", 7),
        ClusterSpec(cost=COSTS["mixed"], dispatch_latency_s=0.005, launch_gap_s=pause_s),
        observe=look,
    )
    return over_s


def test_a_router_that_starts_does_not_take_pauses_of_the_engines_for_its_own_lateness():
    """A pause that is longer than the one assumed looks like a batch that came too late, until the
    pause is learned: that must be over before the lead has grown by much."""
    assert max(learned_leads_s(0.03, 20.0)) < 0.03


def test_a_batch_leaves_for_the_launch_and_not_for_the_end_of_the_pass_before():
    """A request that is there when the engine forms the next batch is early enough."""
    instance, _ = running()
    instance.pause.mean_s = 0.06
    end_s = instance.passes[-1].end_s
    assert instance.free_at_s(100.0, 0.02) == pytest.approx(end_s + 0.06)
    assert instance.forms_at_s(100.0, 0.02) == pytest.approx(end_s + 0.06)


@pytest.mark.parametrize(
    ("between", "pause_s", "learned"),
    [
        pytest.param({}, 0.07, True, id="nothing else held it up"),
        pytest.param({"kind": "idle"}, 0.07, False, id="it had nothing to launch"),
        pytest.param(
            {"kind": "heartbeat", "bootstrapping_requests": 1},
            0.07,
            False,
            id="it waited for decode",
        ),
        pytest.param({}, -0.01, False, id="before the end"),
        pytest.param({}, 5.0, False, id="longer than a pass"),
    ],
)
def test_a_pause_is_learned_of_a_launch_that_only_the_engine_held_up(
    between: dict[str, Any], pause_s: float, learned: bool
):
    """When its request was sent does not matter. A tenth is learned of each pause."""
    instance, base = running()
    instance.pause.mean_s, instance.pause.learned = 0.06, 20
    ended = replace(base, seq=1, kind="forward", end_s=50.0, forward_s=0.3)
    instance.on_report(ended, 100.3)
    if between:
        instance.on_report(replace(base, seq=2, **between), 100.31)
    launch = replace(base, seq=3, forward_id=2, rids=["r"], age_s=0.02)
    instance.on_report(launch, 100.32 + pause_s)
    share = 0.1 if learned else 0.0
    assert instance.pause.mean_s == pytest.approx(0.06 + share * (pause_s - 0.06))


def test_an_instance_is_not_idle_before_it_rests_or_its_pause_is_over():
    instance, base = running()
    instance.pause.mean_s = 0.06
    instance.on_report(replace(base, seq=1, kind="forward", forward_s=0.3), 100.3)
    assert not instance.idle
    assert instance.free_at_s(100.3, 0.02) == pytest.approx(100.36)
    assert instance.advance(100.3, 0.02) == pytest.approx(100.36)
    instance.advance(100.37, 0.02)
    assert instance.idle
    instance.on_report(replace(base, seq=2, forward_id=2), 100.38)
    ended = replace(base, seq=3, kind="forward", forward_id=2, forward_s=0.3)
    instance.on_report(ended, 100.7)
    assert not instance.idle
    instance.on_report(replace(base, seq=4, forward_id=2, kind="idle"), 100.71)
    assert instance.idle


def test_a_pause_is_learned_once_and_not_from_a_launch_that_followed_nothing():
    instance, base = running()
    ended = replace(base, seq=1, kind="forward", end_s=50.0, forward_s=0.3, waiting_requests=1)
    instance.on_report(ended, 100.3)
    for number in (2, 3):  # the third was launched behind the second
        launch = replace(base, seq=number, forward_id=number, waiting_tokens=100)
        instance.on_report(launch, 100.31)
    assert instance.pause.learned == 1
    polled = fresh("p1")
    polled.on_dispatched("r", 0, 500, -0.1)
    polled.on_load_poll([600], 0.0)
    polled.on_report(replace(base, rids=["r"]), 0.01)
    assert polled.pause.learned == 0
