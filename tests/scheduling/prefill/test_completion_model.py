"""The model of a pass and of its contents, checked against a second reading of SGLang."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_engine import PrefillEngine

from sglang_sbs.scheduling.prefill.completion import (
    Chunk,
    NextPass,
    PassFormula,
    RankPrompt,
    attention_pairs,
    cut,
)

FORMULA = PassFormula(fixed_s=0.1, mean_s=3e-5, token_s=7e-5, pair_s=1e-9)
LENGTHS = st.lists(st.integers(1, 900), min_size=1, max_size=12)


def passes_of(engine: PrefillEngine) -> list[tuple[list[int], list[str]]]:
    """Tokens per rank of each pass of a ground-truth engine, and the requests that it completes."""
    found = []
    while engine.has_work:
        engine.launch()
        tokens = list(engine.running or [])
        found.append((tokens, engine.finish()[0]))
    return found


@given(LENGTHS, st.sampled_from([1, 4, 16]), st.sampled_from([0, 1, 3]))
def test_a_chunk_holds_what_an_engine_puts_into_a_pass(
    lengths: list[int], page: int, most_requests: int
) -> None:
    engine = PrefillEngine("p0", 1, 256, page, most_requests)
    for number, tokens in enumerate(lengths):
        engine.accept(f"r{number}", 0, tokens)
    prompts = [RankPrompt(f"r{number}", tokens) for number, tokens in enumerate(lengths)]
    for [expected_tokens], completed in passes_of(engine):
        chunk = Chunk(256, page, most_requests)
        taken = chunk.fill(prompts)
        for prompt, part in taken:
            prompt.advance(part)
        assert chunk.tokens == expected_tokens
        assert chunk.requests == len(taken)
        assert [prompt.rid for prompt in prompts if not prompt.left_tokens] == completed
        prompts = [prompt for prompt in prompts if prompt.left_tokens]
    assert not prompts


@given(LENGTHS)
def test_one_prompt_over_all_passes_is_the_same_cut(lengths: list[int]) -> None:
    prompts = [RankPrompt(f"r{number}", tokens) for number, tokens in enumerate(lengths)]
    found: dict[str, list[tuple[int, int, float]]] = {prompt.rid: [] for prompt in prompts}
    index = 0
    while prompts:
        for prompt, part in Chunk(256).fill(prompts):
            pairs = attention_pairs(part, prompt.context_tokens)
            found[prompt.rid].append((index, part, pairs))
            prompt.advance(part)
        prompts = [prompt for prompt in prompts if prompt.left_tokens]
        index += 1
    ahead = 0
    for rid, tokens in zip(found, lengths, strict=True):
        assert list(cut(ahead, tokens, 0, 256)) == found[rid]
        ahead += tokens


def test_a_chunk_that_is_not_whole_pages_takes_no_part_of_a_page() -> None:
    chunk = Chunk(100, page=64)
    assert chunk.takes(200)
    assert [part for _, part in chunk.fill([RankPrompt("a", 200), RankPrompt("b", 10)])] == [64]
    assert not chunk.takes(200)
    assert chunk.takes(36), "the last page may be shorter"
    assert not chunk.takes(0)


def test_all_ranks_wait_for_the_slowest_one() -> None:
    assert FORMULA.of_ranks_s([1000, 0]) == pytest.approx(0.1 + 3e-5 * 500 + 7e-5 * 1000)
    assert FORMULA.of_ranks_s([1000, 800], [0.0, 1e8]) == pytest.approx(
        0.1 + 3e-5 * 900 + 7e-5 * 800 + 1e-9 * 1e8
    )
    assert FORMULA.balanced_s(1000) == pytest.approx(FORMULA.of_ranks_s([1000] * 4))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8))
def test_the_attention_of_a_prompt_does_not_depend_on_its_chunks(parts: list[int]) -> None:
    context, pairs = 0, 0.0
    for tokens in parts:
        pairs += attention_pairs(tokens, context)
        context += tokens
    assert pairs == attention_pairs(context, 0)


TOKENS_ONLY = PassFormula(fixed_s=0.1, mean_s=3e-5, token_s=7e-5, pair_s=0.0)
AHEAD = st.lists(st.integers(1, 700), max_size=3)


def seconds(engine: PrefillEngine, until: str) -> float:
    """Length of the passes of a ground-truth engine until a request is computed."""
    total_s = 0.0
    for tokens, completed in passes_of(engine):
        total_s += TOKENS_ONLY.of_ranks_s(tokens)
        if until in completed:
            break
    return total_s


@given(AHEAD, st.integers(1, 2000))
def test_a_request_is_done_when_an_engine_has_computed_it(ahead: list[int], tokens: int) -> None:
    engine = PrefillEngine("p0", 2, 256)
    for number, queued in enumerate(ahead):
        engine.accept(f"ahead {number}", 0, queued)
    engine.accept("r", 0, tokens)
    there = NextPass(TOKENS_ONLY, 256, [sum(ahead), 0])
    assert there.done_s(0, tokens) == pytest.approx(seconds(engine, "r"))
    filled = [min(256, sum(ahead) + tokens), 0]
    assert there.with_s(0, tokens) == pytest.approx(TOKENS_ONLY.of_ranks_s(filled))
    before_s = there.length_s
    there.add(0, tokens)
    assert there.ahead_tokens == [sum(ahead) + tokens, 0]
    assert there.emptiest == 1
    assert there.length_s == before_s


def test_other_ranks_make_the_pass_of_a_request_longer() -> None:
    there = NextPass(FORMULA, 1000, [0, 800])
    assert there.done_s(0, 100) == pytest.approx(FORMULA.of_ranks_s([0, 800]))
    assert there.with_s(0, 900) == pytest.approx(FORMULA.of_ranks_s([900, 800], [900**2 / 2, 0.0]))
    assert there.done_s(0, 900) == pytest.approx(there.with_s(0, 900))


def test_the_length_of_the_next_pass_may_be_known_better() -> None:
    there = NextPass(FORMULA, 1000, [0, 800], length_s=3.0)
    assert there.done_s(0, 100) == there.with_s(0, 100) == 3.0


def test_a_cached_prefix_costs_only_attention() -> None:
    there = NextPass(FORMULA, 1000, [0, 0])
    expected_s = FORMULA.of_ranks_s([500, 0], [attention_pairs(500, 8000), 0.0])
    assert there.done_s(0, 500, 8000) == pytest.approx(expected_s)
