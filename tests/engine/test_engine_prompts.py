"""Prompts as the router makes them against the installed SGLang: token ids and block names.

Needs the ``engine`` extra. SGLang's own code renders, tokenizes and hashes in a process of its own.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from harness.engine_prompts import CHATML, DUMP, ENGINE, TEMPLATES, save_model
from harness.sglang_process import ask

from sglang_sbs.router.prompts.block_names import BlockFormat, BlockNamer
from sglang_sbs.router.prompts.chat_tokenizer import ChatTokenizer
from sglang_sbs.router.prompts.written_size import TemplateError
from sglang_sbs.router.requests.body_fields import PLAIN, Namespace

pytestmark = pytest.mark.sglang

USER = {"role": "user", "content": "What's the weather in Köln? 天気\n", "name": "dropped"}
CALLS = {
    "role": "Assistant",
    "tool_calls": [
        {
            "function": {"arguments": '{"days": 2, "city": "Köln"}', "name": "weather"},
            "id": "c1",
            "type": "function",
            "extra": 1,
        },
        {"id": None, "type": "function", "function": {"name": "now", "arguments": {}}},
    ],
    "reasoning_content": "hm",
    "unknown": True,
}
RESULT = {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
TOOL = {
    "type": "function",
    "function": {
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "name": "weather",
        "extra": "dropped",
    },
}
STRICT = {"function": {"name": "now", "description": "<'\"&>", "strict": True}}
SYSTEM = {"role": "system", "content": "Be brief."}
SAID = {"role": "assistant", "content": "It is <|im_end|> grey"}
TEXTS = {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": " y"}]}
THOUGHT = {
    "role": "assistant",
    "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"}],
}
BODIES: list[dict[str, Any]] = [
    {"messages": [USER]},
    {"messages": [SYSTEM, USER, SAID, USER]},
    {"messages": [SYSTEM, TEXTS, THOUGHT, TEXTS]},
    {"messages": [USER, CALLS, RESULT], "tools": [TOOL, STRICT]},
    {"messages": [USER, CALLS, RESULT | {"content": "c", "tool_call_id": "c1"}], "tools": [TOOL]},
    {"messages": [USER], "tools": [TOOL], "tool_choice": "none"},
    {"messages": [USER], "tools": [TOOL], "tool_choice": "required"},
    {
        "messages": [USER],
        "tools": [TOOL, STRICT],
        "tool_choice": {"type": "function", "function": {"name": "now"}},
    },
    {"messages": [USER], "tools": []},
    {"messages": [USER, SAID]},
    {"messages": [USER, SAID], "continue_final_message": True},
    {"messages": [USER, SAID, USER], "continue_final_message": True},
    {"messages": [USER, THOUGHT]},
    {"messages": [USER, CALLS]},
    {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [USER], "reasoning_effort": "none"},
    {"messages": [USER], "reasoning_effort": "low", "chat_template_kwargs": {"thinking": False}},
    {"messages": [USER], "reasoning": {"enabled": True}},
    {"messages": [USER, {"role": "assistant", "content": None}]},
    {"messages": [USER | {"content": ""}]},
    {"messages": [{"role": "developer", "content": "d", "tools": [TOOL]}, USER]},
    {
        "messages": [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}
        ]
    },
    {"messages": [{"role": "nobody", "content": "x"}]},
]
PROMPTS = [
    "Hello, world!",
    " x <|im_start|>user\n<|im_end|><|endoftext|>  <|im_end",
    "über 漢字 \U0001f600 e\u0301 \t\r\n\n 12345",
    "<|added|> <|added|>x",
    "",
]

ADDED = {"content": "<|added|>", "normalized": False, "special": True}
ADDED |= {"lstrip": False, "rstrip": False, "single_word": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True},
    "llama_default": {"tokenizer_class": "LlamaTokenizerFast"},
    "llama_without": {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False},
    "added": {"added_tokens_decoder": {"512": ADDED}},
    "named": {
        "chat_template": [
            {"name": "default", "template": CHATML},
            {"name": "tool_use", "template": DUMP},
        ]
    },
}
"""Content of ``tokenizer_config.json``."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    paths = {name: root / name for name in TEMPLATES}
    for name, path in paths.items():
        save_model(path, TEMPLATES[name])
    paths["bos"] = root / "bos"
    save_model(paths["bos"], CHATML, bos=True)
    for name, settings in SETTINGS.items():
        paths[name] = root / name
        save_model(paths[name], CHATML, **settings)
    return paths


