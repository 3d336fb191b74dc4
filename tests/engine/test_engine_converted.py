"""Prompts of ``/v1/messages`` and ``/v1/responses`` as the router counts them against the installed
SGLang's.

Needs the ``engine`` extra. SGLang's own code converts, renders and tokenizes in a process apart.
"""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from harness.engine_prompts import CHATML, ENGINE, TEMPLATES, save_model
from harness.sglang_process import ask

from sglang_sbs.router.prompts.chat_tokenizer import ChatTokenizer
from sglang_sbs.router.prompts.message_chat import message_chat
from sglang_sbs.router.prompts.response_chat import MOST_STATE_BYTES, response_chat
from sglang_sbs.router.prompts.written_size import TemplateError

pytestmark = pytest.mark.sglang

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


def state(text: str) -> str:
    """Return a text in the form of SGLang's ``encrypted_content`` for reasoning."""
    packed = base64.urlsafe_b64encode(zlib.compress(text.encode()))
    return "sglang-reasoning-v1." + packed.decode()


def item(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "id": "i", "status": "completed"} | more


ASKED = {"role": "user", "content": [{"type": "input_text", "text": "And <|im_end|> now?"}]}
ANSWER = item("message", role="assistant", phase="final_answer", content=[
    {"type": "output_text", "text": "Grey.", "annotations": []}])  # fmt: skip
THOUGHT = item("reasoning", summary=[], content=[{"type": "reasoning_text", "text": "hm"}])
CALL_ITEM = item("function_call", call_id="c1", name="weather", arguments='{"city": "Köln"}')
CUSTOM_CALL = item("custom_tool_call", call_id="c2", name="patch", input='a "b"\n')
DEVELOPER = item("message", role="developer", content=[{"type": "input_text", "text": "Mind it."}])
FUNCTION = {"type": "function", "name": "weather", "description": "<'&>", "parameters": SCHEMA}
CUSTOM = {"type": "custom", "name": "patch", "description": "d", "format": {
    "type": "grammar", "syntax": "regex", "definition": "a+"}}  # fmt: skip
SEARCH = {"type": "web_search", "name": "web_search"}

RESPONSES: list[dict[str, Any]] = [
    {"input": "What's the weather in Köln? 天気"},
    {"input": "x", "instructions": "Be brief."},
    {"input": [ASKED, ANSWER, ASKED], "instructions": ""},
    {"input": [ASKED], "instructions": "Be brief.", "reasoning": {"effort": "high"}},
    {"input": [ASKED], "reasoning": {"effort": "none"}},
    {"input": [ASKED], "reasoning": {"summary": "auto"}},
    {"input": [ASKED], "reasoning": {"effort": None}, "chat_template_kwargs": {"thinking": False}},
    {"input": [DEVELOPER, ASKED, DEVELOPER, ASKED], "instructions": "Be brief."},
    {"input": [DEVELOPER | {"content": "Mind it."}, ASKED]},
    {"input": [DEVELOPER | {"content": []}, ASKED]},
    {"input": [{"role": "system", "content": "s"}, ASKED]},
    {"input": [ASKED, THOUGHT, ANSWER, CALL_ITEM, CUSTOM_CALL,
               item("function_call_output", call_id="c1", output="grey"),
               item("custom_tool_call_output", call_id="c2", output=[
                   {"type": "input_text", "text": "o"}, {"type": "input_text", "text": "k"}]),
               ASKED], "tools": [FUNCTION, CUSTOM]},
    {"input": [ASKED, THOUGHT, THOUGHT | {"summary": [{"type": "summary_text", "text": "s"}]},
               CALL_ITEM | {"arguments": "["}, CALL_ITEM | {"arguments": {"city": "Rome"}}]},
    {"input": [ASKED, item("reasoning", summary=[], encrypted_content=state("hidden 天")), ANSWER]},
    {"input": [ASKED, item("reasoning", summary=[], encrypted_content="other"), ANSWER]},
    {"input": [ASKED, item("reasoning", summary=[], encrypted_content=state("x")[:-6]), ANSWER]},
    {"input": [ASKED, ANSWER, ANSWER | {"phase": "commentary"}, ASKED]},
    {"input": [ASKED, ANSWER, ANSWER | {"content": "plain"}, ASKED]},
    {"input": [ASKED, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"},
               ASKED]},
    {"input": [ASKED], "tools": [FUNCTION | {"strict": True}, SEARCH, CUSTOM | {"format": None}]},
    {"input": [ASKED], "tools": [FUNCTION, CUSTOM], "tool_choice": "required"},
    {"input": [ASKED], "tools": [FUNCTION], "tool_choice": "none"},
    {"input": [ASKED], "tools": [FUNCTION, CUSTOM],
     "tool_choice": {"type": "custom", "name": "patch"}},
    {"input": [ASKED], "tools": [FUNCTION, SEARCH], "tool_choice": {"type": "web_search"}},
    {"input": [ASKED], "tools": [SEARCH]},
    {"input": [ASKED, ANSWER]},
    {"input": [{"role": "nobody", "content": "x"}]},
]  # fmt: skip

