"""Renders a chat to the text of its prompt, as SGLang 0.5.23 does.

Reproduces how SGLang prepares messages and tools for the template
(``OpenAIServingChat._apply_jinja_template``, the models of ``entrypoints/openai/protocol.py``), and
the environment in which transformers runs templates. Models that SGLang renders without a Jinja
template (built-in conversations, DeepSeek-V3.2, Kimi K3) are rendered wrongly here;
:mod:`.tokenizer_check` detects this by asking the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import jinja2
import orjson
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sglang_sbs.router.prompts.written_size import TemplateError, TooMuch, written_chars

ContentFormat = Literal["string", "openai"]
MOST_GROWTH = 4
"""Limit on a rendered prompt's characters, as a multiple of those of messages, tools and
arguments."""
FREE_CHARS = 1 << 20
"""Characters of the template's own text that a prompt may have beyond ``MOST_GROWTH``."""

_MESSAGE_FIELDS = ("tool_call_id", "name", "phase", "reasoning_content")
"""Fields of non-user messages that are copied for the template, in the order of SGLang's model.
Unknown fields never reach the template."""
_ROLES = frozenset(
    {"system", "assistant", "tool", "function", "developer", "latest_reminder", "root"}
)
_TEXT_PARTS = ("text", "input_text")
_MEDIA_PARTS = {
    "image_url": "image",
    "input_image": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
_MODEL_SPECIFIC = ("reasoning_effort", "reasoning", "thinking", "task")
"""Request fields that SGLang translates by rules of the model's parsers, which are unknown here."""
_NOT_FOR_TEMPLATES = frozenset({"chat_template", "tokenize", "return_dict", "reasoning_effort"})
"""Names in ``chat_template_kwargs`` that SGLang refuses or reads itself."""
_SCHEMA_TYPES = frozenset({"string", "number", "integer", "object", "array", "boolean", "null"})


@dataclass(frozen=True, slots=True)
class RenderedChat:
    text: str
    continuation: str
    """The beginning of the response (``continue_final_message``), tokenized separately."""
    only_text: bool
    """True if the chat has no images, video or audio, whose tokens only the engine can count."""
    certain: bool
    """True if no part of the prompt depends on rules of the model's parsers."""


class ChatTemplate:
    """A compiled chat template. Raises: jinja2.TemplateError, the template is invalid."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        self._template = environment.from_string(source)
        self.content_format: ContentFormat = _content_format(environment, source)
        self.inline_system = _shows_inline_system(source)
        """True if the template renders system messages after the first where they stand."""

    def render(self, body: Mapping[str, Any]) -> RenderedChat:
        """Render a ``/v1/chat/completions`` body. Raises: TemplateError, the template or SGLang
        would refuse it."""
        try:
            return self._render(body)
        except TemplateError:
            raise
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            raise TemplateError(str(error) or type(error).__name__) from error
        except (ArithmeticError, IndexError, RecursionError) as error:
            raise TemplateError(type(error).__name__) from error

    def _render(self, body: Mapping[str, Any]) -> RenderedChat:
        shaped = [_message(message, self.content_format) for message in body["messages"]]
        messages = [message for message, _ in shaped]
        continuation = ""
        last = messages[-1] if messages else {}
        if last.get("role") == "assistant" and isinstance(last.get("content"), str):
            if body.get("continue_final_message"):
                continuation = messages.pop()["content"]
            else:  # SGLang makes the last message the user's
                messages[-1] = {"role": "user", "content": last["content"]}
        arguments = _template_arguments(body)
        tools = _tools(body)
        try:
            text = self._run(messages, tools, arguments)
        except TooMuch:
            raise
        except Exception:  # some templates expect tools without OpenAI's wrapper
            text = self._run(messages, [tool["function"] for tool in tools or ()], arguments)
        return RenderedChat(
            text=text,
            continuation=continuation,
            only_text=all(plain for _, plain in shaped),
            certain=not any(body.get(name) is not None for name in _MODEL_SPECIFIC)
            and not _NOT_FOR_TEMPLATES.intersection(arguments)
            and not _has_odd_types(tools),
        )

    def _run(self, messages: list[Any], tools: list[Any] | None, arguments: dict[str, Any]) -> str:
        given = self._special_tokens | arguments
        text, size = [], 0
        most = MOST_GROWTH * written_chars([messages, tools, given]) + FREE_CHARS
        for piece in self._template.generate(
            messages=messages,
            tools=tools or None,
            documents=None,
            add_generation_prompt=True,
            **given,
        ):
            size += len(piece)
            if size > most:
                raise TooMuch(f"the prompt would have over {most} characters")
            text.append(piece)
        return "".join(text)


def content_text(content: Any) -> tuple[str, bool]:
    """Return the text of a message's content, and whether it contains only text."""
    if isinstance(content, str):
        return content, True
    if not isinstance(content, list):
        return "", content is None
    texts = [
        str(part.get("text") or "")
        for part in content
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS
    ]
    return " ".join(texts), len(texts) == len(content)


def _message(message: Any, content_format: ContentFormat) -> tuple[dict[str, Any], bool]:
    """Return a message as the template gets it, and whether it contains only text."""
    if not isinstance(message, dict):
        raise TemplateError("a message is not an object")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise TemplateError("a message has no role")
    if role != "user":
        role = role.lower()
        if role not in _ROLES:
            raise TemplateError(f"unknown role: {role}")
    content, only_text = _content("" if content is None else content, content_format)
    if role == "tool" and isinstance(content, list) and all(p["type"] == "text" for p in content):
        content = " ".join(part["text"] for part in content)
    out: dict[str, Any] = {"role": role, "content": content}
    if role == "user":
        return out, only_text
    out |= {name: message[name] for name in _MESSAGE_FIELDS if message.get(name) is not None}
    if message.get("tool_calls") is not None:
        out["tool_calls"] = [_tool_call(call, role) for call in message["tool_calls"]]
    if message.get("tools") is not None:
        out["tools"] = [_tool(tool) for tool in message["tools"]]
    if message.get("prefix") is not None:
        out["prefix"] = message["prefix"]
    if content_format == "openai" and isinstance(message.get("content"), list):
        out["content"] = out.pop("content")  # last, as in SGLang: a template may print all fields
    return out, only_text


def _content(content: Any, content_format: ContentFormat) -> tuple[Any, bool]:
    """Return a message's content as SGLang's ``process_content_for_template_format`` prepares it
    for the template, and whether it contains only text."""
    if not isinstance(content, list):
        if not isinstance(content, str):
            raise TemplateError("content must be a string or a list of parts")
        return content, True
    parts: list[dict[str, Any]] = []
    only_text = True
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXT_PARTS:
            parts.append({"type": "text", "text": part["text"]})
        elif kind in _MEDIA_PARTS:
            only_text = False
            parts.append({"type": _MEDIA_PARTS[kind]})
        elif kind == "tool_reference":
            parts.append({"type": kind, "name": part["name"]})
        elif kind not in ("thinking", "reasoning"):
            raise TemplateError(f"unknown message part: {kind!r}")
    if content_format == "openai":
        return parts, only_text
    return " ".join(part["text"] for part in parts if part["type"] == "text"), only_text


def _tool_call(call: Any, role: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if role == "assistant" and isinstance(arguments, str):
        arguments = orjson.loads(arguments)
        if not isinstance(arguments, dict):
            raise TemplateError("arguments of a tool call must be a JSON object")
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if choice == "none" or not tools:
        return None
    shaped = [_tool(tool) for tool in tools]
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        shaped = [tool for tool in shaped if tool["function"]["name"] == name]
    return shaped or None


def _tool(tool: Any) -> dict[str, Any]:
    """Return a tool as SGLang's ``Tool`` and ``Function`` dump it: first the client's fields in
    order, then the missing ones."""
    given = tool["function"]
    deferred = given.get("defer_loading")
    if deferred is None:
        deferred = tool.get("defer_loading")
    known = {name: given.get(name) for name in ("description", "name", "parameters")}
    known["name"] = given["name"]
    optional = {"strict": given.get("strict"), "defer_loading": deferred}
    known |= {name: value for name, value in optional.items() if value is not None}
    order = [name for name in given if name in known]
    order += [name for name in known if name not in order]
    return {
        "type": tool.get("type", "function"),
        "function": {name: known[name] for name in order},
        "defer_loading": tool.get("defer_loading"),
    }


def _has_odd_types(schema: Any) -> bool:
    """Return whether a schema has type names that SGLang may rewrite ("varchar", "int")."""
    if isinstance(schema, list):
        return any(map(_has_odd_types, schema))
    if not isinstance(schema, dict):
        return False
    kind = schema.get("type")
    if isinstance(kind, str) and kind not in _SCHEMA_TYPES and "function" not in schema:
        return True
    if isinstance(kind, list) and not _SCHEMA_TYPES.issuperset(map(str, kind)):
        return True
    return any(map(_has_odd_types, schema.values()))


def _template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's arguments from ``chat_template_kwargs`` and the reasoning fields, as
    SGLang's ``ChatCompletionRequest.normalize_reasoning_inputs`` sets them."""
    given = body.get("chat_template_kwargs")
    arguments = dict(given) if isinstance(given, dict) else {}
    effort = body.get("reasoning_effort")
    thinking: bool | None = None
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict):
        own = reasoning.get("effort")
        own = reasoning.get("reasoning_effort") if own is None else own
        effort = effort if own is None else own
        if reasoning.get("enabled", reasoning.get("enable")):
            thinking = True
    if effort is not None:
        thinking = effort != "none"
    if thinking is not None:
        arguments.setdefault("thinking", thinking)
        arguments.setdefault("enable_thinking", thinking)
    effort = arguments.pop("reasoning_effort", None) or effort
    return arguments if effort is None else {"reasoning_effort": effort} | arguments


class _Generation(Extension):
    """Renders only the content of ``{% generation %}``, which marks the model's text for
    training."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Build the environment in which transformers renders chat templates."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        written_chars(value, 0 if indent is None else indent)
        options: dict[str, Any] = {"indent": indent, "separators": separators}
        return json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    return environment


def _shows_inline_system(source: str) -> bool:
    """Return whether the template renders a later system message in place, tested like SGLang's
    ``detect_inline_system_support`` (its environment differs from transformers')."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    mark = "__sglang_inline_system_sentinel__"
    roles = [("system", "t"), ("user", "t"), ("system", mark), ("user", "t")]
    messages = [{"role": role, "content": content} for role, content in roles]
    try:
        template = environment.from_string(source)
        return mark in template.render(messages=messages, add_generation_prompt=False)
    except Exception:
        return False


def _content_format(environment: jinja2.Environment, source: str) -> ContentFormat:
    """Return whether the template gets content as a list of parts ("openai") or as text
    ("string"), decided like SGLang's ``detect_jinja_template_content_format``."""
    if any(word in source for word in ("image", "audio", "video", "vision")):
        return "openai"
    loops = environment.parse(source).find_all(nodes.For)
    return "openai" if any(_is_content(loop.iter) for loop in loops) else "string"


def _is_content(node: nodes.Node | None) -> bool:
    """Return whether a template expression is a message's content, perhaps filtered or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _is_content(node.node)
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node)
        key = node.arg.value if isinstance(node.arg, nodes.Const) else None
    elif isinstance(node, nodes.Getattr):
        key = node.attr
    else:
        return False
    of = node.node
    return key == "content" and isinstance(of, nodes.Name) and of.name in ("message", "msg", "m")
