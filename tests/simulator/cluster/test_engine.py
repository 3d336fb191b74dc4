"""The simulated engine against what SGLang does, step by step."""

from __future__ import annotations

import random

import msgspec
import pytest

from sglang_sbs.scheduling import SchedulerConfig
from sglang_sbs.simulator import ClusterSpec, PassCost, simulate
from sglang_sbs.simulator.cluster.engine import SimulatedPrefill

COST = PassCost(fixed_s=0.1, max_s=1e-3)
"""A pass of n tokens on its fullest rank takes 100 ms + n ms."""


def engine(**more) -> SimulatedPrefill:
    settings = {"dp_size": 2, "chunk_tokens": 100, "overlap": True, **more}
    spec = ClusterSpec(cost=COST, **settings)
    return SimulatedPrefill(*spec.prefill[0], spec, rng=random.Random(0))


def iterate(prefill: SimulatedPrefill, now_s: float):
    """One iteration of the event loop: (launched pass, pass it waits for, messages)."""
    launched, messages = prefill.step(now_s)
    return launched, prefill.waits_for(launched), messages


def rids(device_pass) -> list[str]:
    """Requests whose prompt ends in the pass."""
    return [request.rid for request in device_pass.completed]


def test_an_idle_engine_launches_on_the_first_request_and_the_rest_of_the_gang_waits():
    prefill = engine()
    prefill.deliver("a", 0, 30)
    first, waits_for, _ = iterate(prefill, 1.0)
    assert first.tokens == [30, 0] and waits_for is None
    assert iterate(prefill, 1.0)[1] is first  # nothing left over: it waits for the pass
    prefill.deliver("b", 0, 40)
    prefill.deliver("c", 1, 50)
    prefill.finish()
    second, _, _ = iterate(prefill, first.end_s + 0.02)
    assert second.tokens == [40, 50]
    assert second.start_s == pytest.approx(first.end_s + 0.02)


def test_without_a_barrier_a_rank_waits_for_no_other_and_an_idle_one_makes_no_pass():
    """The long prompt takes 1 s in ten passes of its rank, the short one runs beside it."""
    spec = ClusterSpec(
        cost=PassCost(fixed_s=0.0, max_s=1e-3),
        **{"prefill_instances": 1, "dp_size": 3, "chunk_tokens": 100},
        dispatch_latency_s=0.0,
    )
    ttfts_s, passes = {}, {}
    for barrier in (True, False):
        ran = msgspec.structs.replace(spec, barrier=barrier)
        config = SchedulerConfig(policy="least_tokens")
        outcome = simulate([(0.0, 1000), (0.05, 60)], config, ran)
        ttfts_s[barrier] = [round(r.ttft_s, 6) for r in outcome.requests]
        passes[barrier] = len(outcome.passes)
    assert ttfts_s == {True: [1.0, 0.15], False: [1.0, 0.06]}
    assert passes == {True: 10, False: 11}


def test_a_gang_sent_during_a_pass_runs_in_one():
    prefill = engine()
    prefill.deliver("a", 0, 30)
    first, *_ = iterate(prefill, 0.0)
    iterate(prefill, 0.0)
    for number in range(4):
        prefill.deliver(f"g{number}", number % 2, 50)
    prefill.finish()
    second, *_ = iterate(prefill, first.end_s)
    assert second.tokens == [100, 100]
    assert sorted(rids(second)) == ["g0", "g1", "g2", "g3"]


def test_overlap_queues_what_is_left_over_without_a_gap_and_later_ones_wait_for_the_next():
    prefill = engine()
    prefill.deliver("a", 0, 130)
    first, *_ = iterate(prefill, 0.0)
    second, waits_for, messages = iterate(prefill, 0.0)
    assert (first.tokens, second.tokens) == ([100, 0], [30, 0])
    assert second.start_s == first.end_s and waits_for is first
    assert [m.inflight_passes for m in messages] == [1, 1]
    assert messages[0].inflight_tokens == 100
    prefill.deliver("b", 1, 90)
    _, messages = prefill.finish()
    assert (messages[0].inflight_passes, messages[0].inflight_tokens) == (1, 30)
    third, waits_for, _ = iterate(prefill, first.end_s + 0.02)
    assert third.tokens == [0, 90] and waits_for is second
    assert third.start_s == second.end_s


def test_without_overlap_a_pass_takes_all_that_waits_when_the_one_before_ends():
    prefill = engine(overlap=False)
    prefill.deliver("a", 0, 130)
    first, waits_for, _ = iterate(prefill, 0.0)
    assert waits_for is first
    prefill.deliver("b", 1, 90)
    prefill.finish()
    second, *_ = iterate(prefill, first.end_s)
    assert second.tokens == [30, 90]


