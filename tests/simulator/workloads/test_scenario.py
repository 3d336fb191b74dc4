"""The meaning of load 1.0, and the refusal of an unknown scenario."""

from __future__ import annotations

from collections import Counter

import pytest
from simulator_fixtures import lengths, write_azure, write_mooncake, write_turns

from sglang_sbs.simulator.cluster.cost import COSTS, PassCost
from sglang_sbs.simulator.workloads.scenario import (
    ScenarioError,
    full_chunk_tokens_per_s,
    make_scenario,
)


@pytest.mark.parametrize(
    ("name", "qps", "chunk", "slo_s"), [("paper-3k", 57, 3072, 0.8), ("paper-5k", 70, 5120, 1.0)]
)
def test_load_one_is_the_papers_baseline_peak_per_instance(name, qps, chunk, slo_s):
    for instances in (1, 3, 6):
        scenario = make_scenario(name, prefill_instances=instances)
        assert scenario.nominal_qps == qps * instances
        assert (scenario.spec.chunk_tokens, scenario.slo_ttft_s) == (chunk, slo_s)


def test_keywords_change_the_cluster():
    scenario = make_scenario("paper-3k", cost=COSTS["barrier"], dp_size=4, chunk_tokens=999)
    assert (scenario.spec.dp_size, scenario.spec.chunk_tokens) == (4, 999)
    assert scenario.spec.cost == COSTS["barrier"]


@pytest.mark.parametrize(
    ("name", "write", "chunk"), [("t.jsonl", write_mooncake, 16384), ("t.csv", write_azure, 4096)]
)
def test_a_trace_at_load_one_fills_every_chunk(tmp_path, name, write, chunk):
    scenario = make_scenario(f"trace:{write(tmp_path / name, lengths(400))}")
    assert scenario.spec.chunk_tokens == chunk
    arrivals = scenario.at_load(1.0, 50.0, seed=3)
    tokens_per_s = sum(a.prompt_tokens for a in arrivals) / 50
    assert tokens_per_s == pytest.approx(full_chunk_tokens_per_s(scenario.spec), rel=0.1)
    assert scenario.trace_qps == pytest.approx(10, rel=0.2)


@pytest.mark.parametrize("name", ["paper-9k", "trace:", "paper-3k:x", ""])
def test_an_unknown_scenario_is_refused_with_the_known_ones(name):
    with pytest.raises(ScenarioError, match="paper-3k, paper-5k, paper-long"):
        make_scenario(name)


@pytest.mark.parametrize("load", [0.6, 1.0])
def test_prompts_of_one_length_bring_as_many_tokens_as_the_papers(load: float):
    paper = make_scenario("paper-3k").at_load(load, 200.0, seed=5)
    tokens = sum(a.prompt_tokens for a in paper)
    for length in (1, 1600, 2000, 9000):
        scenario = make_scenario(f"fixed:{length}")
        duration_s = 200.0 if length > 1 else 1.0
        arrivals = scenario.at_load(load, duration_s, seed=5)
        assert {a.prompt_tokens for a in arrivals} == {length}
        assert len(arrivals) * length / duration_s == pytest.approx(tokens / 200, rel=0.06)
        assert scenario.spec.chunk_tokens == 3072
    assert make_scenario("fixed:1600", burstiness=3.0).nominal_qps == pytest.approx(
        3 * 57 * 1000.5 / 1600
    )


def test_a_long_prompt_comes_on_top_of_the_short_ones_now_and_then():
    short = make_scenario("paper-3k").at_load(0.6, 60.0, seed=5)
    scenario = make_scenario("one-long")
    arrivals = scenario.at_load(0.6, 60.0, seed=5)
    long = [a for a in arrivals if a.prompt_tokens > 3001]
    assert [(a.at_s, a.prompt_tokens) for a in long] == [
        (at_s, 65536) for at_s in (7.5, 22.5, 37.5, 52.5)
    ]
    assert [a for a in arrivals if a not in long] == short
    assert arrivals == sorted(arrivals, key=lambda a: a.at_s)
    assert scenario.at_load(0.6, 60.0, seed=5) == arrivals


def test_few_prompts_are_long_and_a_load_of_one_is_full_chunks():
    scenario = make_scenario("few-long")
    arrivals = scenario.at_load(0.5, 60.0, seed=5)
    assert {a.prompt_tokens for a in arrivals} == {100, 100_000}
    assert sum(a.prompt_tokens > 100 for a in arrivals) / len(arrivals) == pytest.approx(0.004, 0.3)
    tokens_per_s = scenario.nominal_qps * (0.996 * 100 + 0.004 * 100_000)
    assert tokens_per_s == pytest.approx(full_chunk_tokens_per_s(scenario.spec))


def test_on_and_off_bring_the_same_requests_in_half_of_the_time():
    scenario = make_scenario("onoff")
    arrivals = scenario.at_load(1.0, 60.0, seed=5)
    steady = make_scenario("paper-3k").at_load(1.0, 60.0, seed=5)
    assert [a.prompt_tokens for a in arrivals] == [a.prompt_tokens for a in steady]
    assert all(a.at_s % 1.0 < 0.5 for a in arrivals)
    assert arrivals == sorted(arrivals, key=lambda a: a.at_s)
    assert 59 < arrivals[-1].at_s < 60
    with pytest.raises(ScenarioError, match="own bursts"):
        make_scenario("onoff", burstiness=2.0)


