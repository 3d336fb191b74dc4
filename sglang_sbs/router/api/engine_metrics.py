"""``GET /engine_metrics``: the Prometheus pages of all engines as one.

Pages cannot just be put one after another: a family may be declared only once, and equal series of
two engines need a label that tells them apart (``worker_addr``, as sglang_router calls it). Colons
in names become underscores (``sglang_num_running_reqs``), as there: its dashboards ask for those
names.

Lines are rewritten, not parsed into samples and written again: a page may have megabytes, whoever
reaches the port may ask for it, and prometheus_client's parser takes a second per megabyte.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

_TURN_S = 0.005
"""Of merging, before others of this process get a turn."""
_LINES_AT_ONCE = 200
_LINES_JOINED = 5_000
_SAMPLE = re.compile(
    r"([a-zA-Z_:][a-zA-Z0-9_:]*)"
    r'(?:\{((?:[^"{}]++|"(?:[^"\\]++|\\.)*+")*+)\})?'
    r"[ \t]*([+-]?(?:[0-9.]+(?:[eE][+-]?[0-9]+)?|Inf|NaN))([ \t]+-?[0-9]+)?[ \t]*"
)
_DECLARATION = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*)(?: (.*))?")
_KINDS = frozenset({"counter", "gauge", "histogram", "summary", "untyped", "unknown"})
_SUFFIXES = ("", "_total", "_bucket", "_sum", "_count", "_created")


@dataclass(slots=True)
class _Family:
    declared: dict[str, str] = field(default_factory=dict)
    """The rest of its HELP and of its TYPE line."""
    samples: list[str] = field(default_factory=list)


async def merge_pages(pages: Iterable[tuple[str, str]]) -> bytes:
    """One page from ``(worker URL, page)``; a page that cannot be read is left out."""
    families: dict[str, _Family] = {}
    for url, text in pages:
        page = await _read(text, f'worker_addr="{url}"')
        for name, family in (page or {}).items():
            merged = families.setdefault(name, family)
            if merged is not family:
                merged.samples += family.samples
    parts = []
    for name, family in families.items():
        for key, rest in sorted(family.declared.items()):
            parts.append(f"# {key} {name} {rest}\n".encode())
        for at in range(0, len(family.samples), _LINES_JOINED):
            parts.append("".join(family.samples[at : at + _LINES_JOINED]).encode())
            await asyncio.sleep(0)
    return b"".join(parts)


async def _read(text: str, label: str) -> dict[str, _Family] | None:
    """A page's families by their new names; ``None``: a line is none of the format."""
    families: dict[str, _Family] = {}
    names: frozenset[str] = frozenset()
    current = _Family()
    since_s = time.monotonic()
    for number, line in enumerate(text.split("\n")):
        if number % _LINES_AT_ONCE == 0 and time.monotonic() - since_s > _TURN_S:
            await asyncio.sleep(0)
            since_s = time.monotonic()
        if not line or line.isspace():
            continue
        if line[0] == "#":
            found = _DECLARATION.fullmatch(line)
            if found is None:
                continue  # a comment
            key, name, rest = found[1], found[2].replace(":", "_"), found[3] or ""
            if key == "TYPE" and rest not in _KINDS:
                return None
            current = families.setdefault(name, _Family())
            current.declared.setdefault(key, rest)
            names = frozenset(name + suffix for suffix in _SUFFIXES)
            continue
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            return None
        name, labels = sample[1].replace(":", "_"), (sample[2] or "").rstrip(", ")
        if "worker_addr=" in labels:
            return None  # it speaks of others
        family = current if name in names else families.setdefault(name, _Family())
        own = f"{labels},{label}" if labels else label
        family.samples.append(f"{name}{{{own}}} {sample[3]}{sample[4] or ''}\n")
    return families