CONVERTED = """
import asyncio
from sglang.srt.entrypoints.openai.protocol import ResponsesRequest
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
class Converted(Exception):
    pass
def converted(request, *args, **kwargs):
    raise Converted(request)
def of_response(body):
    serving = object.__new__(OpenAIServingResponses)
    serving.__dict__.update(chat.__dict__)
    serving.tokenizer_manager.model_config.is_multimodal = False
    serving.supports_inline_system = chat._resolve_inline_system_support()
    serving._process_messages = converted
    try:
        asyncio.run(serving._make_request(ResponsesRequest.model_validate(body), None, tokenizer))
    except Converted as found:
        return found.args[0]
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
class ChatCompletionRequest:
    @staticmethod
    def model_validate(body):
        if "input" in body:
            return of_response(body)
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
    """Return SGLang's conversion of all bodies, by model."""
    cases = tmp_path_factory.mktemp("cases") / "cases.json"
    directories = {str(path): name for name, path in models.items()}
    cases.write_text(
        json.dumps({"directories": list(directories), "bodies": BODIES + RESPONSES, "prompts": []})
    )
    program = ENGINE.replace("cases = ", CONVERTED).replace("sys.argv[1]", repr(str(cases)))
    answer = ask(program)
    return {name: answer[path] for path, name in directories.items()}


@pytest.mark.parametrize("model", TEMPLATES)
def test_they_become_the_engines_tokens(
    model: str, models: dict[str, Path], engine: dict[str, Any]
) -> None:
    tokenizer = ChatTokenizer.load(models[model])
    inline = tokenizer.template is not None and tokenizer.template.inline_system
    for body, expected in zip(BODIES + RESPONSES, engine[model]["chats"], strict=True):
        is_message = "input" not in body
        chat = message_chat(body) if is_message else response_chat(body, inline_system=inline)
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
    assert all(chat is not None and not chat.certain for chat in map(message_chat, UNCERTAIN))


def test_system_messages_stay_where_they_are_if_the_template_shows_them_there(
    models: dict[str, Path],
) -> None:
    shown = {name: ChatTokenizer.load(path).template for name, path in models.items()}
    inline = {name for name, template in shown.items() if template and template.inline_system}
    assert {"parts", "flat"} <= inline
    assert "chatml" not in inline  # SGLang's probe does not know {% generation %}
    assert "generation" in CHATML


def test_reasoning_is_unpacked_no_further_than_a_prompt_is_read() -> None:
    half = item("reasoning", summary=[], encrypted_content=state("x" * (MOST_STATE_BYTES // 2)))
    chat = response_chat({"input": [half, half]}, inline_system=True)
    assert chat is not None
    (message,) = chat.body["messages"]
    assert len(message["reasoning_content"]) == MOST_STATE_BYTES + 1
    assert response_chat({"input": [half, half, half]}, inline_system=True) is None


def test_namespaces_are_for_one_parser_only() -> None:
    namespace = {"type": "namespace", "name": "n", "tools": [FUNCTION]}
    chat = response_chat({"input": "x", "tools": [namespace]}, inline_system=True)
    assert chat is not None and not chat.certain and "tools" not in chat.body


def test_images_are_media(models: dict[str, Path]) -> None:
    chat = message_chat({"messages": [turn(IMAGE, TEXT)]})
    assert chat is not None
    assert not ChatTokenizer.load(models["chatml"]).chat_ids(chat.body).exact
    part = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    asked = {"input": [ASKED, {"role": "user", "content": [part]}]}
    response = response_chat(asked, inline_system=False)
    assert response is not None
    assert not ChatTokenizer.load(models["chatml"]).chat_ids(response.body).exact


@pytest.mark.parametrize(
    "body",
    [{"messages": 1}, {"messages": [1]}, {"messages": [{"role": "user"}]}, {"messages": [turn(1)]},
     {"messages": [turn({"type": "text"})]}, {"messages": [USER], "tools": [1]},
     {"messages": [USER], "system": 1}, {"messages": [USER], "tools": [TOOL], "tool_choice": "x"},
     {"messages": [USER], "output_config": 7}, {"messages": [turn(result(7))]}],
)  # fmt: skip
def test_what_is_no_request_is_the_engines_to_refuse(body: dict[str, Any]) -> None:
    chat = message_chat(body)
    assert chat is None or isinstance(chat.body, dict)


@pytest.mark.parametrize(
    "body",
    [{"input": 1}, {"input": [1]}, {"input": None}, {}, {"input": [item("file")]},
     {"input": [{"content": [1, None]}]}, {"input": "x", "tools": 1}, {"input": "x", "tools": [1]},
     {"input": "x", "tools": [{}]}, {"input": "x", "tool_choice": {"function": 1}},
     {"input": "x", "reasoning": 7}, {"input": "x", "instructions": 7},
     {"input": [item("reasoning", summary=1)]}, {"input": [item("custom_tool_call", input=1)]},
     {"input": [item("reasoning", summary=[{"text": 1}])]},
     {"input": [{"role": "assistant", "content": 1}] * 2},
     {"input": [item("function_call_output", output=[{"text": 1}])]},
     {"input": [item("reasoning", encrypted_content="sglang-reasoning-v1.\u00e9")]}],
)  # fmt: skip
def test_what_is_no_response_request_is_the_engines_to_refuse(body: dict[str, Any]) -> None:
    chat = response_chat(body, inline_system=False)
    assert chat is None or isinstance(chat.body, dict)
