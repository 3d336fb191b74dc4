"""Prompts of ``/v1/messages`` as the router counts them against the installed SGLang's.

Needs the ``engine`` extra. SGLang's own code converts, renders and tokenizes in a process apart.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_engine_prompts import ENGINE, TEMPLATES, save_model
from test_engine_sglang import ask

from sglang_sbs.router.prompts.chat_tokenizer import ChatTokenizer
from sglang_sbs.router.prompts.message_chat import chat_of
from sglang_sbs.router.prompts.written_size import TemplateError

TEXT = {"type": "text", "text": "What's the weather in Köln? 天気"}
USER = {"role": "user", "content": "And <|im_end|> now?"}
SAID = {"role": "assistant", "content": [{"type": "text", "text": "Grey."}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "<'&>", "input_schema": SCHEMA}
BARE = {"name": "now", "input_schema": {"properties": {}}, "strict": True, "type": "custom"}
SERVER_TOOL = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
DEFERRED = BARE | {"name": "later", "defer_loading": True}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Köln", "d": 2}}
CALLED = {"role": "assistant", "content": [TEXT, CALL, CALL | {"id": "toolu_2", "input": {}}]}
REFERENCE = {"type": "tool_reference", "tool_name": "later"}
FOUND = {
    "type": "search_result",
    "title": "T",
    "source": "https://x.test",
    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content} | more


def turn(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


BODIES: list[dict[str, Any]] = [
    {"messages": [USER]},
    {"messages": [turn(TEXT)], "system": "Be brief."},
    {"messages": [turn(TEXT, TEXT)], "system": "  "},
    {"messages": [USER], "system": [TEXT | {"cache_control": {"type": "ephemeral"}}, TEXT]},
    {"messages": [USER], "system": [{"type": "text", "text": ""}]},
    {"messages": [USER, SAID, USER]},
    {"messages": [USER, SAID]},
    {"messages": [USER], "tools": [TOOL, BARE, SERVER_TOOL]},
    {"messages": [USER], "tools": [SERVER_TOOL]},
    {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "none"}},
    {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "any"}},
    {"messages": [USER], "tools": [TOOL, BARE], "tool_choice": {"type": "tool", "name": "now"}},
    {"messages": [USER, CALLED, turn(result("grey"), TEXT)], "tools": [TOOL]},
    {"messages": [USER, CALLED, turn(TEXT, result([TEXT, FOUND]), TEXT, TEXT)], "tools": [TOOL]},
    {"messages": [USER, CALLED, turn(result(None), result([], tool_use_id=None, id="b"))]},
    {"messages": [USER, CALLED, turn(result([TEXT, REFERENCE, TEXT]))], "tools": [TOOL, DEFERRED]},
    {"messages": [turn(FOUND, TEXT)]},
    {"messages": [turn({"type": "text", "text": ""})]},
    {"messages": [USER, {"role": "assistant", "content": []}, USER]},
    {"messages": [USER, {"role": "assistant", "content": [result([TEXT])]}, USER]},
    {"messages": [USER, CALLED]},
]
UNCERTAIN: list[dict[str, Any]] = [
    {"messages": [USER], "thinking": {"type": "disabled"}},
    {"messages": [USER], "output_config": {"effort": "low"}},
    {"messages": [USER, {"role": "system", "content": "More."}, USER]},
    {"messages": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]},
]

CONVERTED = """
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
class ChatCompletionRequest:
    @staticmethod
    def model_validate(body):
        request = AnthropicMessagesRequest.model_validate(body | {"max_tokens": 1})
        chat.supports_inline_system = True
        return AnthropicServing(chat)._convert_to_chat_completion_request(request)
cases = """


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    paths = {name: root / name for name in TEMPLATES}
    for name, path in paths.items():
        save_model(path, TEMPLATES[name])
    return paths


@pytest.fixture(scope="module")
def engine(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What SGLang makes of all bodies, by model."""
    cases = tmp_path_factory.mktemp("cases") / "cases.json"
    directories = {str(path): name for name, path in models.items()}
    cases.write_text(
        json.dumps({"directories": list(directories), "bodies": BODIES, "prompts": []})
    )
    program = ENGINE.replace("cases = ", CONVERTED).replace("sys.argv[1]", repr(str(cases)))
    answer = ask(program)
    return {name: answer[path] for path, name in directories.items()}


@pytest.mark.parametrize("model", TEMPLATES)
def test_messages_become_the_engines_tokens(
    model: str, models: dict[str, Path], engine: dict[str, Any]
) -> None:
    tokenizer = ChatTokenizer.load(models[model])
    for body, expected in zip(BODIES, engine[model]["chats"], strict=True):
        chat = chat_of(body)
        assert chat is not None
        assert chat.certain, body
        try:
            ids: list[int] | None = tokenizer.chat_ids(chat.body).ids.tolist()
        except TemplateError:
            ids = None
        shown = [None if i is None else tokenizer.tokenizer.decode(i) for i in (ids, expected)]
        assert ids == expected, (body, *shown)
    assert any(ids is not None for ids in engine[model]["chats"])


def test_what_rests_on_the_models_parsers_is_uncertain() -> None:
    assert all(chat is not None and not chat.certain for chat in map(chat_of, UNCERTAIN))


def test_images_are_media(models: dict[str, Path]) -> None:
    chat = chat_of({"messages": [turn(IMAGE, TEXT)]})
    assert chat is not None
    assert not ChatTokenizer.load(models["chatml"]).chat_ids(chat.body).exact


@pytest.mark.parametrize(
    "body",
    [{"messages": 1}, {"messages": [1]}, {"messages": [{"role": "user"}]}, {"messages": [turn(1)]},
     {"messages": [turn({"type": "text"})]}, {"messages": [USER], "tools": [1]},
     {"messages": [USER], "system": 1}, {"messages": [USER], "tools": [TOOL], "tool_choice": "x"},
     {"messages": [USER], "output_config": 7}, {"messages": [turn(result(7))]}],
)  # fmt: skip
def test_what_is_no_request_is_the_engines_to_refuse(body: dict[str, Any]) -> None:
    chat = chat_of(body)
    assert chat is None or isinstance(chat.body, dict)
