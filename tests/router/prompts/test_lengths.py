"""Estimated prompt lengths: from bytes, and better after every answer."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from sglang_sbs.router.prompts.length_estimate import PromptLength, PromptLengths, chat_bytes


def test_text_is_estimated_from_utf8_bytes() -> None:
    lengths = PromptLengths()
    assert lengths.estimate("x" * 400) == PromptLength(100, "estimated", 400)
    assert lengths.estimate("ü" * 400).size_bytes == 800
    assert lengths.estimate("").tokens == 1


def test_odd_chat_fields_are_left_to_the_engine() -> None:
    messages = [{"role": "user", "content": "x", "tool_calls": 1}, 5]
    assert PromptLengths().estimate({"messages": messages, "tools": 1}).tokens >= 1


def test_the_estimate_follows_what_engines_report() -> None:
    errors: list[float] = []
    lengths = PromptLengths(observe_error=errors.append)
    text = "x" * 20_000
    for _ in range(100):
        lengths.learn(lengths.estimate(text), 10_000)
    assert lengths.bytes_per_token == pytest.approx(2.0, rel=0.15)
    assert errors[0] == pytest.approx(-0.5)
    assert abs(errors[-1]) < abs(errors[0]) / 2
    before = lengths.bytes_per_token
    assert lengths.contradicted == 0
    lengths.learn(PromptLength(5, "given"), 500)
    lengths.learn(PromptLength(5, "given"), 5)
    assert lengths.contradicted == 1
    lengths.learn(PromptLength(5, "estimated", 100), 0)
    assert lengths.bytes_per_token == before


def test_no_answer_makes_the_estimate_absurd() -> None:
    lengths = PromptLengths()
    text = "x" * 400
    for reported in (2**41, 2**62):
        lengths.learn(lengths.estimate(text), reported)
    assert lengths.estimate(text).tokens == pytest.approx(100, rel=0.05)
    for _ in range(10_000):
        lengths.learn(lengths.estimate(text), 2**41)
    assert lengths.estimate(text).tokens <= 400
    for _ in range(10_000):
        lengths.learn(lengths.estimate(text), 1)
    assert lengths.estimate(text).tokens >= 400 / 16


def test_a_single_long_prompt_does_not_set_the_estimate_for_all() -> None:
    lengths = PromptLengths()
    odd = PromptLength(1, "estimated", size_bytes=50_000_000)
    lengths.learn(odd, 50_000_000)
    assert lengths.estimate("x" * 400).tokens < 200


def test_chats_with_images_teach_nothing_about_text() -> None:
    parts = [{"type": "text", "text": "abcd"}, {"type": "image_url", "image_url": {"url": "u"}}]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": parts}]}
    length = PromptLengths().estimate(body)
    assert not length.exact
    assert length.size_bytes == 0
    assert length.tokens == 5
    assert chat_bytes(body) is None


def test_the_bytes_of_a_chat_begin_with_those_of_its_beginning() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    first = chat_bytes({"messages": messages[:1], "tools": tools})
    then = chat_bytes({"messages": messages, "tools": tools})
    other = chat_bytes({"messages": messages})
    assert first is not None
    assert then is not None
    assert other is not None
    assert then.startswith(first)
    assert not other.startswith(first)


def test_tools_are_not_all_written_out_at_once() -> None:
    """One at a time, without Python's four bytes a letter."""
    tools = [{"description": "x" * 100_000 + "\N{GRINNING FACE}"} for _ in range(20)]
    lengths = PromptLengths()
    tracemalloc.start()
    try:
        length = lengths.estimate({"messages": [], "tools": tools})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert length.size_bytes > 2_000_000
    assert peak < 3 * length.size_bytes
