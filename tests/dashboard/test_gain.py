"""The estimate of the gain: against simulated runs of the rules, its interval, its bounds."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pytest
import router_harness
from harness.recorders import LoneRecorder

from sglang_sbs.dashboard.gain import (
    LEAST_MINUTES,
    MINUTE_S,
    Gain,
    by_bound,
    in_words,
)
from sglang_sbs.dashboard.recorder import DashboardRecorder
from sglang_sbs.dashboard.shadow import ShadowCluster, Shape
from sglang_sbs.dashboard.ttft import MOST_EACH_MINUTE, SLICE_S, TtftComparison
from sglang_sbs.scheduling import Command, Event, PolicySwitched, Scheduler, SchedulerConfig
from sglang_sbs.simulator.cluster.cost import PassCost
from sglang_sbs.simulator.cluster.outcome import Outcome
from sglang_sbs.simulator.cluster.simulation import Simulation
from sglang_sbs.simulator.cluster.spec import ClusterSpec
from sglang_sbs.trial.ratios import Circumstances, why_no_gain

COST = PassCost(fixed_s=0.1, mean_s=3e-5, max_s=7e-5)
WARM_UP_S, DURATION_S = 8.0, 40.0


# Against simulated runs -----------------------------------------------------------------------


class Watched(Scheduler):
    """Has a recorder beside it, as the router's has."""

    def __init__(self, policy: str) -> None:
        super().__init__(SchedulerConfig(policy=policy))
        self.recorder: DashboardRecorder | None = None
        self.figures: list[dict[str, float]] = []
        self._next_s = 0.0

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """See :class:`~sglang_sbs.scheduling.Scheduler`."""
        commands = super().handle(event, now_s)
        if self.recorder is None:
            self.recorder = LoneRecorder(self, now_s)
            self.recorder.ttft.gain.add = self._take  # type: ignore[method-assign]
        self.recorder.observe(event, commands, now_s)
        if now_s >= self._next_s:
            self._next_s = now_s + SLICE_S
            self.recorder.tick(now_s)
        return commands

    def _take(self, now_s: float, figures_s: Any) -> None:
        if now_s > WARM_UP_S:
            self.figures.append(dict(figures_s))


def run(policy: str, arrivals: Sequence[tuple[float, int]], spec: ClusterSpec) -> Any:
    """Mean TTFT, and the means of all figures of the recorder beside it."""
    outcome, scheduler = Outcome(), Watched(policy)
    simulation = Simulation(outcome, scheduler, spec)
    simulation.start(arrivals)
    simulation.end()
    assert scheduler.recorder is not None
    for _ in range(100):  # slices, of which each takes at least a few requests
        scheduler.recorder.ttft.advance(1e6)
    assert not scheduler.recorder.ttft._undecided
    names = scheduler.figures[0]
    figures = {name: fmean(sample[name] for sample in scheduler.figures) for name in names}
    return fmean(
        sample.ttft_s for sample in outcome.requests if sample.arrived_s > WARM_UP_S
    ), figures


# With look-ahead ``eta`` has two states on eight ranks that last for minutes (a leftover makes the
# engine form batches early, which leaves more over): a short run says little about it there.
@pytest.mark.parametrize(
    ("dp_size", "load", "overlap", "rules"),
    [
        (8, 0.7, True, ["round_robin"]),
        (8, 0.7, False, ["round_robin", "eta"]),
        (4, 0.6, True, ["round_robin", "eta"]),
    ],
)
def test_the_estimate_is_within_ten_per_cent_of_real_runs(
    dp_size: int, load: float, overlap: bool, rules: list[str]
) -> None:
    spec = ClusterSpec(
        cost=COST, dp_size=dp_size, overlap=overlap, launch_gap_s=0.005, prefill_instances=3
    )
    rng, arrivals, now_s = random.Random(5), [], 0.0
    per_s = load * 3 * dp_size * 3072 / COST.full_chunk_s(3072) / 1000
    while (now_s := now_s + rng.expovariate(per_s)) < DURATION_S:
        arrivals.append((now_s, int(rng.betavariate(1, 2) * 3000) + 1))
    ours_s, figures = run("sbs", arrivals, spec)
    assert figures["modelled"] == pytest.approx(ours_s, rel=0.05)
    for rule in rules:
        real_s, _ = run(rule, arrivals, spec)
        assert figures[rule] == pytest.approx(real_s, rel=0.1), rule
        assert figures["modelled"] / figures[rule] == pytest.approx(ours_s / real_s, rel=0.1), rule


