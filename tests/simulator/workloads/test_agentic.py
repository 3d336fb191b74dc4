"""Agents in a closed loop have the shape they are named for."""

from __future__ import annotations

import heapq
from statistics import fmean

from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.workloads.agentic import LONGEST_TOKENS, PAGE_TOKENS, AgentLoop

ANSWER_S = 18.0


def played(loop: AgentLoop) -> list[tuple[Arrival, float]]:
    """Every request, and when the answer came after which it was sent."""
    heap = [(arrival.at_s, number, arrival, 0.0) for number, arrival in enumerate(loop.first)]
    heapq.heapify(heap)
    out = []
    while heap:
        at_s, _, arrival, since_s = heapq.heappop(heap)
        out.append((arrival, since_s))
        for turn in loop.after(arrival, at_s + ANSWER_S):
            heapq.heappush(heap, (turn.at_s, len(out) * 1000 + len(heap), turn, at_s + ANSWER_S))
    return out


def test_prompts_are_long_and_mostly_what_was_sent_before() -> None:
    loop = AgentLoop(60, 900.0, seed=3)
    arrivals = [arrival for arrival, _ in played(loop)]
    known = set(loop.history)
    hits = []
    for arrival in arrivals:
        hit = next((i for i, b in enumerate(arrival.blocks) if b not in known), len(arrival.blocks))
        known.update(arrival.blocks)
        hits.append(hit * PAGE_TOKENS)
    assert 110_000 < fmean(a.prompt_tokens for a in arrivals) < 150_000
    assert 700 < fmean(a.output_tokens for a in arrivals) < 1000
    assert 0.93 < sum(hits) / sum(a.prompt_tokens for a in arrivals) < 0.96
    assert max(a.prompt_tokens for a in arrivals) <= LONGEST_TOKENS
    assert 0.01 < sum(hit == 0 for hit in hits) / len(hits) < 0.06, "first turns share nothing"


def test_nobody_sends_before_an_answer_or_pauses_for_long() -> None:
    sent = played(AgentLoop(30, 400.0, seed=4))
    pauses = [arrival.at_s - since_s for arrival, since_s in sent if since_s]
    assert min(pauses) >= 0
    assert 5.0 < max(pauses) <= 10.001
    assert max(arrival.at_s for arrival, _ in sent) <= 400.0


def test_sub_agents_begin_with_the_context_of_their_agent() -> None:
    sent = [arrival for arrival, _ in played(AgentLoop(30, 400.0, seed=5))]
    agent_of = {}
    shared = []
    for arrival in sent:
        first = agent_of.setdefault(arrival.session, arrival)
        if arrival.thread != first.thread:
            shared.append(arrival.blocks[0] == first.blocks[0])
    assert len(shared) > 10
    assert all(shared)


def test_a_seed_says_it_all() -> None:
    first, same, other = (AgentLoop(5, 100.0, seed) for seed in (7, 7, 8))
    assert first.first == same.first != other.first
    assert played(first) == played(same)
