"""The watchdog lets healthy instances be, however long their passes, and resets a silent one."""

from __future__ import annotations

import pytest
from simulator_fixtures import poisson

from sglang_sbs.scheduling import ForwardEnded, Scheduler
from sglang_sbs.scheduling.prefill.watchdog import Watchdog
from sglang_sbs.simulator import COSTS, ClusterSpec, InstanceSpec, simulate
from sglang_sbs.simulator.experiments.sweep import scheduler_config
from sglang_sbs.simulator.workloads.scenario import make_scenario

MINUTES_S = 90.0


class Seen:
    """The scheduler of a simulation, and how often its watchdogs fired."""

    def __init__(self) -> None:
        self.scheduler: Scheduler | None = None

    def __call__(self, scheduler: Scheduler, _now_s: float) -> None:
        self.scheduler = scheduler

    @property
    def fires(self) -> dict[str, int]:
        assert self.scheduler is not None
        return {name: instance.watchdog.fires for name, instance in self.scheduler.prefill.items()}


@pytest.mark.parametrize(
    ("policy", "overlap"), [("sbs", True), ("sbs", False), ("sbs_paper", True), ("eta", True)]
)
@pytest.mark.parametrize("speed", [0.3, 0.1])
def test_a_slow_instance_is_not_taken_for_a_silent_one(speed: float, policy: str, overlap: bool):
    shapes = (InstanceSpec(), InstanceSpec(), InstanceSpec(speed=speed))
    spec = ClusterSpec(
        cost=COSTS["mixed"], instances=shapes, overlap=overlap, pass_jitter=0.15, seed=2
    )
    seen = Seen()
    simulate(poisson(15, MINUTES_S, 2), scheduler_config(policy), spec, observe=seen)
    assert set(seen.fires.values()) == {0}


@pytest.mark.parametrize("speed", [1.0, 0.3])
@pytest.mark.parametrize("chunk_tokens", [3072, 16384])
def test_long_prompts_are_not_taken_for_silence(chunk_tokens: int, speed: float):
    scenario = make_scenario(
        "paper-long", instances=[{}, {}, {"speed": speed}], overlap=True, chunk_tokens=chunk_tokens
    )
    seen = Seen()
    arrivals = scenario.at_load(0.2, MINUTES_S, 3)
    simulate(arrivals, scheduler_config("sbs"), scenario.spec, observe=seen)
    assert set(seen.fires.values()) == {0}


@pytest.mark.parametrize("policy", ["sbs", "eta"])
def test_an_instance_that_falls_silent_is_reset(policy: str, monkeypatch: pytest.MonkeyPatch):
    """Its engine goes on; what it says is lost from a moment on."""
    handle = Scheduler.handle

    def deaf(scheduler, event, now_s):
        if isinstance(event, ForwardEnded) and event.instance == "p1" and now_s > 20:
            return []
        return handle(scheduler, event, now_s)

    monkeypatch.setattr(Scheduler, "handle", deaf)
    seen = Seen()
    spec = ClusterSpec(cost=COSTS["mixed"], overlap=True, decode_s=1000.0)
    outcome = simulate(poisson(60, 40.0, 2), scheduler_config(policy), spec, observe=seen)
    assert seen.fires["p1"] > 0
    assert seen.fires["p0"] == seen.fires["p2"] == 0
    assert {request.refused for request in outcome.requests} == {None}


def test_silence_counts_from_the_end_of_what_runs_and_is_measured_by_the_slower():
    dog = Watchdog(t_default_s=0.3)
    dog.on_cluster(0.2)
    dog.arm(10.0, busy_until_s=10.0, launched=False)
    assert dog.due_s == pytest.approx(11.0)
    dog.arm(10.0, busy_until_s=12.0, launched=False)
    assert dog.due_s == pytest.approx(13.0)
    for _ in range(9):
        dog.on_pass(2.0)
    assert dog.timeout_s == pytest.approx(10.0)
    dog.on_cluster(3.0)
    assert dog.timeout_s == pytest.approx(15.0)


def test_one_slow_pass_does_not_make_the_watchdog_patient():
    dog = Watchdog(t_default_s=0.3)
    dog.on_cluster(0.2)
    for forward_s in (30.0, 0.2):
        dog.on_pass(forward_s)
    assert dog.timeout_s == pytest.approx(1.0)


def test_the_first_pass_may_take_longer_but_not_for_ever():
    dog = Watchdog(t_default_s=0.3)
    dog.arm(0.0, busy_until_s=0.3, launched=True)
    first_s = dog.due_s
    dog.on_pass(0.3)
    dog.arm(0.0, busy_until_s=0.3, launched=True)
    assert dog.due_s is not None
    assert first_s is not None
    assert dog.due_s < first_s < 10.0