def test_a_request_that_does_not_fit_is_cut_at_a_page_and_its_rest_goes_first():
    prefill = engine(dp_size=1, chunk_tokens=64, page_size=16)
    prefill.deliver("a", 0, 20)  # charged 32
    prefill.deliver("b", 0, 50)  # cut to 32
    prefill.deliver("c", 0, 10)
    first, _, messages = iterate(prefill, 0.0)
    assert first.tokens == [52] and rids(first) == ["a"]
    assert (messages[0].chunk_remainder_tokens, messages[0].waiting_tokens) == (18, 10)
    second, *_ = iterate(prefill, 0.0)
    assert second.tokens == [28] and rids(second) == ["b", "c"]


def test_a_pass_takes_so_many_requests_the_rest_of_a_cut_one_counted():
    prefill = engine(dp_size=1, chunk_tokens=64, prefill_max_requests=2)
    for rid, tokens in (("a", 10), ("b", 60), ("c", 5), ("d", 5)):
        prefill.deliver(rid, 0, tokens)
    first, second, third = (iterate(prefill, 0.0)[0] for _ in range(3))
    assert (first.tokens, first.requests, rids(first)) == ([64], [2], ["a"])
    assert (second.tokens, rids(second)) == ([11], ["b", "c"]), "b is cut, and one of the two"
    assert rids(third) == ["d"]


def test_a_pass_takes_the_time_of_the_graph_that_it_is_padded_to():
    def forward_s(tokens: int, captured: tuple[int, ...]) -> float:
        prefill = engine(dp_size=1, captured_tokens=captured)
        prefill.deliver("a", 0, tokens)
        launched = iterate(prefill, 0.0)[0]
        assert launched.tokens == [tokens], "of which it tells"
        return launched.end_s - launched.start_s

    assert forward_s(50, (64, 90)) == forward_s(64, ()) > forward_s(50, ())
    assert forward_s(95, (64, 90)) == forward_s(95, ())


def test_nothing_is_added_to_less_than_a_page():
    prefill = engine(dp_size=1, chunk_tokens=40, page_size=16)
    prefill.deliver("a", 0, 30)  # charged 32: 8 tokens of the chunk are left
    prefill.deliver("b", 0, 9)
    assert iterate(prefill, 0.0)[0].tokens == [30]


def test_a_request_in_the_handshake_is_accepted_and_not_run():
    prefill = engine()
    prefill.deliver("a", 0, 30, handshaken=False)
    launched, _, messages = iterate(prefill, 0.0)
    assert launched is None
    assert (messages[0].kind, messages[0].rids) == ("heartbeat", ["a"])
    assert (messages[0].bootstrapping_requests, messages[0].bootstrapping_tokens) == (1, 30)
    prefill.handshaken("a", 0)
    launched, _, messages = iterate(prefill, 0.1)
    assert launched.tokens == [30, 0]
    assert messages[0].bootstrapping_requests == 0


def test_every_message_accounts_for_all_accepted_tokens():
    rng = random.Random(5)
    prefill = engine(page_size=4)
    now_s, delivered = 0.0, 0
    for number in range(200):
        for _ in range(rng.randrange(4)):
            delivered += 1
            prefill.deliver(
                f"r{delivered}", rng.randrange(2), rng.randrange(1, 150), handshaken=True
            )
        _, waits_for, messages = iterate(prefill, now_s)
        if waits_for is not None:
            now_s = waits_for.end_s
            messages += prefill.finish()[1]
        for message in messages:
            launching = message.extend_tokens if message.kind == "launch" else 0
            assert (
                message.accepted_tokens
                == (message.computed_tokens + message.inflight_tokens + launching)
                + message.queued_tokens
            ), number
        now_s += 0.001


ROUND_ROBIN = SchedulerConfig(policy="round_robin", n_limit=10**6)


def test_the_cluster_spends_the_launch_gap_and_the_first_token_delay():
    spec = ClusterSpec(
        cost=COST,
        prefill_instances=1,
        dp_size=1,
        chunk_tokens=100,
        overlap=True,
        dispatch_latency_s=0.01,
        launch_gap_s=0.03,
        prepare_s=0.005,
        first_token_s=0.04,
    )
    outcome = simulate([(0.0, 50), (0.1, 60)], ROUND_ROBIN, spec)
    first, second = outcome.requests
    # Dispatch 10 ms, preparing 5 ms, a pass of 150 ms.
    assert first.ttft_s == pytest.approx(0.165 + 0.04)
    assert second.prefilled_s == pytest.approx(0.165 + 0.03 + 0.16 + 0.04)


def test_a_prompt_waits_for_kv_on_decode():
    spec = ClusterSpec(
        cost=COST,
        prefill_instances=1,
        dp_size=1,
        chunk_tokens=100,
        decode_dp_size=1,
        decode_kv_capacity_tokens=100,
        output_tokens=20,
        dispatch_latency_s=0.0,
        feedback_latency_s=0.0,
        decode_s=2.0,
    )
    outcome = simulate([(0.0, 80), (0.01, 80)], ROUND_ROBIN, spec)
    first, second = outcome.requests
    assert first.prefilled_s == pytest.approx(0.18)
    assert second.prefilled_s == pytest.approx(0.18 + 2.0 + 0.18)
