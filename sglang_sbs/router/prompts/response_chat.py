"""Converts a body of ``/v1/responses`` to the chat that SGLang makes of it.

Follows ``OpenAIServingResponses._make_request`` of SGLang 0.5.23
(``entrypoints/openai/serving_responses.py``, ``responses_adapters.py``) as far as it affects the
prompt. Only the router's own counts and block names depend on it: engines get the original body and
convert it themselves."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import orjson

from sglang_sbs.router.prompts.message_chat import EngineChat

_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_STATE = "sglang-reasoning-v1."
"""Prefix of SGLang's ``encrypted_content``; base64 of zlib-compressed text follows."""
MOST_STATE_BYTES = 4 << 20
"""Limit on the unpacked text of all ``encrypted_content`` in a request, in bytes."""
_DEVELOPER = "Developer instructions:"
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {
        "input": {"type": "string", "description": "The freeform text payload for this tool."}
    },
    "required": ["input"],
    "additionalProperties": False,
}
_FORCED = ("function", "custom")

Message = dict[str, Any]


def response_chat(body: Mapping[str, Any], *, inline_system: bool) -> EngineChat | None:
    """Convert a ``/v1/responses`` body; ``None`` if it is invalid, which the engine will report, or
    its reasoning is too long to unpack here. ``inline_system``: the model's template renders system
    messages in place; otherwise the engine merges them into one at the front."""
    try:
        return _chat_of(body, inline_system)
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError):
        return None


