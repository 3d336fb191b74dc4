"""Tokenizers and chat templates from a model's directory, and the memory of pieces of text.

``tests/engine/test_engine_prompts.py`` compares the result with SGLang's.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from sglang_sbs.router.prompts import known_text
from sglang_sbs.router.prompts.chat_template import ChatTemplate
from sglang_sbs.router.prompts.chat_tokenizer import ChatTokenizer
from sglang_sbs.router.prompts.known_text import (
    MOST_UNSPLIT_CHARS,
    MOST_WHOLE_CHARS,
    TextPieces,
    TooLong,
    TooManyTokens,
)
from sglang_sbs.router.prompts.written_size import TemplateError
from tools.cpu_engine.tiny_model import cached_tiny_model

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<{{ message['role'] }}> {{ message['content'] }} "
    "{% if message.tool_calls %}{{ message.tool_calls[0].function.arguments.city }} {% endif %}"
    "{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "one two"}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A tokenizer whose tokens are whitespace-separated words."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "<s>": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": {"content": "<s> "}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def configure(directory: Path, **values: Any) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_chat_is_rendered_and_tokenized(model_dir: Path) -> None:
    tokenizer = ChatTokenizer.load(model_dir)
    prompt = tokenizer.chat_ids({"messages": [USER]})
    assert len(prompt.ids) == 5
    assert (prompt.exact, prompt.certain) == (True, True)
    assert len(tokenizer.text_ids("one two three")) == 3


def test_what_the_engine_alone_can_know_is_not_claimed(model_dir: Path) -> None:
    tokenizer = ChatTokenizer.load(model_dir)
    image = {"type": "image_url", "image_url": {"url": "u"}}
    seen = tokenizer.chat_ids({"messages": [{"role": "user", "content": [image]}]})
    assert not seen.exact
    body = {"messages": [USER], "reasoning_effort": "low"}
    assert not tokenizer.chat_ids(body).certain
    odd = {"type": "function", "function": {"name": "f", "parameters": {"type": "varchar"}}}
    assert not tokenizer.chat_ids({"messages": [USER], "tools": [odd]}).certain
    plain = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert tokenizer.chat_ids({"messages": [USER], "tools": [plain]}).certain


def test_a_named_template_file_comes_before_the_models_own(model_dir: Path, tmp_path: Path) -> None:
    (model_dir / "chat_template.jinja").write_text("own")
    mine = tmp_path / "mine.jinja"
    mine.write_text("\nmine\\nmore\n")
    of = {path: ChatTokenizer.load(model_dir, path).template for path in (None, mine)}
    texts = [template.render({"messages": [USER]}).text for template in of.values() if template]
    assert texts == ["own", "mine\nmore"]


def test_of_several_templates_the_first_is_taken(model_dir: Path) -> None:
    named = [{"name": "tool_use", "template": "first"}, {"name": "default", "template": "second"}]
    configure(model_dir, chat_template=named)
    template = ChatTokenizer.load(model_dir).template
    assert template is not None
    assert template.render({"messages": [USER]}).text == "first"


def test_tokens_of_the_config_are_added(model_dir: Path) -> None:
    added = {"7": {"content": "<|new|>", "special": True, "normalized": False}}
    configure(model_dir, added_tokens_decoder=added)
    assert len(ChatTokenizer.load(model_dir).text_ids("a<|new|>b")) == 3


@pytest.mark.parametrize(
    ("settings_", "first"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast"}, [1]),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}, [1]),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, []),
        ({"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": True}, []),
    ],
)
def test_the_config_may_ask_for_a_first_token(
    model_dir: Path, settings_: dict[str, Any], first: list[int]
) -> None:
    configure(model_dir, bos_token="<s>", **settings_)
    tokenizer = ChatTokenizer.load(model_dir)
    assert tokenizer.text_ids("x").tolist() == [*first, 0]
    body = {"messages": [USER, {"role": "assistant", "content": "x"}]}
    whole = tokenizer.chat_ids(body | {"continue_final_message": True}).ids
    assert len(whole) == 5, "the beginning of the answer brings no token of its own"


def test_templates_cannot_reach_the_router() -> None:
    template = ChatTemplate("{{ messages.__class__.__base__.__subclasses__() }}", {})
    with pytest.raises(TemplateError):
        template.render({"messages": [USER]})


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [5]},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "judge", "content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [USER], "tools": [5]},
        {"messages": [USER], "tools": 5},
        {"messages": [USER], "tools": [{"function": {}}]},
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        {"messages": [USER], "chat_template_kwargs": {"messages": []}},
    ],
)
def test_what_the_engine_refuses_is_not_rendered(model_dir: Path, body: dict[str, Any]) -> None:
    with pytest.raises(TemplateError):
        ChatTokenizer.load(model_dir).chat_ids(body)


def test_without_a_template_there_are_no_chats(model_dir: Path) -> None:
    configure(model_dir, chat_template=None)
    with pytest.raises(TemplateError, match="--chat-template"):
        ChatTokenizer.load(model_dir).chat_ids({"messages": [USER]})


def test_missing_and_broken_files_are_named(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        ChatTokenizer.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match="--chat-template"):
        ChatTokenizer.load(model_dir, tmp_path / "nothing.jinja")
    (model_dir / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match="chat template of"):
        ChatTokenizer.load(model_dir)
    (model_dir / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        ChatTokenizer.load(model_dir)


# Pieces ---------------------------------------------------------------------------------------


def tiny(**changes: Any) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(cached_tiny_model() / "tokenizer.json"))
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def nested() -> Tokenizer:
    """Added tokens that overlap, are parts of each other, and one that is matched later."""
    tokenizer = tiny(normalizer=normalizers.NFC())
    names = ("<|im", "<|im_start|>x", "|>", "ab", "abc", "bcd")
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
    tokenizer.add_tokens([AddedToken("world", normalized=True)])
    return tokenizer


def with_ends() -> Tokenizer:
    tokenizer = tiny()
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>",
        special_tokens=[("<|endoftext|>", 0), ("<|im_end|>", 2)],
    )
    return tokenizer


TOKENIZERS = {
    "plain": tiny(),
    "nested": nested(),
    "ends": with_ends(),
    "prefix space": tiny(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
}
words = st.lists(
    st.sampled_from(
        [
            "<|im_start|>",
            "<|im_end|>",
            "<|im",
            "|>",
            "x",
            "abcd",
            "bc",
            "world",
            " ",
            "\n",
            "e\u0301",
        ]
    )
    | st.text(max_size=4),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150)
@given(texts=st.lists(words, min_size=1, max_size=3))
def test_pieces_come_to_the_ids_of_the_whole(name: str, texts: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    pieces = TextPieces(tokenizer)
    assert pieces._cut
    for text in (*texts, "".join(texts), *texts):
        for special in (True, False):
            expected = tokenizer.encode(text, add_special_tokens=special).ids
            assert pieces.encode(text, add_special_tokens=special).tolist() == expected


def test_tokenizers_that_look_at_neighbours_are_given_whole_texts() -> None:
    swallows = tiny()
    swallows.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    metaspace = tiny(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first"))
    for tokenizer in (swallows, metaspace):
        pieces = TextPieces(tokenizer)
        assert not pieces._cut
        text = "hello <mask><|im_end|> world <|im_start|>"
        for _ in range(2):
            expected = tokenizer.encode(text, add_special_tokens=False).ids
            assert pieces.encode(text).tolist() == expected


def test_memory_is_bounded_and_the_oldest_goes() -> None:
    pieces = TextPieces(tiny(), max_bytes=10_000)
    for number in range(50):
        pieces.encode(f"<|im_start|>{number:>90}<|im_end|>{number:>30}")
    assert pieces._bytes <= 10_000
    held = sum(sys.getsizeof(text) + 4 * len(ids) + 300 for text, ids in pieces._known.items())
    assert held == pieces._bytes
    assert f"{49:>30}" in pieces._known
    assert f"{0:>90}" not in pieces._known


WORDS = [
    "the",
    "model",
    "Köln",
    "😀",
    "don't",
    "12345",
    "漢字",
    "  ",
    "\n\n",
    "\t",
    "a-b",
    "e\u0301",
]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_long_text_is_tokenized_in_parts_to_the_same_ids(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = TOKENIZERS[name]
    rng = random.Random(name)
    text = " ".join(rng.choices(WORDS, k=150_000))
    pieces = TextPieces(tokenizer)
    asked: list[int] = []
    encode = known_text._encode

    def counted(of: Tokenizer, texts: list[str]) -> list[list[int]]:
        asked.append(sum(map(len, texts)))
        return encode(of, texts)

    monkeypatch.setattr(known_text, "_encode", counted)
    assert pieces.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids
    assert max(asked) <= 1 << 18 < len(text) // 2, "not all at once"


def test_a_long_text_that_goes_on_is_not_tokenized_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = TextPieces(tiny())
    text = "some words, and a fair question. " * 20_000
    pieces.encode(text)
    asked: list[int] = []
    encode = known_text._encode

    def counted(of: Tokenizer, texts: list[str]) -> list[list[int]]:
        asked.append(sum(map(len, texts)))
        return encode(of, texts)

    monkeypatch.setattr(known_text, "_encode", counted)
    pieces.encode(text + "more")
    assert sum(asked) < len(text) // 3


def test_a_long_text_is_not_kept_only_its_ids() -> None:
    pieces = TextPieces(tiny())
    text = " ".join(f"word {number}" for number in range(10_000))
    ids = pieces.encode(text)
    assert pieces._bytes < 4 * len(ids) + len(text) // 10


def test_more_tokens_than_anybody_takes_are_not_all_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces = TextPieces(tiny())
    before = pieces._bytes
    text = " ".join(f"word {number}" for number in range(50_000))
    asked: list[int] = []
    encode = known_text._encode

    def counted(of: Tokenizer, texts: list[str]) -> list[list[int]]:
        asked.append(max(map(len, texts)))
        return encode(of, texts)

    monkeypatch.setattr(known_text, "_encode", counted)
    with pytest.raises(TooManyTokens):
        pieces.encode(text, most_tokens=1000)
    assert sum(size for size in asked if size > 1000) < len(text) // 4
    assert pieces._bytes == before, "nothing of it is kept"
    pieces.encode("word 1", most_tokens=1000)


def test_what_cannot_be_cut_is_tokenized_only_while_it_is_not_too_long() -> None:
    pieces = TextPieces(tiny(pre_tokenizer=pre_tokenizers.Whitespace()))
    assert len(pieces.encode("y" * MOST_WHOLE_CHARS)) > 0
    with pytest.raises(TooLong):
        pieces.encode("y" * (MOST_WHOLE_CHARS + 1))
    unsplit = TextPieces(tiny(pre_tokenizer=None))
    assert len(unsplit.encode("y" * MOST_UNSPLIT_CHARS)) > 0
    with pytest.raises(TooLong):
        unsplit.encode("y" * (MOST_UNSPLIT_CHARS + 1))


@pytest.mark.parametrize("text", ["漢字" * 20 + "，", '{"name":"value"},', "ab-cd/"])
@pytest.mark.parametrize("name", ["plain", "nested", "ends"])
def test_a_text_without_spaces_is_cut_at_its_punctuation(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    long = text * (3 * MOST_WHOLE_CHARS // len(text))
    ids = TextPieces(tokenizer).encode(long).tolist()
    assert ids == tokenizer.encode(long, add_special_tokens=False).ids
