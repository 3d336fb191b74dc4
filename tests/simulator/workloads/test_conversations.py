"""The synthetic conversations: what a turn shares with others."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest

from sglang_sbs.simulator.workloads.conversations import LONGEST_TOKENS, PAGE_TOKENS, conversations


def turns_by_session(seed: int = 3):
    turns = sorted(conversations(20.0, 120.0, seed), key=lambda turn: (turn.session, turn.at_s))
    return [list(mine) for _, mine in groupby(turns, key=lambda turn: turn.session)]


def test_every_turn_begins_with_all_of_the_turn_before_it():
    longer = 0
    for turns in turns_by_session():
        for before, after in pairwise(turns):
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert after.blocks[: len(before.blocks)] == before.blocks
            longer += 1
    assert longer > 500


def test_conversations_share_their_system_prompt_and_nothing_else():
    seen: dict[int, set[str]] = {}
    for turns in turns_by_session():
        for turn in turns:
            assert len(turn.blocks) == turn.prompt_tokens // PAGE_TOKENS
            assert turn.prompt_tokens <= LONGEST_TOKENS
            for depth, block in enumerate(turn.blocks):
                seen.setdefault(block, set()).add(turn.session)
                assert depth * PAGE_TOKENS < 4000 or len(seen[block]) == 1
    assert max(len(sessions) for sessions in seen.values()) > 50


def test_they_come_in_order_at_the_rate_that_was_asked_and_by_the_seed():
    arrivals = conversations(20.0, 400.0, 1)
    assert arrivals == sorted(arrivals, key=lambda turn: turn.at_s)
    assert sum(turn.at_s >= 100 for turn in arrivals) / 300 == pytest.approx(20, rel=0.1)
    assert arrivals == conversations(20.0, 400.0, 1) != conversations(20.0, 400.0, 2)
