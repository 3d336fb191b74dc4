"""Counts tokens with a model's own tokenizer and chat template, without transformers.

Owns reading ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` and rendering
messages the way transformers and SGLang do. Must not know requests or threads: counting blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer


class TemplateError(ValueError):
    """The chat cannot be rendered: no template, or the template refuses these messages."""


class ChatTokenizer:
    def __init__(
        self, tokenizer: Tokenizer, template: str | None, special_tokens: Mapping[str, str]
    ) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens)
        self._template = _environment().from_string(template) if template else None

    @classmethod
    def load(cls, directory: Path, chat_template: Path | None = None) -> ChatTokenizer:
        """From a model directory; ``chat_template`` overrides the model's own.

        Raises:
            ValueError: naming the file that is missing or broken.
        """
        path = directory / "tokenizer.json" if directory.is_dir() else directory
        if not path.is_file():
            raise ValueError(
                f"--tokenizer-path: no tokenizer.json at {path}; give the directory of a Hugging "
                "Face model with a fast tokenizer"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise ValueError(f"--tokenizer-path: {path}: {error}") from error
        config = _read_json(path.with_name("tokenizer_config.json"))
        special = {
            name: token
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (token := _token_text(config.get(name))) is not None
        }
        if chat_template is not None:
            try:
                template: str | None = chat_template.read_text("utf-8")
            except OSError as error:
                raise ValueError(f"--chat-template: {error}") from error
        else:
            own_file = path.with_name("chat_template.jinja")
            template = (
                own_file.read_text("utf-8")
                if own_file.is_file()
                else _default_template(config.get("chat_template"))
            )
        try:
            return cls(tokenizer, template, special)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template of {path.parent}: {error}") from error

    def count_text(self, text: str) -> int:
        return len(self._tokenizer.encode(text).ids)

    def count_chat(self, body: Mapping[str, Any]) -> int:
        """Tokens of a ``/v1/chat/completions`` body. Raises: TemplateError."""
        return len(self._tokenizer.encode(self.render(body), add_special_tokens=False).ids)

    def render(self, body: Mapping[str, Any]) -> str:
        """The prompt text, generation prompt included. Raises: TemplateError."""
        if self._template is None:
            raise TemplateError("the tokenizer has none; give one with --chat-template")
        extra = body.get("chat_template_kwargs")
        last = body["messages"][-1] if body.get("messages") else {}
        continues = bool(body.get("continue_final_message")) and last.get("role") == "assistant"
        try:
            return self._template.render(
                messages=[_message(message) for message in body["messages"]],
                tools=_tools(body.get("tools")),
                documents=None,
                add_generation_prompt=not continues,
                **self._special_tokens,
                **(extra if isinstance(extra, dict) else {}),
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            raise TemplateError(str(error) or type(error).__name__) from error


def content_text(content: Any) -> tuple[str, bool]:
    """The text of a message's content, and whether it is text only."""
    if isinstance(content, str):
        return content, True
    if not isinstance(content, list):
        return "", content is None
    texts = [
        str(part.get("text") or "")
        for part in content
        if isinstance(part, dict) and part.get("type") == "text"
    ]
    return " ".join(texts), len(texts) == len(content)


def _message(message: Any) -> dict[str, Any]:
    """As SGLang hands it to a template: text content joined, tool arguments as objects."""
    if not isinstance(message, dict):
        raise TemplateError("a message is not an object")
    out = dict(message)
    if isinstance(out.get("content"), list):
        out["content"] = content_text(out["content"])[0]
    if out.get("content") is None:
        out["content"] = ""
    if isinstance(out.get("tool_calls"), list):
        out["tool_calls"] = [_tool_call(call) for call in out["tool_calls"]]
    return out


def _tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except json.JSONDecodeError:
        return call
    return call | {"function": function | {"arguments": arguments}}


def _tools(tools: Any) -> list[Any] | None:
    if not isinstance(tools, list) or not tools:
        return None
    return [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment transformers renders chat templates in."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    return environment


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"--tokenizer-path: {path}: {error}") from error
    return value if isinstance(value, dict) else {}


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _default_template(value: Any) -> str | None:
    """``chat_template`` of the config: a string, or a list of named templates."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        template = named.get("default")
        return template if isinstance(template, str) else None
    return None
