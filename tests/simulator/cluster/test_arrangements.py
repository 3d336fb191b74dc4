"""Pools by length, equal pools behind a balancer, decode instances that compute short prompts."""

from __future__ import annotations

import random

import msgspec
import pytest

from sglang_sbs.scheduling import SchedulerConfig
from sglang_sbs.simulator.cluster.arrangements import fair_threshold, simulate_arranged
from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.cluster.cost import COSTS
from sglang_sbs.simulator.cluster.outcome import Outcome
from sglang_sbs.simulator.cluster.spec import ClusterSpec, InstanceSpec
from sglang_sbs.simulator.experiments.sweep import pool_summary

SPEC = ClusterSpec(cost=COSTS["mixed"], dp_size=2, chunk_tokens=1000, decode_dp_size=4)


def arrivals(count: int = 120) -> list[Arrival]:
    rng = random.Random(3)
    return [Arrival(0.02 * number, rng.randint(10, 900), 8) for number in range(count)]


def test_both_pools_have_as_much_to_compute_per_instance() -> None:
    lengths = [arrival.prompt_tokens for arrival in arrivals(3000)]
    threshold = fair_threshold(lengths, 2, [InstanceSpec()] * 3)
    short = sum(tokens for tokens in lengths if tokens <= threshold)
    assert short / sum(lengths) == pytest.approx(2 / 3, abs=0.01)


def test_in_pools_a_prompt_goes_where_its_length_says_and_all_are_answered() -> None:
    spec = msgspec.structs.replace(SPEC, short_pool=2)
    sent = arrivals()
    outcome = simulate_arranged(sent, SchedulerConfig(policy="eta"), spec, drain_s=60.0)
    assert [request.index for request in outcome.requests] == list(range(len(sent)))
    assert list(outcome.arrivals) == sent
    assert all(request.ends == 1 and request.ttft_s > 0 for request in outcome.requests)
    assert [arrival.prompt_tokens for arrival in outcome.requests] == [
        arrival.prompt_tokens for arrival in sent
    ]
    longest_short = fair_threshold([a.prompt_tokens for a in sent], 2, [InstanceSpec()] * 3)
    by_instance: dict[str, int] = {}
    for a_pass in outcome.passes:
        by_instance[a_pass.instance] = by_instance.get(a_pass.instance, 0) + a_pass.tokens
    long = sum(a.prompt_tokens for a in sent if a.prompt_tokens > longest_short)
    assert by_instance["p2"] == long
    assert set(by_instance) == {"p0", "p1", "p2"}


def test_decode_takes_short_prompts_only_and_only_with_the_flag() -> None:
    sent = [Arrival(0.0, tokens, 8) for tokens in (200, 900) * 40]
    config = SchedulerConfig(policy="eta")
    alone = simulate_arranged(sent, config, SPEC, drain_s=60.0)
    assert {a_pass.instance for a_pass in alone.passes} == {"p0", "p1", "p2"}
    spec = msgspec.structs.replace(SPEC, deflect_tokens=200)
    outcome = simulate_arranged(sent, config, spec, drain_s=60.0)
    taken = [
        request for request in outcome.requests if request.prefill and request.prefill[0] == "p3"
    ]
    assert taken and {request.prompt_tokens for request in taken} == {200}
    assert all(request.ends == 1 for request in outcome.requests)


def pooled(balance: str, sent: list[Arrival], pools: int = 2) -> Outcome:
    spec = msgspec.structs.replace(
        SPEC, prefill_instances=4, pools=pools, pool_balance=balance, seed=1
    )
    return simulate_arranged(sent, SchedulerConfig(policy="sbs"), spec, drain_s=60.0)


def of_pool(outcome: Outcome) -> list[int]:
    """Return the pool of each request in the order of arrivals: instances p0 and p1 are the first
    pool."""
    return [
        int(int(request.prefill[0][1:]) >= 2) for request in outcome.requests if request.prefill
    ]


@pytest.mark.parametrize("balance", ["least", "random", "session"])
def test_every_request_has_its_pool_and_is_answered_there(balance: str) -> None:
    sent = [arrival._replace(session=f"s{number % 7}") for number, arrival in enumerate(arrivals())]
    outcome = pooled(balance, sent)
    assert [request.index for request in outcome.requests] == list(range(len(sent)))
    assert all(request.ends == 1 and request.ttft_s > 0 for request in outcome.requests)
    pools = of_pool(outcome)
    assert [pool.requests for pool in outcome.pools] == [pools.count(0), pools.count(1)]
    assert {a_pass.instance for a_pass in outcome.passes} == {"p0", "p1", "p2", "p3"}
    assert all(len(pool.decisions_s) >= 3 * pool.requests for pool in outcome.pools)
    sessions = {(request.session, pool) for request, pool in zip(sent, pools, strict=True)}
    assert (len(sessions) == 7) == (balance == "session")


def test_a_pool_without_requests_is_no_division_by_zero() -> None:
    sent = [arrival._replace(session="s") for arrival in arrivals()]
    row = pool_summary(pooled("session", sent))
    assert row["pool_max_over_mean"] == 2
    assert row["decision_share"] > 0


def test_one_pool_is_the_whole_cluster() -> None:
    sent = arrivals()
    spec = msgspec.structs.replace(SPEC, prefill_instances=4, seed=1)
    whole = simulate_arranged(sent, SchedulerConfig(policy="sbs"), spec, drain_s=60.0)
    assert [request.ttft_s for request in pooled("least", sent, 1).requests] == [
        request.ttft_s for request in whole.requests
    ]
    assert whole.pools == []


def test_the_pool_with_the_fewest_requests_in_flight_is_next() -> None:
    """The first is long under way; each of the others ends before the next one comes."""
    spec = msgspec.structs.replace(SPEC, prefill_instances=2, pools=2, decode_s=0.0)
    sent = [Arrival(0.0, 60_000, 8), *(Arrival(1.0 + number, 10, 8) for number in range(6))]
    outcome = simulate_arranged(sent, SchedulerConfig(policy="eta"), spec, drain_s=60.0)
    assert outcome.requests[0].ttft_s > 7
    first, *others = (request.prefill for request in outcome.requests)
    assert first is not None
    assert {other[0] for other in others if other} == {"p0", "p1"} - {first[0]}
