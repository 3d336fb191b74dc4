"""Converts a body of ``/v1/messages`` to the chat that SGLang makes of it.

Follows ``AnthropicServing._convert_to_chat_completion_request`` of SGLang 0.5.23
(``entrypoints/anthropic/serving.py``) as far as it affects the prompt. Only the router's own counts
and block names depend on it: engines get the original body and convert it themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import orjson

_SERVER_TOOLS = ("web_search_", "computer_", "bash_", "text_editor_")
"""Prefixes of the types of tools on Anthropic's own servers, which SGLang omits."""
_CHOICES = {"none": "none", "auto": "auto", "any": "required"}

Part = dict[str, Any]


class EngineChat(NamedTuple):
    """Chat to which engines convert a request of ``/v1/messages`` or ``/v1/responses``."""

    body: dict[str, Any]
    """Body as for ``/v1/chat/completions``."""
    certain: bool
    """False if rules of the model's parsers may change the engine's prompt. Its beginning is
    usually the same."""


def message_chat(body: Mapping[str, Any]) -> EngineChat | None:
    """Convert a ``/v1/messages`` body; ``None`` if it is invalid, which the engine will report."""
    try:
        return _chat_of(body)
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError):
        return None


def _chat_of(body: Mapping[str, Any]) -> EngineChat:
    certain = body.get("thinking") is None and not (body.get("output_config") or {}).get("effort")
    messages: list[dict[str, Any]] = []
    system = body.get("system") or ""
    texts = [system] if isinstance(system, str) else _texts(system)
    if any(text.strip() if isinstance(system, str) else text for text in texts):
        messages.append({"role": "system", "content": "\n".join(filter(None, texts))})
    for message in body["messages"]:
        role, content = message["role"], message["content"]
        # The engine's template decides whether it stays in place.
        certain = certain and role != "system"
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
            continue
        certain = certain and not any(block["type"] == "thinking" for block in content)
        messages += _messages_of(role, content)
    chat: dict[str, Any] = {"messages": messages}
    tools = [_tool(tool) for tool in body.get("tools") or () if not _is_server_tool(tool)]
    if tools:
        chat["tools"] = tools
        choice = body.get("tool_choice") or {"type": "auto"}
        named = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = _CHOICES.get(choice["type"], named)
    return EngineChat(chat, certain)


def _messages_of(role: str, blocks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert one message with a list of content blocks. Tool results become separate messages."""
    messages: list[dict[str, Any]] = []
    parts: list[Part] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block["type"]
        if kind == "text":
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "image":
            parts += _images(block.get("source"))
        elif kind == "search_result":
            parts += _text_parts(_search_text(block))
        elif kind == "tool_use":
            given = orjson.dumps(block.get("input") or {}).decode()
            function = {"name": block["name"], "arguments": given}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            if parts:
                messages.append({"role": role, "content": _content(parts)})
                parts = []
            id_ = block.get("tool_use_id") or block.get("id") or ""
            contents = _result_contents(block.get("content"))
            messages += ({"role": "tool", "tool_call_id": id_, "content": c} for c in contents)
        elif kind == "tool_result":
            text = _result_text(block.get("content"))
            parts.append({"type": "text", "text": f"Tool result: {text}"})
    message: dict[str, Any] = {"role": role}
    if calls:
        message["tool_calls"] = calls
    if parts:
        message["content"] = _content(parts)
    elif not calls and role == "user":
        return messages
    elif not calls:
        message["content"] = ""
    return [*messages, message]


def _content(parts: list[Part]) -> str | list[Part]:
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def _texts(blocks: Iterable[Mapping[str, Any]]) -> list[str]:
    return [block["text"] for block in blocks if block["type"] == "text"]


def _text_parts(text: str) -> list[Part]:
    return [{"type": "text", "text": text}] if text else []


def _images(source: Any) -> list[Part]:
    """Return an image part without data, because only the engine can count an image's tokens; an
    empty list if ``source`` has no image."""
    if isinstance(source, dict) and (source.get("data") or source.get("url")):
        return [{"type": "image_url", "image_url": {"url": ""}}]
    return []


def _search_text(block: Mapping[str, Any]) -> str:
    lines = []
    if block.get("title"):
        lines.append(f"Title: {block['title']}")
    source = block.get("source")
    if isinstance(source, dict):
        source = source.get("url") or source.get("text")
    if source:
        lines.append(f"Source: {source}")
    content = block.get("content")
    texts = [content] if isinstance(content, str) else _texts(content or ())
    if any(texts):
        lines.append("Content: " + "\n".join(filter(None, texts)))
    return "\n".join(lines)


def _result_parts(blocks: Iterable[Mapping[str, Any]]) -> list[Part]:
    parts: list[Part] = []
    for block in blocks:
        kind = block["type"]
        if kind == "text":
            parts += _text_parts(block["text"])
        elif kind == "image":
            parts += _images(block.get("source"))
        elif kind == "tool_reference":
            name = block.get("tool_name") or block.get("name")
            parts += [{"type": kind, "name": name}] if name else []
        elif kind == "search_result":
            parts += _text_parts(_search_text(block))
    return parts


def _result_text(content: Any) -> str:
    if isinstance(content, list):
        parts = _result_parts(content)
        return "\n".join(part["text"] for part in parts if part["type"] == "text")
    return content or ""


def _result_contents(content: Any) -> list[str | list[Part]]:
    """Return the content of each message that a tool result becomes: a message has either only
    references to tools, or none."""
    if not isinstance(content, list):
        return [content or ""]
    groups: list[list[Part]] = []
    for part in _result_parts(content):
        refers = part["type"] == "tool_reference"
        if not groups or (groups[-1][0]["type"] == "tool_reference") != refers:
            groups.append([])
        groups[-1].append(part)
    return [_content(group) for group in groups] or [""]


def _is_server_tool(tool: Mapping[str, Any]) -> bool:
    return (tool.get("type") or "").startswith(_SERVER_TOOLS)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = dict(tool["input_schema"])
    schema.setdefault("type", "object")
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": schema,
        "strict": tool.get("strict", False),
    }
    return {"type": "function", "defer_loading": tool.get("defer_loading"), "function": function}