@pytest.fixture(scope="module")
def engine(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return SGLang's reading of all prompts, by model."""
    cases = tmp_path_factory.mktemp("cases") / "cases.json"
    directories = {str(path): name for name, path in models.items()}
    wanted = {"directories": list(directories), "bodies": BODIES, "prompts": PROMPTS}
    cases.write_text(json.dumps(wanted))
    answer = ask(ENGINE.replace("sys.argv[1]", repr(str(cases))))
    return {name: answer[path] for path, name in directories.items()}


@pytest.mark.parametrize("model", [*TEMPLATES, "bos", *SETTINGS])
def test_chats_become_the_engines_tokens(
    model: str, models: dict[str, Path], engine: dict[str, Any]
) -> None:
    tokenizer = ChatTokenizer.load(models[model])
    for body, expected in zip(BODIES, engine[model]["chats"], strict=True):
        try:
            ids: list[int] | None = tokenizer.chat_ids(body).ids.tolist()
        except TemplateError:
            ids = None
        shown = [None if i is None else tokenizer.tokenizer.decode(i) for i in (ids, expected)]
        assert ids == expected, (body, *shown)
    assert any(ids is not None for ids in engine[model]["chats"])


@pytest.mark.parametrize("model", ["chatml", "bos", *SETTINGS])
def test_texts_become_the_engines_tokens(
    model: str, models: dict[str, Path], engine: dict[str, Any]
) -> None:
    tokenizer = ChatTokenizer.load(models[model])
    assert tokenizer.pieces._cut
    for text, expected in zip(PROMPTS, engine[model]["texts"], strict=True):
        assert tokenizer.text_ids(text).tolist() == expected, text


# Block names ----------------------------------------------------------------------------------

IDS = [(i * 7919) % 150_000 for i in range(2_500)]
CASES: list[dict[str, Any]] = [
    {"n": 2500, "page": 64},
    {"n": 2500, "page": 1},
    {"n": 100, "page": 16},
    {"n": 15, "page": 16},
    {"n": 300, "page": 16, "bigram": True},
    {"n": 300, "page": 16, "salt": "tenant ü"},
    {"n": 300, "page": 16, "key": "class a"},
    {"n": 300, "page": 16, "key": "class a", "salt": "s"},
]
RECORD = """
from array import array
from types import SimpleNamespace
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
ids, cases = json.loads(CASES)
answer["names"] = []
for case in cases:
    bigram, page = case.get("bigram", False), case["page"]
    keys = case["n"] - bigram
    tokens = array("q", ids[: keys // page * page + bigram])
    names = dict(extra_key=case.get("key"), cache_salt=case.get("salt"))
    key = RadixKey(tokens, is_bigram=bigram, **names)
    root = SimpleNamespace(key=RadixKey([]), parent=None, hash_value=[], event_hash_value=None)
    node = SimpleNamespace(key=key, parent=root, hash_value=None, event_hash_value=None)
    recorder = KVCacheEventRecorder(enabled=True, page_size=page)
    if len(key):
        recorder.record_store(node)
    answer["names"].append([name for event in recorder._queue for name in event.block_hashes])
"""


@pytest.fixture(scope="module")
def published() -> list[list[int]]:
    """Return the names that SGLang's event recorder gives the blocks of each case."""
    answer = ask(RECORD.replace("CASES", repr(json.dumps([IDS, CASES]))))
    names = answer["names"]
    assert isinstance(names, list)
    return names


def test_blocks_have_the_names_that_kv_events_give_them(published: list[list[int]]) -> None:
    namer = BlockNamer()
    for case, expected in zip(CASES, published, strict=True):
        format_ = BlockFormat(case["page"], case.get("bigram", False))
        namespace = Namespace(cache_salt=case.get("salt"), extra_key=case.get("key"))
        for _ in range(2):  # the second time from memory
            names = namer.names(array("I", IDS[: case["n"]]), format_, namespace)
            assert names.tolist() == expected, case
    assert published[0]
    assert namer.names(IDS[:64], BlockFormat(64), PLAIN).tolist() == published[0][:1]