def test_an_engine_that_looks_ahead_makes_late_comers_wait_a_pass_more() -> None:
    ends = {}
    for overlap in (False, True):
        cluster = ShadowCluster()
        shape = Shape(1, 100, lambda tokens, pairs: 1.0, overlap=overlap, pause_s=0.1)
        cluster.follow({"p": shape}, 0.0)
        cluster.place("a", ("p", 0), 150, 0.0)  # the rest of it is the next pass
        cluster.place("late", ("p", 0), 50, 0.5)
        ends[overlap] = dict(cluster.advance(10.0))
    # Without look-ahead the late one is in the pass after this one, and shares it with the rest.
    assert ends[False] == {"a": pytest.approx(2.1), "late": pytest.approx(2.1)}
    assert ends[True] == {"a": pytest.approx(2.0), "late": pytest.approx(3.0)}


# The interval ---------------------------------------------------------------------------------

ABOUT = Circumstances(policy="sbs", holding=True, load=0.6, ranks=8)


def filled(minutes: int, ratio: float, noise: float = 0.0, off: float = 1.0, seed: int = 1) -> Gain:
    gain, rng = Gain(), random.Random(seed)
    for minute in range(minutes):
        for number in range(20):
            baseline_s = 1.0 + rng.uniform(-0.5, 0.5)
            ours_s = ratio * baseline_s * (1 + noise * rng.gauss(0.0, 1.0))
            figures = {"modelled": ours_s, "measured": ours_s / off}
            figures |= {"eta": baseline_s, "round_robin": 2 * baseline_s}
            gain.add(MINUTE_S * minute + number, figures)
    return gain


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    held = 0
    for seed in range(200):
        (estimate,) = [
            ratio
            for name, ratio in filled(8, 0.8, 0.3, seed=seed).ratios(8 * MINUTE_S).items()
            if name == "eta"
        ]
        held += estimate.low <= 0.8 <= estimate.high
    assert 182 <= held <= 199  # 190 expected


def test_there_is_no_ratio_before_three_whole_minutes_nor_with_a_model_that_is_off() -> None:
    assert filled(LEAST_MINUTES, 0.8).ratios(LEAST_MINUTES * MINUTE_S - 1) == {}
    assert set(filled(LEAST_MINUTES, 0.8).ratios(LEAST_MINUTES * MINUTE_S)) == {
        "eta",
        "round_robin",
    }
    off = filled(5, 0.8, off=1.3)
    assert off.ratios(5 * MINUTE_S) == {}
    assert "off by +30%" in off.summary(5 * MINUTE_S, ABOUT)["why"]
    early = filled(1, 0.8).summary(MINUTE_S, ABOUT)
    assert early["why"].startswith("not known yet: 1 of 3")


def test_what_happened_long_ago_does_not_count_and_memory_is_bounded() -> None:
    gain = filled(200, 0.8)
    assert len(gain._minutes) <= 61
    assert gain.ratios(1e6) == {}


def test_the_trend() -> None:
    gain = filled(15, 0.8, 0.05)
    assert gain.summary(15 * MINUTE_S, ABOUT)["trend"] == "steady"
    for minute in range(15, 21):
        gain.add(MINUTE_S * minute, {"modelled": 5, "measured": 5, "eta": 10, "round_robin": 40.0})
    assert gain.summary(20 * MINUTE_S, ABOUT)["trend"] == "growing"


def test_no_gain_has_a_cause_and_a_gain_has_none() -> None:
    assert filled(5, 0.8, 0.05).summary(5 * MINUTE_S, ABOUT)["why"] == ""
    none = filled(5, 1.0, 0.05)
    for changed, said in (
        ({"policy": "eta"}, "the policy is eta"),
        ({"holding": False}, "do not arrive whole"),
        ({"load": 0.1}, "the load is low (0.10"),
        ({"load": 1.2}, "overloaded"),
        ({"ranks": 2}, "two DP ranks"),
        ({"ranks": 1}, "one DP rank"),
        ({}, "no cause is apparent"),
    ):
        values = {"policy": "sbs", "holding": True, "load": 0.6, "ranks": 8} | changed
        about = Circumstances(**values)  # type: ignore[arg-type]
        assert said in why_no_gain(about)
        assert none.summary(5 * MINUTE_S, about)["why"] == why_no_gain(about)


def test_the_gain_is_formatted_as_text_and_as_metric_values() -> None:
    ratios = filled(5, 0.8).ratios(5 * MINUTE_S)
    assert in_words({}) == ""
    assert in_words(ratios) == (
        "gain: mean TTFT 0.40x of round_robin (0.40 to 0.40), 0.80x of eta (0.80 to 0.80)"
    )
    assert by_bound(ratios)["eta", "ratio"] == pytest.approx(0.8)
    assert {bound for _, bound in by_bound(ratios)} == {"ratio", "low", "high"}


# What it costs --------------------------------------------------------------------------------


