"""KV transfer to decode, and decode ranks that keep what was sent to them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_sbs.simulator import ClusterSpec, PassCost, simulate
from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.experiments.sweep import Job, run_job, scheduler_config

PASS_S = 0.1
TOKEN_S = 1e-3
SPEC = {
    "cost": PassCost(fixed_s=PASS_S),
    "prefill_instances": 1,
    "dp_size": 1,
    "chunk_tokens": 100,
    "block_tokens": 10,
    "decode_dp_size": 4,
    "decode_s": 0.5,
    "decode_token_s": 1e-3,
    "dispatch_latency_s": 0.0,
    "feedback_latency_s": 0.0,
    "transfer_token_s": TOKEN_S,
}


def turns(count: int, *, grows: int = 0) -> list[Arrival]:
    """Turns of one conversation of 65 tokens, each longer than its answer is known."""
    out = []
    for number in range(count):
        prompt, answer = 65 + number * grows, 20
        names = tuple(range((prompt + answer) // 10))
        full = prompt // 10
        out.append(
            Arrival(2.0 * number, prompt, answer, names[:full], "s", answer_blocks=names[full:])
        )
    return out


def served(arrivals: list[Arrival], **spec):
    config = scheduler_config("sbs")
    outcome = simulate(arrivals, config, ClusterSpec(**{**SPEC, **spec}))
    assert all(request.ends == 1 for request in outcome.requests)
    return outcome.requests


def test_the_first_token_comes_when_all_kv_is_at_decode() -> None:
    at_once = served(turns(1), transfer_token_s=0.0)
    sent = served(turns(1))
    assert sent[0].ttft_s == pytest.approx(at_once[0].ttft_s + 65 * TOKEN_S)


def test_what_prefill_had_is_sent_while_the_rest_is_computed() -> None:
    _, second = served(turns(2))
    assert second.cached_tokens == 60
    # 60 ms of the pass's 100.
    assert second.ttft_s == pytest.approx(PASS_S + 5 * TOKEN_S)
    _, slow = served(turns(2), transfer_token_s=2e-3)
    assert slow.ttft_s == pytest.approx(65 * 2e-3)


def test_prompts_of_one_rank_are_sent_one_after_the_other() -> None:
    both = [Arrival(0.0, 50, 1), Arrival(0.0, 50, 1)]
    first, second = served(both, block_tokens=0, transfer_token_s=5e-3)
    assert first.ttft_s == pytest.approx(PASS_S + 50 * 5e-3)
    assert second.ttft_s == pytest.approx(PASS_S + 100 * 5e-3)  # its pass has ended long before


@pytest.mark.parametrize("source", ["events", "approximate"])
def test_a_decode_rank_is_sent_only_what_it_does_not_have(source: str) -> None:
    requests = served(turns(4, grows=30), decode_cache="seen", prefix_source=source)
    assert len({request.decode for request in requests}) == 1
    # Of the prompt and answer before, but for the answer's last token, in full blocks.
    assert [request.decode_cached_tokens for request in requests] == [0, 80, 110, 140]
    unseen = served(turns(4, grows=30), decode_cache="unseen", prefix_source=source)
    assert len({request.decode for request in unseen}) == 4
    assert {request.decode_cached_tokens for request in unseen} == {0}
    off = served(turns(4, grows=30), prefix_source=source)
    assert [request.decode for request in off] == [request.decode for request in unseen]


def test_a_full_decode_cache_drops_what_was_used_longest_ago() -> None:
    other = [replace_names(turn, 1000) for turn in turns(1)]
    arrivals = [*turns(1), other[0], turns(2)[1]._replace(at_s=4.0)]
    spec = {"decode_cache": "seen", "decode_dp_size": 1}
    assert served(arrivals, **spec)[2].decode_cached_tokens == 60
    small = served(arrivals, decode_kv_capacity_tokens=90, **spec)
    assert small[2].decode_cached_tokens == 0


def replace_names(arrival: Arrival, by: int) -> Arrival:
    blocks, answer = arrival.blocks, arrival.answer_blocks
    return arrival._replace(
        at_s=2.0,
        blocks=tuple(name + by for name in blocks),
        answer_blocks=tuple(name + by for name in answer),
    )


def test_agents_are_sent_less_where_the_scheduler_sees_what_decode_has() -> None:
    spec = {"decode_dp_size": 8, "decode_kv_capacity_tokens": 2_000_000, "transfer_token_s": 3e-6}
    job = Job("agentic", "sbs", 0.1, 0, 100.0, spec=spec)
    rows = {
        cache: run_job(replace(job, spec={**spec, "decode_cache": cache}))
        for cache in ("off", "unseen", "seen")
    }
    assert rows["off"]["sent_tokens"] > rows["unseen"]["sent_tokens"] > 0
    assert rows["seen"]["sent_tokens"] < 0.7 * rows["unseen"]["sent_tokens"]
    assert rows["seen"]["decode_kv_max_over_mean"] >= 1.0
