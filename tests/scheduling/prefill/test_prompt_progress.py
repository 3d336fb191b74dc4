"""Attention pairs of what a rank computes next."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_sbs.scheduling import InstanceUp
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.prefill.rank import PrefillRank
from sglang_sbs.scheduling.prefill.requests import PrefillRequest

CHUNK = 1000


def progress(*prompts: int) -> PrefillRank:
    rank = PrefillRank()
    for index, tokens in enumerate(prompts):
        rank.add(f"r{index}", tokens, 0)
    return rank


def test_later_chunks_of_a_long_prompt_cost_more():
    rank = progress(3000)
    costs = [rank.compute(1000) for _ in range(3)]
    assert costs == [500_000, 1_500_000, 2_500_000]
    assert rank.compute(1000) == 0


def test_many_short_prompts_cost_less_than_a_long_one():
    assert progress(*[100] * 10).pairs(1000) == 10 * 100 * 50
    assert progress(1000).pairs(1000) == 1000 * 500


class LookedAt(dict[str, PrefillRequest]):
    """How many prompts were looked at."""

    count = 0

    def values(self):
        for value in super().values():
            self.count += 1
            yield value


def test_a_pass_looks_at_no_more_prompts_than_it_takes():
    rank = progress(*[100] * 1000)
    rank.prompts = looked_at = LookedAt(rank.prompts)
    assert rank.compute(250) == 2 * 100 * 50 + 50 * 25
    assert looked_at.count == 3
    assert len(looked_at) == 998


def test_what_is_dropped_is_not_computed():
    rank = progress(1000, 10)
    rank.compute(500)
    rank.gone("r0")
    rank.gone("never")
    assert rank.pairs(1000) == 10 * 5
    rank.prompts.clear()
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


@pytest.mark.parametrize("seed", range(4))
def test_the_next_pass_is_predicted_from_every_rank_whatever_was_kept_of_it(seed: int) -> None:
    rng = random.Random(seed)
    up = InstanceUp(instance="p0", role="prefill", dp_size=4, chunk_tokens=CHUNK)
    instance = PrefillInstance(up, t_default_s=0.1, default_chunk_tokens=CHUNK)
    sent: list[tuple[str, int]] = []
    for number in range(200):
        if sent and rng.random() < 0.4:
            instance.dropped(*sent.pop(rng.randrange(len(sent))))
        elif rng.random() < 0.03:
            size = rng.randint(1, 6)
            instance.resize(msgspec.structs.replace(up, dp_size=size))
            sent = [(rid, rank) for rid, rank in sent if rank < size]
        else:
            sent.append((f"{number}", rng.randrange(instance.dp_size)))
            instance.on_dispatched(*sent[-1], rng.randint(1, 3 * CHUNK), 0.01 * number)
        tokens = [rank.next_tokens(CHUNK) for rank in instance.ranks]
        pairs = [rank.pairs(mine) for rank, mine in zip(instance.ranks, tokens, strict=True)]
        assert instance.next_pass_s() == instance.model.predict_s(tokens, pairs)
