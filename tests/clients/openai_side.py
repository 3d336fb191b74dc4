"""Requests through the ``openai`` package to ``/v1/responses``, and its answers in a form that can
be compared."""

from __future__ import annotations

from typing import Any

import openai
from anthropic_side import PIXEL, ROME
from client_sides import WAIT_S, without_ids

from tools.cpu_engine.tiny_model import cached_tiny_model

MODEL = str(cached_tiny_model())
"""The name engines serve it by. They refuse others here."""
USER = {"role": "user", "content": "What's the weather in Köln? 天気"}
TEXT = {"type": "input_text", "text": "the prefill of a batch and decode"}
SAID = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
    {"type": "output_text", "text": "Grey.", "annotations": []}]}  # fmt: skip
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
    {"type": "reasoning_text", "text": "hm"}]}  # fmt: skip
DEVELOPER = {"type": "message", "role": "developer", "content": [TEXT]}
WEATHER = {"type": "function", "name": "weather", "parameters": ROME, "strict": True}
PATCH = {"type": "custom", "name": "patch", "description": "apply it"}
SEARCH = {"type": "web_search"}
ROME_ARGUMENTS = '{"city":"Rome"}'
CALL = {
    "type": "function_call",
    "call_id": "call_1",
    "name": "weather",
    "arguments": ROME_ARGUMENTS,
}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "grey"}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": "a\nb"}
CUSTOM_RESULT = {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"}
IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "auto"}
JSON = {"format": {"type": "json_schema", "name": "rome", "schema": ROME, "strict": True}}
ONE_CALL = {"parallel_tool_calls": False, "max_output_tokens": 80}
"""The model would go on calling."""
QUIET = {"reasoning": {"effort": "none"}}

CASES: dict[str, dict[str, Any]] = {
    "text": QUIET,
    "default": {},
    "instructions": QUIET | {"instructions": "Be brief."},
    "items": QUIET | {"input": [USER, {"role": "user", "content": [TEXT, TEXT]}]},
    "turns": QUIET | {"input": [USER, SAID, USER]},
    "developer": QUIET | {"input": [DEVELOPER, USER, DEVELOPER, USER], "instructions": "Be brief."},
    "thinking": {"reasoning": {"effort": "high"}},
    "summary": {"reasoning": {"effort": "low", "summary": "auto"}},
    "encrypted": {"reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"]},
    "thought": {"input": [USER, THOUGHT, SAID, USER]},
    "tools": QUIET | {"tools": [WEATHER, PATCH, SEARCH]},
    "a tool": QUIET | ONE_CALL | {"tools": [WEATHER], "tool_choice": "required"},
    "the tool": QUIET | ONE_CALL | {"tools": [WEATHER], "tool_choice": {
        "type": "function", "name": "weather"}},
    "no tool": QUIET | {"tools": [WEATHER], "tool_choice": "none"},
    "result": QUIET | {"input": [USER, SAID, CALL, RESULT, USER], "tools": [WEATHER]},
    "custom": QUIET | {"input": [USER, CUSTOM_CALL, CUSTOM_RESULT], "tools": [PATCH]},
    "json": QUIET | {"text": JSON, "max_output_tokens": 80},
    "stop": QUIET | {"extra_body": {"stop": ["e"]}},
    "top": QUIET | {"top_p": 0.9, "extra_body": {"top_k": 1}},
    "metadata": QUIET | {"metadata": {"a": "b"}, "user": "u", "store": True},
    "codex": {
        "instructions": "You are a coding agent.", "input": [DEVELOPER, USER], "store": False,
        "tools": [WEATHER, PATCH, {"type": "local_shell"}], "tool_choice": "auto",
        "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "a-conversation",
    },
}  # fmt: skip
"""The last one has the shape of what Codex sends."""
REFUSED: dict[str, dict[str, Any]] = {
    "other model": {"model": "nope"},
    "previous": {"previous_response_id": "resp_1"},
    "background": {"background": True},
    "one token": {"max_output_tokens": 1},
    "hot": {"temperature": -1.0},
    "no tools": {"tool_choice": "required"},
    "unknown tool": {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "nope"}},
    "odd item": {"input": [{"type": "computer_call_output", "call_id": "c", "output": {}}]},
    "odd role": {"input": [{"role": "nobody", "content": "x"}]},
    "image": {"input": [{"role": "user", "content": [IMAGE, TEXT]}]},
    "shell": {"tools": [{"type": "shell"}]},
}
_NOT_COMPARED = (
    "id", "item_id", "call_id", "created_at", "sequence_number", "input_tokens_details"
)  # fmt: skip
"""Made up anew, or what happens to be cached."""


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=WAIT_S)


def asked(case: dict[str, Any]) -> dict[str, Any]:
    fixed = {"model": MODEL, "input": "Köln? 天気", "max_output_tokens": 14, "temperature": 0.0}
    return fixed | case


async def answer(client: openai.AsyncOpenAI, case: dict[str, Any]) -> Any:
    """The whole response, or the error that it became."""
    try:
        response = await client.responses.create(**asked(case))
    except openai.APIStatusError as error:
        return type(error).__name__, error.status_code, error.body["message"]
    return without_ids(response.model_dump(), _NOT_COMPARED)


async def events(client: openai.AsyncOpenAI, case: dict[str, Any]) -> Any:
    """A stream's events; deltas in a row as one, as engines join what comes together."""
    found: list[Any] = []
    numbers: list[int] = []
    try:
        async for event in await client.responses.create(**asked(case), stream=True):
            numbers.append(event.sequence_number)
            shown = without_ids(event.model_dump(), _NOT_COMPARED)
            if found and shown["type"].endswith(".delta") and found[-1]["type"] == shown["type"]:
                found[-1]["delta"] += shown["delta"]
            else:
                found.append(shown)
    except openai.APIStatusError as error:
        return type(error).__name__, error.status_code, error.body["message"]
    assert numbers == list(range(len(numbers)))
    return found
