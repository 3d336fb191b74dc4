"""Merges the Prometheus pages of all engines for ``GET /engine_metrics``.

A family may be declared only once, and equal series of two engines need a label (``worker_addr``).
Colons in names become underscores. Both follow sglang_router, so its dashboards work. Lines are
rewritten one at a time without a full parse: the endpoint needs no key, a page may have megabytes,
and prometheus_client's parser takes a second per megabyte."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import BytesIO, TextIOWrapper

_MOST_LINE_CHARS = 64 << 10
_MOST_FAMILIES = 10_000
"""Limit on metric families per page: each takes a hundred times the memory of a short line."""
_SAMPLE = re.compile(
    r"([a-zA-Z_:][a-zA-Z0-9_:]*)"
    r'(?:\{((?:[^"{}]++|"(?:[^"\\]++|\\.)*+")*+)\})?'
    r"[ \t]*([+-]?(?:[0-9.]+(?:[eE][+-]?[0-9]+)?|Inf|NaN))([ \t]+-?[0-9]+)?[ \t]*"
)
_DECLARATION = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*)(?: (.*))?")
_KINDS = frozenset({"counter", "gauge", "histogram", "summary", "untyped", "unknown"})
_SUFFIXES = ("", "_total", "_bucket", "_sum", "_count", "_created")


class _Unreadable(ValueError):
    """A page is not in the Prometheus text format."""


@dataclass(slots=True)
class _Family:
    declared: dict[str, str] = field(default_factory=dict)
    """Text of the HELP line and of the TYPE line after the name, by keyword."""
    samples: bytearray = field(default_factory=bytearray)


def merge_pages(pages: Iterable[tuple[str, bytes]]) -> list[bytes | bytearray]:
    """Merge ``(worker URL, page)`` pairs into one page, returned in parts; skip unreadable pages.
    Blocks for about a second per ten megabytes."""
    merged: dict[str, list[_Family]] = {}
    for url, page in pages:
        try:
            families = _families_on(page, f'worker_addr="{url}"')
        except _Unreadable:
            continue
        for name, family in families.items():
            merged.setdefault(name, []).append(family)
    parts: list[bytes | bytearray] = []
    for name, of_pages in merged.items():
        declared = sorted(of_pages[0].declared.items())
        parts += [f"# {key} {name} {rest}\n".encode() for key, rest in declared]
        parts += [family.samples for family in of_pages]
    return parts


def _families_on(page: bytes, label: str) -> dict[str, _Family]:
    """Return the families of a page by name, with colons replaced and ``label`` added to each
    sample. Raises: _Unreadable, the page has another format."""
    families: defaultdict[str, _Family] = defaultdict(_Family)
    current, names_of_current = _Family(), frozenset[str]()
    lines = TextIOWrapper(BytesIO(page), "utf-8", "replace", newline="\n")
    while line := lines.readline(_MOST_LINE_CHARS):
        if len(line) == _MOST_LINE_CHARS or len(families) > _MOST_FAMILIES:
            raise _Unreadable("too long a line, or too many families")
        line = line.removesuffix("\n")
        if not line or line.isspace():
            continue
        if line[0] == "#":
            if (found := _DECLARATION.fullmatch(line)) is None:
                continue  # a comment
            key, name, rest = found[1], found[2].replace(":", "_"), found[3] or ""
            if key == "TYPE" and rest not in _KINDS:
                raise _Unreadable("unknown metric type")
            current = families[name]
            current.declared.setdefault(key, rest)
            names_of_current = frozenset(name + suffix for suffix in _SUFFIXES)
            continue
        if (sample := _SAMPLE.fullmatch(line)) is None:
            raise _Unreadable("a line is not a sample")
        name, labels = sample[1].replace(":", "_"), (sample[2] or "").rstrip(", ")
        if "worker_addr=" in labels:
            raise _Unreadable("a sample already has the label worker_addr")
        family = current if name in names_of_current else families[name]
        own = f"{labels},{label}" if labels else label
        family.samples += f"{name}{{{own}}} {sample[3]}{sample[4] or ''}\n".encode()
    return families