def test_a_day_rises_from_its_quiet_ends_to_noon():
    arrivals = make_scenario("day").at_load(0.65, 100.0, seed=5)
    rates = [
        sum(start <= a.at_s < start + 10 for a in arrivals) / 10 for start in range(0, 100, 10)
    ]
    loads = [rate / (57.0 * 3) for rate in rates]
    assert loads[0] == pytest.approx(0.23, abs=0.06) and loads[9] == pytest.approx(0.23, abs=0.06)
    assert loads[4] == pytest.approx(1.07, abs=0.08) and loads[5] == pytest.approx(1.07, abs=0.08)
    steady = make_scenario("paper-3k").at_load(0.65, 100.0, seed=5)
    assert [a.prompt_tokens for a in arrivals] == [a.prompt_tokens for a in steady]


@pytest.mark.parametrize("text", ["", "x", "0", "-5", "1.5", "1e3", "9" * 30, "1600:3"])
def test_a_length_that_is_none_is_refused(text: str):
    with pytest.raises(ScenarioError, match="write how many tokens every prompt has"):
        make_scenario(f"fixed:{text}")


def test_an_instance_that_differs_counts_what_its_full_chunks_are_worth():
    equal = make_scenario("paper-3k", instances=[{}, {}])
    assert equal.nominal_qps == pytest.approx(2 * 57)
    uneven = make_scenario("paper-3k", instances=[{}, {"dp_size": 4}, {"speed": 0.5}], dp_size=8)
    assert uneven.nominal_qps == pytest.approx(2 * 57)
    assert [spec.dp_size for _, spec in uneven.spec.prefill] == [8, 4, 8]


def test_bursts_come_at_the_same_rate():
    calm, bursty = (
        make_scenario("paper-3k", burstiness=cv).at_load(1.0, 100.0, seed=2) for cv in (1.0, 4.0)
    )
    assert len(bursty) == pytest.approx(len(calm), rel=0.1)

    def most_in_a_second(arrivals):
        return max(Counter(int(a.at_s) for a in arrivals).values())

    assert most_in_a_second(bursty) > 1.3 * most_in_a_second(calm)


def test_a_trace_has_its_own_bursts(tmp_path):
    trace = write_azure(tmp_path / "t.csv", lengths(50))
    with pytest.raises(ScenarioError, match="its own bursts"):
        make_scenario(f"trace:{trace}", burstiness=2.0)


def test_a_trace_with_hash_ids_has_caches_of_its_blocks(tmp_path):
    plain = make_scenario(f"trace:{write_mooncake(tmp_path / 'plain.jsonl', lengths(50))}")
    turns = make_scenario(f"trace:{write_turns(tmp_path / 'turns.jsonl', 3, 4)}")
    block_tokens = [
        scenario.spec.block_tokens
        for scenario in (plain, turns, make_scenario("sessions"), make_scenario("paper-3k"))
    ]
    assert block_tokens == [0, 512, 64, 0]


def test_load_one_of_uncached_tokens_is_what_a_clairvoyant_cache_leaves(tmp_path):
    """Attention is free here, so it is the rate of full chunks of uncached tokens."""
    cost = PassCost(fixed_s=0.1, mean_s=1e-4)
    name = f"trace:{write_turns(tmp_path / 't.jsonl', conversations=2, turns=3)}"
    scenario = make_scenario(name, cost=cost, load_counts="uncached")
    # A prompt has 3, 5 and 7 blocks and 100 tokens. The first one finds none, the other
    # conversation's first the common block, and each later one all blocks of the turn before it.
    uncached = 2 * (2 + 2 + 2) * 512 + 512 + 6 * 100
    assert scenario.nominal_qps == pytest.approx(
        full_chunk_tokens_per_s(scenario.spec) / (uncached / 6)
    )
    prompt = make_scenario(name, cost=cost)
    assert prompt.nominal_qps < scenario.nominal_qps
    attention = make_scenario(
        name, cost=PassCost(fixed_s=0.1, mean_s=1e-4, pair_s=1e-7), load_counts="uncached"
    )
    assert attention.nominal_qps < scenario.nominal_qps


def test_what_cannot_be_is_refused(tmp_path):
    trace = f"trace:{write_turns(tmp_path / 't.jsonl', 2, 3)}"
    with pytest.raises(ScenarioError, match="the longest prompt has 3684"):
        make_scenario(trace, kv_capacity_tokens=3683)
    with pytest.raises(ScenarioError, match="sessions have their own bursts"):
        make_scenario("sessions", burstiness=2.0)
    with pytest.raises(ScenarioError, match="nothing is cached there"):
        make_scenario("paper-5k", load_counts="uncached")
    with pytest.raises(ScenarioError, match="nothing is cached there"):
        make_scenario("fixed:1600", load_counts="uncached")


def test_the_papers_prompts_may_have_blocks_and_share_none():
    plain, named = (make_scenario("paper-3k", block_tokens=size) for size in (0, 64))
    without, arrivals = (scenario.at_load(0.3, 10.0, seed=1) for scenario in (plain, named))
    assert [a._replace(blocks=()) for a in arrivals] == without
    assert all(len(a.blocks) == a.prompt_tokens // 64 for a in arrivals)
    blocks = [block for a in arrivals for block in a.blocks]
    assert len(set(blocks)) == len(blocks)
    with pytest.raises(ScenarioError, match="--block-tokens 64: sessions has blocks of its own"):
        make_scenario("sessions", block_tokens=64)
