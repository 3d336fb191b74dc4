"""How much a template would make of a client's values, told before it is made.

A template is the model's, so it is trusted; messages, tools and ``chat_template_kwargs`` are not.
``tojson(indent=4)`` makes 1,500 times as much of tools that are nested 400 deep, and Python's
encoder passes each token through a generator for every level.
"""

from __future__ import annotations

from typing import Any

MOST_CHARS = 16 << 20
"""Of one value, written as JSON."""
MOST_HOPS = 1 << 20
"""Levels that all values of one ``tojson`` may be below, together: what writing it costs."""


class TemplateError(ValueError):
    """The chat cannot be rendered: no template, or it or the engine refuses these messages."""


class TooMuch(TemplateError):
    """The template would make too much of it."""


def written_chars(value: Any, indent: int | str = 0) -> int:
    """Characters that ``value`` has as JSON, at least. Raises: TooMuch."""
    step = indent if isinstance(indent, int) else len(indent)
    chars = hops = 0
    level = [value]
    depth = 0
    while level:
        below: list[Any] = []
        for one in level:
            if isinstance(one, str):
                chars += len(one) + 2
            elif isinstance(one, dict):
                chars += sum([len(str(key)) + 4 for key in one]) + 2
                below += one.values()
            elif isinstance(one, list | tuple):
                chars += len(one) + 2
                below += one
            else:
                chars += 5
        chars += len(level) * step * depth
        hops += len(level) * (depth + 1)
        if chars > MOST_CHARS or hops > MOST_HOPS:
            raise TooMuch("written as JSON it would be too large, or is nested too deep")
        level = below
        depth += 1
    return chars
