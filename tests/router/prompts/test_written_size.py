"""The text that a template would make of a client's values is bounded before it is made."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_sbs.router.prompts.chat_template import ChatTemplate
from sglang_sbs.router.prompts.written_size import TemplateError, TooMuch, written_chars

TEMPLATE = "{{ messages[0]['content'] }}{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.text("ab", max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab"), inner, max_size=4),
    max_leaves=30,
)


def nested(depth: int, width: int) -> dict[str, Any]:
    inner: Any = {f"k{number}": 1 for number in range(width)}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


def chat(tools: Any = None, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], "tools": tools, **more}


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@given(JSON, st.integers(0, 4))
def test_the_bound_is_near_what_is_written(value: Any, indent: int) -> None:
    written = len(json.dumps(value, indent=indent or None))
    assert written_chars(value, indent) <= 6 * written + 16


def test_deep_tools_with_an_indent_are_refused_before_they_are_written() -> None:
    body = chat([tool(nested(300, 12_000))])
    size = len(json.dumps(body))
    template = ChatTemplate(TEMPLATE, {})
    tracemalloc.start()
    try:
        with pytest.raises(TooMuch):
            template.render(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * size


def test_what_a_template_repeats_has_an_end() -> None:
    source = "{% for one in range(100000) %}{{ messages[0]['content'] }}{% endfor %}"
    body = chat()
    body["messages"][0]["content"] = "x" * 1000
    with pytest.raises(TooMuch, match="would have over"):
        ChatTemplate(source, {}).render(body)


def test_ordinary_tools_are_rendered_as_ever() -> None:
    tools = [tool({"type": "object", "properties": {"a": {"type": "string"}}})] * 100
    text = ChatTemplate(TEMPLATE, {}).render(chat(tools)).text
    assert text.startswith("hello[\n    {\n")
    assert json.loads(text[len("hello") :])[0]["function"]["name"] == "f"
    assert issubclass(TooMuch, TemplateError)
