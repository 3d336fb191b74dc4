"""Prompts that are hard to render or to cut."""

from __future__ import annotations

import orjson

from benchmarks.hostile.case import Target, case

_CHAT = "/v1/chat/completions"
_MESSAGES = [{"role": "user", "content": "x"}]
_PART = b"<|reserved_special_token_"


@case("special-tokens", "2 MB of the beginning of 255 special tokens", tokenizer=True)
async def special_tokens(target: Target) -> None:
    await target.post(b'{"text":"%b"}' % (_PART * (2_000_000 // len(_PART))))


@case(
    "uncut-texts", "one word of 60 KB, of 250 KB and of 900 KB, which are tokenized", tokenizer=True
)
async def uncut_texts(target: Target) -> None:
    for size in (60_000, 250_000, 900_000):
        await target.post(b'{"text":"%b"}' % (b"x" * size))
    target.sent_bytes = 900_000


def _nested(size: int) -> bytes:
    """Return a JSON list of tools nested 400 deep; ``size`` in bytes."""
    schema = b'{"type":"object","properties":{"a":' * 200 + b"{}" + b"}}" * 200
    tool = b'{"type":"function","function":{"name":"f","parameters":%b}}' % schema
    return b"[%b]" % b",".join([tool] * (size // len(tool)))


async def _render(target: Target, size: int) -> None:
    """Send nested tools by each way to the template: tools, arguments, and /v1/tokenize."""
    messages = orjson.dumps(_MESSAGES)
    tools = b'{"messages":%b,"tools":%b}' % (messages, _nested(size))
    arguments = b'{"messages":%b,"chat_template_kwargs":{"extra":%b}}' % (messages, _nested(size))
    for body in (tools, arguments):
        await target.post(body, _CHAT)
        await target.post(body, "/v1/tokenize")
    target.sent_bytes = len(arguments)  # one after the other


@case("nested-tools", "90 KB of tools nested 400 deep, tojson(indent=4)", tokenizer=True)
async def nested_tools(target: Target) -> None:
    await _render(target, 90_000)


@case("nested-tools-large", "3.6 MB of tools nested 400 deep, tojson(indent=4)", tokenizer=True)
async def nested_tools_large(target: Target) -> None:
    await _render(target, 3_600_000)


@case("tools-text", "8 MB of tools with letters of four bytes, whose length is estimated")
async def tools_text(target: Target) -> None:
    text = "a word, " * 100 + "\U0001f600"
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    tools = [tool] * (8_000_000 // len(orjson.dumps(tool)))
    await target.post(orjson.dumps({"messages": _MESSAGES, "tools": tools}), _CHAT)


@case("detokenize", "4 MB of token ids and 1 MB of them, to be made text", tokenizer=True)
async def detokenize(target: Target) -> None:
    for size in (4_000_000, 1_000_000):
        await target.post(b'{"tokens":[%b1]}' % (b"100," * (size // 4)), "/v1/detokenize")
    target.sent_bytes = 4_000_000  # one after the other
