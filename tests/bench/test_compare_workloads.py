"""The load of `scripts/compare-routers`: arrivals, lengths, prompts."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.compare_routers.prompts import id_prompts, text_prompts
from benchmarks.compare_routers.workloads import WORKLOADS, arrivals
from tools.cpu_engine.tiny_model import cached_tiny_model


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_offered_load_is_exact_and_the_same_for_the_same_seed(name: str) -> None:
    def draw(seed: int, content: str) -> list[tuple[float, int, int]]:
        sent = arrivals(
            name,
            seed=seed,
            requests=120,
            tokens_per_s=5000.0,
            chunk_tokens=1024,
            prompts=id_prompts(),
            content=content,
        )
        drawn = WORKLOADS[name](seed, 120, 1024)
        counted = sum(arrival.prompt_tokens for arrival in drawn)
        assert sent[-1].at_s == pytest.approx(counted / 5000.0)
        assert [len(a.input_ids) for a in sent] == [arrival.prompt_tokens for arrival in drawn]
        assert [a.at_s for a in sent] == sorted(a.at_s for a in sent)
        return [(a.at_s, len(a.input_ids), a.max_new_tokens) for a in sent]

    assert draw(1, "a") == draw(1, "b") != draw(2, "a")


def test_other_content_has_no_common_beginning() -> None:
    first, second = (
        arrivals(
            "paper",
            seed=1,
            requests=50,
            tokens_per_s=1e4,
            chunk_tokens=1024,
            prompts=id_prompts(),
            content=content,
        )
        for content in ("sbs", "peer")
    )
    assert not [1 for a, b in zip(first, second, strict=True) if a.input_ids[:8] == b.input_ids[:8]]


def test_paper_prompts_are_at_most_a_chunk_and_long_tail_ones_are_not() -> None:
    paper = [r.prompt_tokens for r in WORKLOADS["paper"](1, 2000, 1024)]
    tail = [r.prompt_tokens for r in WORKLOADS["long-tail"](1, 2000, 1024)]
    assert max(paper) <= 1024
    assert sum(paper) / len(paper) == pytest.approx(1024 / 3, rel=0.05)
    assert 4 * 1024 < max(tail) <= 8 * 1024
    assert sorted(tail)[1000] == pytest.approx(1024 / 5, rel=0.1)


def test_bursts_are_burstier_than_poisson() -> None:
    def variation(name: str) -> float:
        times = [r.at for r in WORKLOADS[name](1, 2000, 1024)]
        gaps = [b - a for a, b in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        return math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps)) / mean

    assert variation("paper") == pytest.approx(1.0, abs=0.15)
    assert variation("bursty") > 2.3


def test_a_day_begins_and_ends_quiet_and_is_busiest_at_noon() -> None:
    times = [arrival.at for arrival in WORKLOADS["day"](1, 4000, 1024)]
    assert times == sorted(times) and times[-1] == pytest.approx(1.0)
    tenths = [sum(int(10 * at) == tenth for at in times) / 400 for tenth in range(10)]
    rates = [0.65 * share for share in tenths]
    assert rates[0] < 0.3 and rates[9] < 0.3
    assert 1.0 < rates[4] < 1.2 and 1.0 < rates[5] < 1.2


def test_text_prompts_have_exactly_the_tokens_they_say() -> None:
    from tokenizers import Tokenizer

    model = cached_tiny_model()
    sent = arrivals(
        "paper",
        seed=3,
        requests=20,
        tokens_per_s=1e4,
        chunk_tokens=1024,
        prompts=text_prompts(model),
        content="x",
    )
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert all(a.text and tokenizer.encode(a.text).ids == a.input_ids for a in sent)


def test_a_model_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--prompts ids"):
        text_prompts(tmp_path)
