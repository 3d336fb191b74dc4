"""Prompt lengths: exact where they can be, an estimate that learns where not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from sglang_sbs.router.chat_tokenizer import ChatTokenizer, TemplateError
from sglang_sbs.router.lengths import PromptLength, PromptLengths

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<{{ message['role'] }}> {{ message['content'] }} "
    "{% if message.tool_calls %}{{ message.tool_calls[0].function.arguments.city }} {% endif %}"
    "{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A tokenizer whose tokens are whitespace-separated words."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": {"content": "<s> "}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


async def count(lengths: PromptLengths, kind: Any, prompt: Any) -> PromptLength:
    (length,) = await lengths.count(kind, [prompt])
    return length


async def test_token_ids_are_exact() -> None:
    lengths = PromptLengths()
    assert await count(lengths, "generate", [1, 2, 3]) == PromptLength(3, True)
    assert await count(lengths, "generate", []) == PromptLength(1, True)
    assert (await count(lengths, "generate", [[0.1], [0.2]])).tokens == 2


async def test_text_is_estimated_from_utf8_bytes() -> None:
    lengths = PromptLengths()
    assert await count(lengths, "generate", "x" * 400) == PromptLength(100, False, 400)
    assert (await count(lengths, "generate", "ü" * 400)).size_bytes == 800
    assert (await count(lengths, "generate", "")).tokens == 1


async def test_odd_chat_fields_are_left_to_the_engine() -> None:
    messages = [{"role": "user", "content": "x", "tool_calls": 1}, 5]
    (length,) = await PromptLengths().count("chat", [{"messages": messages, "tools": 1}])
    assert length.tokens >= 1


async def test_the_estimate_follows_what_engines_report() -> None:
    errors: list[float] = []
    lengths = PromptLengths(observe_error=errors.append)
    text = "x" * 20_000
    for _ in range(100):
        lengths.learn(await count(lengths, "generate", text), 10_000)
    assert lengths.bytes_per_token == pytest.approx(2.0, rel=0.15)
    assert errors[0] == pytest.approx(-0.5)
    assert abs(errors[-1]) < abs(errors[0]) / 2
    before = lengths.bytes_per_token
    lengths.learn(PromptLength(5, True), 500)
    lengths.learn(PromptLength(5, False, 100), 0)
    assert lengths.bytes_per_token == before


async def test_chats_with_images_teach_nothing_about_text() -> None:
    parts = [{"type": "text", "text": "abcd"}, {"type": "image_url", "image_url": {"url": "u"}}]
    length = await count(
        PromptLengths(), "chat", {"messages": [{"role": "user", "content": parts}]}
    )
    assert not length.exact
    assert length.size_bytes == 0
    assert length.tokens == 5


async def test_a_tokenizer_makes_text_and_chat_exact(model_dir: Path) -> None:
    lengths = PromptLengths(ChatTokenizer.load(model_dir))
    assert await count(lengths, "completions", "one two three") == PromptLength(3, True)
    body = {"messages": [{"role": "user", "content": "one two"}]}
    assert await count(lengths, "chat", body) == PromptLength(5, True)
    assert (await count(lengths, "generate", [1, 2])).tokens == 2
    lengths.close()


def test_templates_render_as_transformers_does(model_dir: Path) -> None:
    tokenizer = ChatTokenizer.load(model_dir)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": parts}]}
    assert tokenizer.render(body) == "<s> <user> a b <assistant>"
    call = {"function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    body["messages"].append({"role": "assistant", "content": None, "tool_calls": [call]})
    body["continue_final_message"] = True
    assert tokenizer.render(body) == "<s> <user> a b <assistant>  Rome "
    body["tools"] = [{"type": "function", "function": {"name": "f", "description": "ü<"}}]
    assert tokenizer.render(body).endswith('[{"name": "f", "description": "ü<"}]')


def test_templates_cannot_reach_the_router(model_dir: Path) -> None:
    evil = model_dir / "evil.jinja"
    evil.write_text("{{ messages.__class__.__base__.__subclasses__() }}")
    tokenizer = ChatTokenizer.load(model_dir, evil)
    with pytest.raises(TemplateError):
        tokenizer.render({"messages": [{"role": "user", "content": "x"}]})


async def test_a_template_that_refuses_falls_back_to_the_estimate(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    lengths = PromptLengths(ChatTokenizer.load(model_dir))
    length = await count(lengths, "chat", {"messages": [{"role": "user", "content": "abcd"}]})
    assert length == PromptLength(5, False, 4)
    lengths.close()


def test_missing_and_broken_tokenizers_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        ChatTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        ChatTokenizer.load(tmp_path)
