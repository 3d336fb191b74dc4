"""Bounds the size of a client's values in a template before they are rendered.

A template belongs to the model and is trusted; messages, tools and ``chat_template_kwargs`` are
not. ``tojson(indent=4)`` expands tools nested 400 deep 1,500 times, and Python's encoder passes
each token through one generator per level."""

from __future__ import annotations

from typing import Any

MOST_CHARS = 16 << 20
"""Limit on the characters of one value, written as JSON."""
MOST_HOPS = 1 << 20
"""Limit on the sum of the nesting depths of everything that one ``tojson`` writes; its computing
time grows with that sum."""


class TemplateError(ValueError):
    """The chat cannot be rendered: no template, or template or engine refuse its messages."""


class TooMuch(TemplateError):
    """The rendered text would be too large."""


def written_chars(value: Any, indent: int | str = 0) -> int:
    """Return a lower bound on the characters of ``value`` as JSON. Raises: TooMuch, ``MOST_CHARS``
    or ``MOST_HOPS`` is exceeded."""
    step = indent if isinstance(indent, int) else len(indent)
    chars = hops = 0
    level = [value]
    depth = 0
    while level:
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                chars += len(item) + 2
            elif isinstance(item, dict):
                chars += sum([len(str(key)) + 4 for key in item]) + 2
                below += item.values()
            elif isinstance(item, list | tuple):
                chars += len(item) + 2
                below += item
            else:
                chars += 5
        chars += len(level) * step * depth
        hops += len(level) * (depth + 1)
        if chars > MOST_CHARS or hops > MOST_HOPS:
            raise TooMuch("its JSON would be too large, or is nested too deeply")
        level = below
        depth += 1
    return chars
