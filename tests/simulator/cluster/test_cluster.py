"""The simulated cluster drives the real scheduler: invariants over random clusters and loads."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_fixtures import poisson

from sglang_sbs.scheduling import Scheduler, SchedulerConfig, policy_names
from sglang_sbs.simulator import COSTS, ClusterSpec, simulate

specs = st.builds(
    ClusterSpec,
    cost=st.sampled_from(list(COSTS.values())),
    prefill_instances=st.integers(1, 4),
    dp_size=st.integers(1, 4),
    chunk_tokens=st.sampled_from([256, 1024, 3072]),
    decode_dp_size=st.integers(1, 4),
    dispatch_latency_s=st.sampled_from([0.0, 0.005, 0.05]),
    dispatch_jitter=st.sampled_from([0.0, 1.0]),
    gang_jitter=st.sampled_from([0.0, 0.5]),
    dispatch_serial_s=st.sampled_from([0.0, 0.002]),
    launch_gap_s=st.sampled_from([0.0, 0.02]),
    prepare_s=st.sampled_from([0.0, 0.01]),
    overlap=st.booleans(),
    barrier=st.booleans(),
    page_size=st.sampled_from([1, 64]),
    handshake_s=st.sampled_from([0.0, 0.01]),
    first_token_s=st.sampled_from([0.0, 0.05]),
    decode_kv_capacity_tokens=st.sampled_from([0, 20_000]),
    decode_max_running_requests=st.sampled_from([0, 16]),
    pass_jitter=st.sampled_from([0.0, 0.3]),
    endforward_loss=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 100),
)
configs = st.builds(
    SchedulerConfig,
    policy=st.sampled_from(policy_names()),
    trigger=st.sampled_from(["adaptive", "paper"]),
    decode_rule=st.sampled_from(["iqr", "potential"]),
    n_limit=st.sampled_from([3, 100]),
    max_queue_requests=st.sampled_from([5, 10_000]),
    default_timeout_s=st.sampled_from([0.5, 60.0]),
)


def check(scheduler: Scheduler, now_s: float) -> None:
    config = scheduler.config
    assert len(scheduler.queue) <= config.max_queue_requests
    assert scheduler.queue.tokens == sum(r.prompt_tokens for r in scheduler.queue)
    for request in scheduler.queue:
        assert request.deadline_s > now_s
        assert request.prefill is None
    for instance in scheduler.prefill.values():
        for rank in instance.ranks:
            assert rank.queued_tokens >= 0
            assert rank.flight.requests.keys() <= rank.requests.keys()


@settings(max_examples=60, deadline=None)
@given(spec=specs, config=configs, qps=st.floats(1, 60), seed=st.integers(0, 1000))
def test_every_request_ends_exactly_once_whatever_fails(spec, config, qps, seed):
    arrivals = poisson(qps, 6.0, seed)
    outcome = simulate(arrivals, config, spec, observe=check)
    assert len(outcome.requests) == len(arrivals)
    for record in outcome.requests:
        assert record.ends == 1, record
        assert (record.refused is None) == (record.prefill is not None)
    assert {r.refused for r in outcome.requests} <= {None, "queue_full", "deadline", "flow_control"}


@settings(max_examples=30, deadline=None)
@given(spec=specs, config=configs, seed=st.integers(0, 1000))
def test_the_same_events_give_the_same_decisions(spec, config, seed):
    arrivals = poisson(20, 3.0, seed)
    first, second = (simulate(arrivals, config, spec) for _ in range(2))
    assert first.requests == second.requests or repr(first.requests) == repr(second.requests)


@pytest.mark.parametrize("barrier", [True, False])
@pytest.mark.parametrize("trigger", ["adaptive", "paper"])
def test_the_ledger_is_empty_when_everything_is_over(trigger, barrier):
    seen: list[Scheduler] = []

    def keep(scheduler: Scheduler, _now_s: float) -> None:
        seen[:] = [scheduler]

    spec = ClusterSpec(cost=COSTS["mixed"], barrier=barrier)
    simulate(poisson(100, 10.0, 1), SchedulerConfig(trigger=trigger), spec, observe=keep)
    scheduler = seen[0]
    assert scheduler.in_flight_requests == 0
    assert len(scheduler.prefill) == 3 * (1 if barrier else spec.dp_size)
    for instance in scheduler.prefill.values():
        assert instance.idle
        assert instance.ranks.c_avail() == [spec.chunk_tokens] * (spec.dp_size if barrier else 1)
    for decode in scheduler.decode.values():
        assert [(load.running, load.committed_tokens) for load in decode.loads()] == [
            (0, 0)
        ] * spec.decode_dp_size


@pytest.mark.parametrize("trigger", ["adaptive", "paper"])
def test_with_every_report_the_ledger_matches_the_engine_at_each_launch(trigger):
    """C_avail as the scheduler sees it against what the engine holds, at zero latency."""
    spec = ClusterSpec(
        cost=COSTS["mixed"], dispatch_latency_s=0.0, feedback_latency_s=0.0, decode_s=0.1
    )
    backlog: list[int] = []

    def observe(scheduler: Scheduler, _now_s: float) -> None:
        backlog.append(sum(i.ranks.backlog_tokens for i in scheduler.prefill.values()))

    arrivals = poisson(150, 10.0, 2)
    outcome = simulate(arrivals, SchedulerConfig(trigger=trigger), spec, observe=observe)
    assert all(r.ends == 1 for r in outcome.requests)
    assert backlog[-1] == 0
    assert min(backlog) >= 0


def mean_ttft_s(policy: str, trigger: str, load: float, cost: str) -> float:
    config = SchedulerConfig(policy=policy, trigger=trigger, n_limit=10**6)
    spec = ClusterSpec(cost=COSTS[cost])
    outcome = simulate(poisson(load * 57 * 3, 40.0, 11), config, spec)
    return statistics.mean(r.ttft_s for r in outcome.requests if r.arrived_s > 10)


@pytest.mark.parametrize("cost", ["mixed", "table"])
def test_the_adaptive_trigger_beats_random_ranks_least_tokens_and_the_paper(cost):
    """Simulated time is deterministic, so this compares policies, not machines."""
    adaptive = mean_ttft_s("sbs", "adaptive", 1.0, cost)
    assert adaptive < 0.8 * mean_ttft_s("random_rank", "adaptive", 1.0, cost)
    assert adaptive < 0.9 * mean_ttft_s("least_tokens", "adaptive", 1.0, cost)
    assert adaptive < mean_ttft_s("sbs", "paper", 1.0, cost)