def test_a_slice_is_bounded_and_too_many_requests_end_the_estimate_for_a_minute() -> None:
    ttft = TtftComparison()
    ttft.follow({"p": Shape(2, 1000, lambda tokens, pairs: 1.0)}, 0.0)
    ttft.preload("p", [0, 0], 0.0)

    def come(count: int, now_s: float) -> None:
        for number in range(count):
            ttft.on_arrived(f"{now_s} {number}", 10, now_s, 0.0)
            ttft.on_dispatched(f"{now_s} {number}", "p", 0, 0, now_s)

    come(500, 1.0)
    ttft.advance(1.0)
    behind = len(ttft._undecided)
    assert 300 < behind < 450
    come(5_000, 1.1)
    ttft.advance(1.2)
    assert ttft.rests_until_s == pytest.approx(61.2)
    assert not ttft._undecided
    come(10, 30.0)
    assert not ttft._undecided
    assert ttft.overtaxed
    assert ttft.begins, "what the engines are busy with then is asked for"
    ttft.preload("p", [0, 0], 62.0)
    come(10, 62.0)
    assert len(ttft._undecided) == 10


def test_after_a_switch_of_the_policy_only_what_runs_now_counts() -> None:
    scheduler = Scheduler(SchedulerConfig(policy="eta"))
    recorder = LoneRecorder(scheduler, 0.0)
    recorder.ttft.gain = gain = filled(8, 1.0)
    assert gain.ratios(8 * MINUTE_S)["eta"].ratio == pytest.approx(1.0)
    switch, now_s = PolicySwitched(policy="sbs"), 8 * MINUTE_S + 20
    recorder.observe(switch, scheduler.handle(switch, now_s), now_s)
    assert gain.ratios(now_s) == {}
    for minute in range(8, 12):
        ours_s = 1.0 if minute == 8 else 0.5  # the minute of the switch is of both
        figures = {"modelled": ours_s, "measured": ours_s, "eta": 1.0, "round_robin": 2.0}
        gain.add(MINUTE_S * minute + 40, figures)
    assert gain.ratios(12 * MINUTE_S)["eta"].ratio == pytest.approx(0.5)
    assert gain.summary(11 * MINUTE_S, ABOUT)["why"].startswith("not known yet: 2 of 3")


async def test_a_router_estimates_while_nobody_looks_and_exports_the_ratio() -> None:
    async with router_harness.cluster(scheduler=Scheduler(SchedulerConfig())) as running:
        recorder = running.server.scheduler.feed.recorder
        assert recorder is not None
        status, _ = await running.generate(text="hello", sampling_params={"max_new_tokens": 2})
        assert status == 200
        await router_harness.until(lambda: len(recorder.ttft._samples) == 1)
        number = int(time.monotonic() // MINUTE_S)
        for minute in range(number - 5, number):
            figures = {"modelled": 0.5, "measured": 0.5, "eta": 0.625, "round_robin": 1.0}
            recorder.ttft.gain.add(MINUTE_S * minute, figures)
        async with running.client.get(
            f"http://127.0.0.1:{running.server.prometheus_port}/metrics"
        ) as answer:
            page = await answer.text()
        assert 'sbs_gain_ratio{baseline="eta",bound="ratio"} 0.8' in page
        assert 'sbs_gain_ratio{baseline="round_robin",bound="high"} 0.5' in page
        assert running.server.scheduler.gain().startswith("gain: mean TTFT 0.50x of round_robin")


def test_with_many_requests_one_minute_in_three_is_followed_and_all_are_measured() -> None:
    ttft = TtftComparison()
    ttft.follow({"p": Shape(2, 1000, lambda tokens, pairs: 0.05)}, 0.0)
    shown: list[tuple[int, float]] = []
    per_minute = MOST_EACH_MINUTE + 100
    for number in range(5 * per_minute):
        now_s = number * MINUTE_S / per_minute
        ttft.on_arrived(f"{number}", 10, now_s, 0.0)
        ttft.on_dispatched(f"{number}", "p", 0, 0, now_s)
        ttft.on_prefilled(f"{number}", now_s + 0.05, now_s + 0.05)
        ttft.answered(0.05, 1, now_s + 0.05)
        if number % 5 == 0:
            ttft.advance(now_s + 0.05)
        warming_up = number == int(2.9 * per_minute)
        if number % per_minute == per_minute // 2 or warming_up:  # in the middle of each minute
            summary = ttft.summary(now_s)
            shown.append((summary["requests"], summary["stopped_s"]))
            assert ttft.slowness(now_s)[0] > 700
    minutes = [minute.number for minute in ttft.gain._minutes]
    assert minutes == [0, 3]
    assert [round(stopped_s) for _, stopped_s in shown] == [0, 30, 90, 114, 0, 30]
    assert all(requests > 700 for requests, _ in shown)
    assert len(ttft._pending) < 100
