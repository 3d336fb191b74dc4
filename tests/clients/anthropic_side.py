"""Requests through the ``anthropic`` package, and its answers in a form that can be compared."""

from __future__ import annotations

from typing import Any

import anthropic
from client_sides import WAIT_S, without_ids

QUIET = {"type": "disabled"}
USER = {"role": "user", "content": "What's the weather in Köln? 天気"}
TEXT = {"type": "text", "text": "the prefill of a batch and decode"}
CITY = {"city": {"type": "string", "enum": ["Rome"]}}
ROME = {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False}
WEATHER = {"name": "weather", "input_schema": ROME, "strict": True}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
CALLED = {"role": "assistant", "content": [TEXT, CALL]}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [TEXT]}
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
    "rkJggg=="
)
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}

CASES: dict[str, dict[str, Any]] = {
    "text": {"thinking": QUIET},
    "system": {"system": "Be brief.", "thinking": QUIET},
    "system blocks": {"system": [TEXT | {"cache_control": {"type": "ephemeral"}}, TEXT]},
    "turns": {"messages": [USER, {"role": "assistant", "content": "Grey."}, USER]},
    "begun": {"messages": [USER, {"role": "assistant", "content": "It is"}], "thinking": QUIET},
    "parts": {"messages": [{"role": "user", "content": [TEXT, TEXT]}]},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "thought": {
        "messages": [USER, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, TEXT]}, USER]
    },
    "tools": {"tools": [WEATHER], "thinking": QUIET},
    "a tool": {"tools": [WEATHER], "tool_choice": {"type": "any"}, "thinking": QUIET,
               "max_tokens": 80},
    "the tool": {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"},
                 "thinking": QUIET, "max_tokens": 80},
    "no tool": {"tools": [WEATHER], "tool_choice": {"type": "none"}, "thinking": QUIET},
    "result": {"messages": [USER, CALLED, {"role": "user", "content": [RESULT, TEXT]}],
               "tools": [WEATHER], "thinking": QUIET},
    "server tool": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "stop": {"stop_sequences": ["e"], "thinking": QUIET},
    "top": {"extra_body": {"top_k": 1, "top_p": 0.9}, "thinking": QUIET},
    "metadata": {"metadata": {"user_id": "u"}, "thinking": QUIET},
    "image": {"messages": [{"role": "user", "content": [IMAGE, TEXT]}], "thinking": QUIET},
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "no tokens": {"max_tokens": 0},
    "no model": {"model": ""},
    "odd role": {"messages": [{"role": "nobody", "content": "x"}]},
    "small budget": {"thinking": {"type": "enabled", "budget_tokens": 1}},
    "redacted": {"messages": [USER, {"role": "assistant", "content": [
        {"type": "redacted_thinking", "data": "x"}]}, USER]},
    "unknown tool": {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "nope"}},
}  # fmt: skip


def client_of(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0, timeout=WAIT_S)


def asked(case: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 12, "messages": [USER], "extra_body": {}} | case | {
        "extra_body": {"temperature": 0.0} | case.get("extra_body", {})
    }  # fmt: skip


async def answer(client: anthropic.AsyncAnthropic, case: dict[str, Any]) -> Any:
    """The whole message, or the error that it became."""
    try:
        message = await client.messages.create(**asked(case))
    except anthropic.APIStatusError as error:
        return type(error).__name__, error.status_code, error.body
    return without_ids(message.model_dump())


async def events(client: anthropic.AsyncAnthropic, case: dict[str, Any]) -> Any:
    """A stream's events; deltas in a row as one, as engines join what comes together."""
    found: list[Any] = []
    try:
        async for event in await client.messages.create(**asked(case), stream=True):
            shown = without_ids(event.model_dump())
            if shown["type"] != "content_block_delta":
                found.append(shown)
                continue
            delta = shown["delta"]
            (text_name,) = delta.keys() & {"text", "thinking", "partial_json", "signature"}
            last = found[-1]
            if last["type"] == shown["type"] and last["delta"]["type"] == delta["type"]:
                last["delta"][text_name] += delta[text_name]
            else:
                found.append(shown)
    except anthropic.APIStatusError as error:
        return type(error).__name__, error.status_code, error.body
    return found