def _chat_of(body: Mapping[str, Any], inline_system: bool) -> EngineChat:
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    items = body["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    state = _ReasoningState()
    messages += filter(None, (_message(item, state) for item in items))
    messages = _merged(messages)
    if not inline_system:
        messages = _one_system(messages)
    chat: dict[str, Any] = {"messages": messages}
    given = body.get("tools") or []
    tools = [tool for tool in map(_tool, given) if tool is not None]
    choice = body.get("tool_choice", "auto")
    if isinstance(choice, dict):
        name = choice.get("name") or (choice.get("function") or {}).get("name")
        is_forced = choice.get("type") in _FORCED and name
        choice = {"type": "function", "function": {"name": name}} if is_forced else "auto"
    if tools:
        chat |= {"tools": tools, "tool_choice": choice}
    _add_reasoning(chat, body)
    # Only Muse's parser shows namespaces to the model.
    certain = not any(tool.get("type") == "namespace" for tool in given)
    return EngineChat(chat, certain)


class _ReasoningState:
    """Unpacks ``encrypted_content``, within ``MOST_STATE_BYTES``: a kilobyte may become a
    megabyte."""

    def __init__(self) -> None:
        self._left_bytes = MOST_STATE_BYTES

    def text(self, blob: Any) -> str:
        """Return the unpacked text of one ``encrypted_content``; empty if it is not SGLang's or
        damaged. Raises: ValueError, the request has too much of it."""
        if not isinstance(blob, str) or not blob.startswith(_STATE):
            return ""
        unpacking, unpacked, text = zlib.decompressobj(), b"", ""
        with suppress(ValueError, zlib.error):
            packed = base64.urlsafe_b64decode(blob[len(_STATE) :])
            unpacked = unpacking.decompress(packed, self._left_bytes + 1)
            text = unpacked.decode() if unpacking.eof else ""
        self._left_bytes -= len(unpacked)
        if self._left_bytes < 0:
            raise ValueError("encrypted_content is too long")
        return text


def _message(item: Mapping[str, Any], state: _ReasoningState) -> Message | None:
    """Convert an item of ``input``; ``None`` if it adds nothing to the prompt. Raises: ValueError,
    SGLang does not support the item."""
    kind = item.get("type")
    if kind == "function_call":
        return _called(item, _arguments(item.get("arguments")))
    if kind == "custom_tool_call":
        return _called(item, json.dumps({"input": item.get("input") or ""}, ensure_ascii=False))
    if kind in _OUTPUTS:
        output = item.get("output", "")
        if isinstance(output, list):
            output = "".join(part.get("text", "") for part in output if isinstance(part, dict))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind == "reasoning":
        text = (
            _texts(item.get("summary"))
            or _texts(item.get("content"))
            or state.text(item.get("encrypted_content"))
        )
        return {"role": "assistant", "reasoning_content": text} if text else None
    if kind not in (None, "message"):
        raise ValueError(f"unknown item: {kind!r}")
    message = {k: v for k, v in item.items() if v is not None and k not in ("id", "status", "type")}
    content = item.get("content")
    if item.get("role") == "developer":
        message["role"] = "system"
        content = _labelled(content)
    if isinstance(content, list):
        content = [_part(part) for part in content]
    return message if content is None else message | {"content": content}


def _called(item: Mapping[str, Any], arguments: str) -> Message:
    function = {"name": item.get("name"), "arguments": arguments}
    call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _arguments(given: Any) -> str:
    if isinstance(given, dict):
        return orjson.dumps(given).decode()
    try:
        is_object = isinstance(given, str) and isinstance(orjson.loads(given), dict)
    except orjson.JSONDecodeError:
        is_object = False
    return given if is_object else "{}"


def _texts(parts: Any) -> str:
    entries = (entry.get("text") for entry in parts or () if isinstance(entry, dict))
    return "\n".join(filter(None, entries))


def _labelled(content: Any) -> Any:
    if isinstance(content, str):
        return f"{_DEVELOPER}\n{content}"
    if not isinstance(content, list):
        return content
    for index, part in enumerate(content):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            labelled = part | {"text": f"{_DEVELOPER}\n{part['text']}"}
            return [*content[:index], labelled, *content[index + 1 :]]
    return [{"type": "input_text", "text": _DEVELOPER}, *content]


def _part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text", "")}
    if kind == "input_image":  # only the engine can count its tokens
        return {"type": "image_url", "image_url": {"url": ""}}
    return part


def _merged(messages: Iterable[Message]) -> list[Message]:
    """Merge consecutive assistant messages, unless their ``phase`` differs."""
    merged: list[Message] = []
    for message in messages:
        before = merged[-1] if merged else {}
        both = message.get("role") == before.get("role") == "assistant"
        thought_only = before.keys() == {"role", "reasoning_content"}
        if not both or (before.get("phase") != message.get("phase") and not thought_only):
            merged.append(message)
            continue
        merged[-1] = joined = dict(before)
        if message.get("phase") is not None:
            joined["phase"] = message["phase"]
        _join_content(joined, message.get("content"))
        if message.get("tool_calls"):
            joined["tool_calls"] = [*(joined.get("tool_calls") or ()), *message["tool_calls"]]
        thoughts = [joined.get("reasoning_content"), message.get("reasoning_content")]
        if thoughts[1]:
            joined["reasoning_content"] = "\n".join(filter(None, thoughts))
    return merged


def _join_content(message: Message, more: Any) -> None:
    content = message.get("content")
    if more in (None, ""):
        return
    if content in (None, ""):
        message["content"] = more
    elif isinstance(content, str) and isinstance(more, str):
        message["content"] = f"{content}\n\n{more}"
    else:
        message["content"] = [*_as_parts(content), *_as_parts(more)]


def _as_parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return list(content) if isinstance(content, list) else []


def _one_system(messages: Iterable[Message]) -> list[Message]:
    texts: list[str] = []
    others: list[Message] = []
    for message in messages:
        content = message.get("content")
        if message.get("role") != "system":
            others.append(message)
        elif isinstance(content, str):
            texts.append(content)
        else:
            parts = (part.get("text") for part in content or () if isinstance(part, dict))
            texts += (text for text in parts if isinstance(text, str))
    return [{"role": "system", "content": "\n\n".join(texts)}, *others] if texts else others


def _tool(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """Convert a tool to that of a chat; ``None`` if the model does not see it."""
    kind, name = tool["type"], tool.get("name")
    description, parameters = tool.get("description"), tool.get("parameters")
    if kind == "custom" and name:
        format_ = tool.get("format") or {}
        texts = [description] if description else []
        if format_.get("type") == "grammar":
            rules = f"{format_.get('syntax') or 'lark'} grammar:\n{format_.get('definition') or ''}"
            texts.append(f"The payload must conform to this {rules}")
        description, parameters = "\n\n".join(texts) or None, _CUSTOM_PARAMETERS
    elif kind != "function":
        return None
    strict = tool.get("strict", False)
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function | {"strict": strict}}


def _add_reasoning(chat: dict[str, Any], body: Mapping[str, Any]) -> None:
    arguments, reasoning = body.get("chat_template_kwargs"), body.get("reasoning")
    if reasoning is not None:
        if (reasoning.get("effort") or reasoning.get("reasoning_effort")) == "none":
            off = {"thinking": False, "enable_thinking": False}
            arguments = off | (arguments if isinstance(arguments, dict) else {})
        effort = reasoning.get("effort", "medium")
        if effort is not None:
            chat["reasoning_effort"] = effort
    if arguments is not None:
        chat["chat_template_kwargs"] = arguments
