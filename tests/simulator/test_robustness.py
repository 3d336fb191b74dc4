"""Faults and uneven clusters: nothing is lost, and each knob does what its name says."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulator_fixtures import poisson

from sglang_sbs.scheduling import SchedulerConfig, policy_names
from sglang_sbs.simulator import COSTS, ClusterSpec, InstanceSpec, TopologyChange, simulate
from sglang_sbs.simulator.cluster import simulation
from sglang_sbs.simulator.cluster.network import FeedbackChannel
from sglang_sbs.simulator.experiments.sweep import POLICY_CONFIGS, scheduler_config

MIXED = COSTS["mixed"]
KNOBS = {
    "lengths": {"length_error": 0.3},
    "loss": {"endforward_loss": 0.3},
    "late": {"endforward_delay_s": 0.1},
    "twice": {"endforward_duplicates": 0.5},
    "uneven": {
        "instances": (
            InstanceSpec(),
            InstanceSpec(dp_size=4, chunk_tokens=4096, speed=0.5),
            InstanceSpec(dp_size=2, chunk_tokens=1024, speed=2.0),
        )
    },
    "kv": {"decode_kv_capacity_tokens": 6000, "decode_max_running_requests": 4},
    "topology": {
        "changes": (
            TopologyChange(2.0, "drain", "p1"),
            TopologyChange(3.0, "up", "p2"),
            TopologyChange(4.0, "down", "p1"),
            TopologyChange(5.0, "down", "p0"),
            TopologyChange(6.0, "up", "p1"),
        )
    },
}
KNOBS["everything"] = {name: value for knob in list(KNOBS.values()) for name, value in knob.items()}


def spec_with(**knobs) -> ClusterSpec:
    return ClusterSpec(cost=MIXED, pass_jitter=0.1, seed=4, **knobs)


@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("policy", ["sbs", "sbs_paper", "eta", "random_rank"])
def test_under_every_knob_every_request_is_completed_exactly_once(policy, knob):
    arrivals = poisson(60, 8.0, 3)
    outcome = simulate(arrivals, scheduler_config(policy), spec_with(**KNOBS[knob]))
    assert len(outcome.requests) == len(arrivals)
    for record in outcome.requests:
        assert record.ends == 1, record
        assert record.refused is None
        assert record.ttft_s > 0, record


instances = st.lists(
    st.builds(
        InstanceSpec,
        dp_size=st.integers(1, 4),
        chunk_tokens=st.sampled_from([256, 3072]),
        speed=st.sampled_from([0.3, 1.0, 2.0]),
    ),
    min_size=2,
    max_size=4,
).map(tuple)


@st.composite
def churning(draw) -> ClusterSpec:
    """A cluster whose instances come and go in any allowed order."""
    listed = draw(instances)
    changes, last = [], dict.fromkeys([f"p{i}" for i in range(len(listed))], "up")
    for name in list(last):
        if draw(st.booleans()):
            last[name] = "absent"
    after = {"up": ["drain", "down"], "drain": ["up", "down"], "down": ["up"], "absent": ["up"]}
    at_s = 0.0
    for _ in range(draw(st.integers(0, 8))):
        at_s += draw(st.sampled_from([0.0, 0.1, 0.7]))
        name = draw(st.sampled_from(sorted(last)))
        last[name] = draw(st.sampled_from(after[last[name]]))
        changes.append(TopologyChange(at_s, last[name], name))
    return ClusterSpec(
        cost=MIXED,
        instances=listed,
        changes=tuple(changes),
        detection_s=draw(st.sampled_from([0.0, 0.2, 2.0])),
        decode_dp_size=draw(st.integers(1, 3)),
        handshake_s=draw(st.sampled_from([0.0, 0.05])),
        first_token_s=draw(st.sampled_from([0.0, 0.2])),
        prepare_s=draw(st.sampled_from([0.0, 0.02])),
        overlap=draw(st.booleans()),
        decode_kv_capacity_tokens=draw(st.sampled_from([0, 6000])),
        length_error=draw(st.sampled_from([0.0, 0.3])),
        endforward_loss=draw(st.sampled_from([0.0, 0.3, 1.0])),
        endforward_delay_s=draw(st.sampled_from([0.0, 0.05, 1.0])),
        endforward_duplicates=draw(st.sampled_from([0.0, 0.5])),
        seed=draw(st.integers(0, 100)),
    )


HELD_TO_THE_LAST_BIT = ClusterSpec(
    cost=MIXED,
    instances=(
        InstanceSpec(dp_size=1, chunk_tokens=256, speed=0.3),
        InstanceSpec(dp_size=1, chunk_tokens=3072),
    ),
    decode_dp_size=1,
    endforward_loss=1.0,
)
"""Here arrived + max_hold_s - arrived is less than max_hold_s, by rounding: when the hold ends, it
must be over, or the scheduler asks for the same time for ever."""


@settings(max_examples=80, deadline=None)
@example(spec=HELD_TO_THE_LAST_BIT, policy="sbs", trigger="adaptive", seed=0)
@given(
    spec=churning(),
    policy=st.sampled_from(policy_names()),
    trigger=st.sampled_from(["adaptive", "paper"]),
    seed=st.integers(0, 1000),
)
def test_whatever_comes_and_goes_every_request_ends_exactly_once(spec, policy, trigger, seed):
    config = SchedulerConfig(policy=policy, trigger=trigger, n_limit=10**6, default_timeout_s=20.0)
    arrivals = poisson(25, 4.0, seed)
    outcome = simulate(arrivals, config, spec)
    assert len(outcome.requests) == len(arrivals)
    for record in outcome.requests:
        assert record.ends == 1, record
        assert 1 <= record.attempts <= 5
        if record.ttft_s > 0:
            assert record.refused is None
        else:
            # Given up: refused, or every attempt broke.
            assert record.refused is not None or record.attempts == 5


def test_a_death_costs_its_requests_another_attempt_elsewhere():
    spec = spec_with(changes=(TopologyChange(4.0, "down", "p1"),), detection_s=0.3)
    outcome = simulate(poisson(120, 8.0, 5), scheduler_config("sbs"), spec)
    again = [record for record in outcome.requests if record.attempts > 1]
    assert again and outcome.retries == sum(record.attempts - 1 for record in again)
    for record in again:
        assert record.excluded == ("p1",)
        assert record.prefill is not None and record.prefill[0] != "p1"
    assert max(p.end_s for p in outcome.passes if p.instance == "p1") <= 4.0
    late = {r.prefill[0] for r in outcome.requests if r.arrived_s > 4.4 and r.prefill is not None}
    assert late == {"p0", "p2"}


def test_a_drain_ends_what_is_there_and_takes_nothing_new():
    spec = spec_with(changes=(TopologyChange(4.0, "drain", "p1"), TopologyChange(6, "up", "p1")))
    outcome = simulate(poisson(120, 8.0, 5), scheduler_config("sbs"), spec)
    assert outcome.retries == 0
    sent = [r.dispatched_s for r in outcome.requests if r.prefill is not None and "p1" in r.prefill]
    assert any(at_s < 4 for at_s in sent) and any(at_s > 6 for at_s in sent)
    assert not any(4 < at_s < 6 for at_s in sent)
    assert any(p.start_s < 4 < p.end_s for p in outcome.passes if p.instance == "p1")


def test_an_instance_whose_first_change_is_up_joins_then():
    spec = spec_with(changes=(TopologyChange(3.0, "up", "p2"),))
    outcome = simulate(poisson(150, 8.0, 5), scheduler_config("sbs"), spec)
    first = min(p.start_s for p in outcome.passes if p.instance == "p2")
    assert 3 < first < 4
    assert outcome.retries == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([(1, "down", "p9")], "1:down:p9: no such instance; there are p0, p1, p2"),
        ([(1, "down", "p0"), (2, "drain", "p0")], "after down comes up, not drain"),
        ([(1, "drain", "p0"), (2, "drain", "p0")], "after drain comes up or down, not drain"),
    ],
)
def test_an_impossible_script_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        spec_with(changes=tuple(TopologyChange(*change) for change in changes))


def test_the_time_an_instance_was_up_is_counted_within_the_window():
    changes = (
        TopologyChange(10, "up", "p1"),
        TopologyChange(30, "down", "p1"),
        TopologyChange(40, "up", "p1"),
        TopologyChange(50, "drain", "p0"),
    )
    spec = spec_with(changes=changes)
    assert [spec.up_s(name, 20, 60) for name in ("p0", "p1", "p2")] == [30, 30, 40]
    assert spec.up_s("p1", 0, 20) == 10
    assert spec.up_s("p1", 31, 39) == 0


def test_the_scheduler_receives_wrong_lengths_and_the_engine_computes_the_true_ones():
    arrivals = poisson(100, 10.0, 2)
    outcome = simulate(arrivals, scheduler_config("sbs"), spec_with(length_error=0.3))
    shares = [
        r.submitted_tokens / r.prompt_tokens for r in outcome.requests if r.prompt_tokens > 200
    ]
    assert 0.69 < min(shares) < 0.75 and 1.25 < max(shares) < 1.31
    assert statistics.fmean(shares) == pytest.approx(1, abs=0.03)
    assert sum(p.tokens for p in outcome.passes) == sum(tokens for _, tokens in arrivals)


def test_wrong_lengths_are_the_same_under_every_policy():
    submitted = [
        [
            r.submitted_tokens
            for r in simulate(
                poisson(60, 5.0, 2), scheduler_config(policy), spec_with(length_error=0.3)
            ).requests
        ]
        for policy in ("sbs", "random_rank")
    ]
    assert submitted[0] == submitted[1]


def test_late_messages_overtake_those_of_other_ranks_and_never_their_own():
    channel = FeedbackChannel(spec_with(endforward_delay_s=0.05))
    sent = [(0.02 * step, rank) for step in range(500) for rank in range(4)]
    arrived = [(channel.arrivals_s("p0", rank, at_s)[0], at_s, rank) for at_s, rank in sent]
    assert statistics.fmean(at - sent_s for at, sent_s, _ in arrived) > 0.05
    assert any(later[0] < earlier[0] for earlier, later in pairwise(arrived))
    for rank in range(4):
        mine = [at for at, _, of in arrived if of == rank]
        assert mine == sorted(mine)


@pytest.mark.parametrize(
    ("knobs", "low", "high"),
    [
        ({}, 1.0, 1.0),
        ({"endforward_loss": 0.25}, 0.70, 0.80),
        ({"endforward_loss": 1.0}, 0.0, 0.0),
        ({"endforward_duplicates": 0.25}, 1.20, 1.30),
    ],
)
def test_messages_arrive_as_often_as_asked(knobs, low, high):
    channel = FeedbackChannel(spec_with(**knobs))
    arrived = [len(channel.arrivals_s("p0", 0, 0.1 * step)) for step in range(2000)]
    assert low <= statistics.fmean(arrived) <= high


def test_a_faster_instance_takes_more_and_its_passes_are_shorter():
    shapes = (InstanceSpec(speed=2.0), InstanceSpec(speed=0.5))
    outcome = simulate(poisson(120, 20.0, 6), scheduler_config("eta"), spec_with(instances=shapes))
    tokens, seconds = {}, {}
    for a_pass in outcome.passes:
        tokens[a_pass.instance] = tokens.get(a_pass.instance, 0) + a_pass.tokens
        seconds[a_pass.instance] = seconds.get(a_pass.instance, 0) + a_pass.end_s - a_pass.start_s
    assert tokens["p0"] > 2 * tokens["p1"]
    assert seconds["p0"] / tokens["p0"] < 0.5 * seconds["p1"] / tokens["p1"]


@pytest.mark.parametrize("policy", [name for name, c in POLICY_CONFIGS.items() if c])
def test_decode_room_is_waited_for_in_the_router_by_policies_that_hold(policy, monkeypatch):
    """32 ranks x 4000 tokens are less than the requests of a second want."""
    waiting = []

    class Watched(simulation.Scheduler):
        def handle(self, event, now_s):
            commands = super().handle(event, now_s)
            waiting.append(len(self.queue))
            return commands

    monkeypatch.setattr(simulation, "Scheduler", Watched)
    spec = spec_with(decode_kv_capacity_tokens=4000)
    outcome = simulate(poisson(110, 8.0, 7), scheduler_config(policy), spec)
    assert all(record.ends == 1 and record.ttft_s > 0 for record in outcome.requests)
    if policy.startswith("sbs"):
        assert outcome.bootstrap_waits == 0
        assert max(waiting) > 50
    else:
        assert outcome.bootstrap_waits > 50
        assert max(waiting) <= 1


@pytest.mark.parametrize("policy", ["sbs", "eta"])
def test_engines_that_compile_in_their_first_pass_are_soon_served_as_any_other(policy):
    """A few requests come at first, and the load when the first passes are over."""
    arrivals = [arrival for arrival in poisson(100, 30.0, 3) if arrival[0] < 0.1 or arrival[0] > 14]

    def ttft_s(first_pass_s: float) -> float:
        spec = ClusterSpec(cost=MIXED, first_pass_s=first_pass_s, seed=4)
        outcome = simulate(arrivals, scheduler_config(policy), spec)
        slowest_s = max(a_pass.end_s - a_pass.start_s for a_pass in outcome.passes)
        assert (slowest_s > 10) == (first_pass_s > 0)
        return statistics.fmean(
            request.ttft_s for request in outcome.requests if request.arrived_s > 14
        )

    assert ttft_s(10.0) == pytest.approx(ttft_s(0.0), rel=0.05)
