"""The online forward-time model."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_sbs.scheduling.paging import padded
from sglang_sbs.scheduling.prefill.forward_model import ForwardModel


def passes(rng: random.Random, n: int) -> list[list[int]]:
    return [[rng.randrange(1, 3000) for _ in range(8)] for _ in range(n)]


@pytest.mark.parametrize(("b_max", "b_mean"), [(8e-5, 0.0), (5e-5, 3e-5), (0.0, 8e-5)])
def test_the_model_learns_the_cost_of_imbalance(b_max: float, b_mean: float):
    rng = random.Random(3)
    model = ForwardModel(t_default_s=0.5, chunk_tokens=3072)

    def truth(tokens: list[int]) -> float:
        return 0.1 + b_max * max(tokens) + b_mean * sum(tokens) / 8

    for tokens in passes(rng, 200):
        model.observe(tokens, truth(tokens))
    for tokens in ([3000] * 8, [3000] + [10] * 7, [50] * 8):
        assert model.predict_s(tokens) == pytest.approx(truth(tokens), rel=0.05)


def test_a_pause_of_the_engine_does_not_spoil_the_model():
    rng = random.Random(4)
    model = ForwardModel(t_default_s=0.2, chunk_tokens=3072)
    for tokens in passes(rng, 60):
        model.observe(tokens, 0.1 + 5e-5 * max(tokens))
    expected = model.predict_s([1000] * 8)
    model.observe([1000] * 8, 30.0)
    for tokens in passes(rng, 20):
        model.observe(tokens, 0.1 + 5e-5 * max(tokens))
    assert model.predict_s([1000] * 8) == pytest.approx(expected, rel=0.25)


def full_chunks(tokens: list[int]) -> float:
    return 0.1 + 5e-5 * max(tokens) + 3e-5 * sum(tokens) / 8


@pytest.mark.parametrize("slow", [[30.0], [1.5, 30.0], [20.0, 8.0, 5.0]])
def test_first_passes_that_compile_kernels_are_forgotten_after_as_many_others(slow):
    rng = random.Random(6)
    model = ForwardModel(t_default_s=0.3, chunk_tokens=3072)
    for tokens, forward_s in zip(passes(rng, len(slow)), slow, strict=True):
        model.observe(tokens, forward_s)
    for tokens in passes(rng, len(slow) + 1):
        model.observe(tokens, full_chunks(tokens))
    for tokens in passes(rng, 20):
        assert model.predict_s(tokens) == pytest.approx(full_chunks(tokens), rel=0.25)
        model.observe(tokens, full_chunks(tokens))
    assert model.error_s < 0.03


def test_an_engine_far_slower_than_the_default_time_is_believed_with_its_second_pass():
    rng = random.Random(6)
    model = ForwardModel(t_default_s=0.03, chunk_tokens=3072)
    for tokens in passes(rng, 2):
        model.observe(tokens, 20 * full_chunks(tokens))
    for tokens in passes(rng, 10):
        assert model.predict_s(tokens) > 10 * full_chunks(tokens)
        model.observe(tokens, 20 * full_chunks(tokens))
    assert model.predict_s(tokens) == pytest.approx(20 * full_chunks(tokens), rel=0.2)


def test_a_first_long_prompt_is_no_outlier_if_the_next_one_takes_as_long():
    model = ForwardModel(t_default_s=0.03, chunk_tokens=3072)
    for _ in range(2):
        for tokens in ([60] * 8, [60] * 8, [3000] * 8):
            model.observe(tokens, tokens[0] * 1e-3)
    assert model.predict_s([3000] * 8) > 1.5


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("sigma", [0.0, 0.15])
def test_an_engine_that_changes_its_speed_for_good_is_followed_within_twenty_passes(factor, sigma):
    rng = random.Random(7)
    model = ForwardModel(t_default_s=0.3, chunk_tokens=3072)
    for tokens in passes(rng, 60):
        model.observe(tokens, full_chunks(tokens) * rng.lognormvariate(0, sigma))
    for tokens in passes(rng, 20):
        model.observe(tokens, factor * full_chunks(tokens) * rng.lognormvariate(0, sigma))
    usual = [1500] * 8
    assert model.predict_s(usual) == pytest.approx(factor * full_chunks(usual), rel=0.3)


def test_jitter_is_neither_an_outlier_nor_another_speed():
    rng = random.Random(8)
    model = ForwardModel(t_default_s=0.3, chunk_tokens=3072)
    usual = [1500] * 8
    for count, tokens in enumerate(passes(rng, 600)):
        model.observe(tokens, full_chunks(tokens) * rng.lognormvariate(0, 0.3))
        if count > 20:
            assert 0.6 < model.predict_s(usual) / full_chunks(usual) < 1.6


def test_a_change_of_speed_of_passes_without_tokens_is_followed_too():
    model = ForwardModel(t_default_s=0.3, chunk_tokens=1024)
    for forward_s in [1e-3] * 40 + [1.0] * 40:
        model.observe([0, 0], forward_s)
    assert model.predict_s([0, 0]) == pytest.approx(1.0, rel=0.2)


@given(st.lists(st.tuples(st.integers(0, 4000), st.floats(1e-4, 20.0)), max_size=60))
def test_any_history_gives_a_positive_prediction_that_does_not_fall_with_load(history):
    model = ForwardModel(t_default_s=0.3, chunk_tokens=1024)
    for tokens, forward_s in history:
        model.observe([tokens, tokens // 2], forward_s)
    assert (
        0 < model.predict_s([0, 0]) <= model.predict_s([1024, 512]) <= model.predict_s([4096] * 2)
    )


@pytest.mark.parametrize(("tokens", "pairs"), [(2**40, 0.0), (3000, 2.0**70), (2**40, 2.0**70)])
def test_implausibly_large_passes_leave_the_model_defined(tokens: int, pairs: float):
    model = ForwardModel(t_default_s=0.2, chunk_tokens=3072)
    for _ in range(30):
        model.observe([tokens] * 8, 0.3, [pairs] * 8)
    for _ in range(300):
        model.observe([3000] * 8, 0.3, [0.0] * 8)
    assert model.predict_s([3000] * 8) == pytest.approx(0.3, rel=0.1)


def test_it_learns_what_the_context_of_long_prompts_costs():
    rng = random.Random(5)
    model = ForwardModel(t_default_s=0.5, chunk_tokens=16384)

    def truth(tokens: list[int], pairs: list[float]) -> float:
        slowest = max(5e-5 * n + 1.5e-9 * p for n, p in zip(tokens, pairs, strict=True))
        return 0.1 + slowest + 3e-5 * sum(tokens) / 8

    for _ in range(300):
        tokens = [rng.randrange(1, 16384) for _ in range(8)]
        pairs = [rng.choice([0.0, 0.0, 0.0, 1.0]) * rng.uniform(1e7, 1e9) for _ in range(8)]
        model.observe(tokens, truth(tokens, pairs), pairs)
    for tokens, pairs in (
        ([8000] * 8, [0.0] * 8),
        ([8000] * 8, [5e8] + [0.0] * 7),
        # The others wait for one rank: not for the tokens of one and the context of another.
        ([1000] + [16000] * 7, [5e8] + [0.0] * 7),
        ([1000] + [16000] * 7, [1e9] + [0.0] * 7),
    ):
        assert model.predict_s(tokens, pairs) == pytest.approx(truth(tokens, pairs), rel=0.05)
        slowest_s = max(map(model.formula.rank_s, tokens, pairs))
        assert model.formula.pass_s(sum(tokens) / 8, slowest_s) == pytest.approx(
            model.predict_s(tokens, pairs)
        )


@pytest.mark.parametrize(
    ("tokens", "computed"),
    [
        ([100, 300], [512, 512]),  # the smallest graph that holds the fullest, on every rank
        ([256, 255], [256, 256]),
        ([0, 300], [512, 512]),  # a rank without tokens computes a dummy request
        ([0, 50], [0, 50]),
        ([0, 0], [0, 0]),
        ([300, 1025], [300, 1025]),  # more than any graph
        ([50, 300], [50, 300]),  # of its own, a rank would be padded to more than twice as much
        ([300], [512]),
        ([100], [100]),
    ],
)
def test_a_pass_is_padded_to_a_captured_graph(tokens: list[int], computed: list[int]):
    captured = (128, 256, 512, 1024) if len(tokens) > 1 else (512, 1024)
    assert padded(tokens, captured) == computed
    assert padded(tokens, ()) == tokens


def test_steps_of_captured_graphs_are_predicted():
    """T = 0.1 s + 0.1 ms per token that the ranks compute, padding included."""
    captured = (512, 1024)
    aware, unaware = (ForwardModel(t_default_s=0.2, chunk_tokens=1024) for _ in range(2))
    aware.captured_tokens = captured
    rng = random.Random(3)
    for _ in range(200):
        tokens = [rng.randrange(300, 1024) for _ in range(2)]
        forward_s = 0.1 + 1e-4 * padded(tokens, captured)[0]
        aware.observe(tokens, forward_s)
        unaware.observe(tokens, forward_s)
    assert aware.predict_s([400, 500]) == pytest.approx(0.1 + 1e-4 * 512, rel=0.01)
    assert aware.predict_s([400, 520]) == pytest.approx(0.1 + 1e-4 * 1024, rel=0.01)
    assert aware.error_s < 0.2 * unaware.error_s
