"""Attention pairs of what a rank computes next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_sbs.scheduling.prefill.rank import PromptProgress, SentPrompt


def progress(*prompts: int) -> PromptProgress:
    rank = PromptProgress()
    for index, tokens in enumerate(prompts):
        rank.add(f"r{index}", tokens)
    return rank


def test_later_chunks_of_a_long_prompt_cost_more():
    rank = progress(3000)
    costs = [rank.compute(1000) for _ in range(3)]
    assert costs == [500_000, 1_500_000, 2_500_000]
    assert rank.compute(1000) == 0


def test_many_short_prompts_cost_less_than_a_long_one():
    assert progress(*[100] * 10).pairs(1000) == 10 * 100 * 50
    assert progress(1000).pairs(1000) == 1000 * 500


class LookedAt(dict[str, SentPrompt]):
    """How many prompts were looked at."""

    count = 0

    def values(self):
        for one in super().values():
            self.count += 1
            yield one


def test_a_pass_looks_at_no_more_prompts_than_it_takes():
    rank = progress(*[100] * 1000)
    rank._prompts = looked_at = LookedAt(rank._prompts)
    assert rank.compute(250) == 2 * 100 * 50 + 50 * 25
    assert looked_at.count == 3
    assert len(looked_at) == 998


def test_what_is_dropped_is_not_computed():
    rank = progress(1000, 10)
    rank.compute(500)
    rank.drop("r0")
    rank.drop("never")
    assert rank.pairs(1000) == 10 * 5
    rank.clear()
    assert rank.pairs(1000) == 0


@given(
    prompts=st.lists(st.integers(1, 5000), max_size=12),
    chunks=st.lists(st.integers(0, 3000), max_size=20),
)
def test_however_it_is_cut_the_pairs_of_all_prompts_are_the_same(prompts, chunks):
    rank = progress(*prompts)
    total = 0.0
    for tokens in chunks:
        expected = rank.pairs(tokens)
        assert rank.compute(tokens) == expected
        total += expected
    total += rank.compute(sum(prompts))
    assert total == pytest.approx(sum(tokens**2 / 2 for tokens in prompts))
