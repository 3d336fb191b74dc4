"""The corpus: hostile inputs as data, one table of ``inputs/`` per kind.

A table is TOML with one ``[[input]]`` each: a name, what is sent, and what has to come of it; what
the keys mean is said at the top of each table. Bytes are written as text whose characters are their
values (``\\u0000`` to ``\\u00ff``), or as a list of such texts and of ``[text, times]``.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "inputs"
KINDS = ("http", "bodies", "endforward", "kv_events", "engines")
INFERENCE = ("/generate", "/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True)
class Input:
    """``expected``: what of the table says how it ends; empty: nothing but the rules for all."""

    kind: str
    name: str
    data: bytes
    """Bytes that are mutated: those on a connection, a body, the last frame, an engine's answer."""
    fields: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def bytes_of(pieces: Any) -> bytes:
    """The bytes that a table writes as text and repetitions."""
    if isinstance(pieces, str):
        return pieces.encode("latin-1")
    return b"".join(
        piece.encode("latin-1") if isinstance(piece, str) else bytes_of(piece[0]) * piece[1]
        for piece in pieces
    )


_SENT = {"http": "send", "bodies": "body", "endforward": "data", "kv_events": "data"}
_EXPECTED = {
    "http": ("answers", "then"),
    "bodies": ("status",),
    "endforward": ("fate",),
    "kv_events": ("counts",),
    "engines": ("outcomes",),
}


@cache
def corpus(kind: str) -> tuple[Input, ...]:
    """All inputs of a kind; an input for several paths or roles is one for each."""
    table = tomllib.loads((FOLDER / f"{kind}.toml").read_text())
    found = [given for row in table["input"] for given in _inputs(kind, row)]
    names = [given.name for given in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{kind}.toml: names that come twice: {', '.join(sorted(twice))}")
    return tuple(found)


def _inputs(kind: str, row: dict[str, Any]) -> list[Input]:
    row = dict(row)
    name = row.pop("name")
    expected = {key: row.pop(key) for key in _EXPECTED[kind] if key in row}
    if kind == "http" and "lines" in row:
        body = bytes_of(row.pop("body", ""))
        row["send"] = ["\r\n".join(row.pop("lines")) + "\r\n\r\n", body.decode("latin-1")]
    data = bytes_of(row.pop(_SENT.get(kind, "answer"), ""))
    if kind == "bodies":
        paths = row.pop("paths", INFERENCE)
        return [Input(kind, f"{name} {p}", data, {**row, "path": p}, expected) for p in paths]
    if kind == "engines":
        roles = row.pop("roles", ("prefill", "decode"))
        forms = row.pop("stream", (False, True)) if "ask" not in row else (False,)
        return [
            Input(
                kind,
                f"{name}, {role}{', streamed' if stream else ''}",
                data,
                {**row, "role": role, "stream": stream},
                expected,
            )
            for role in roles
            for stream in forms
        ]
    return [Input(kind, name, data, row, expected)]


def agrees(status: int | str, wanted: Any) -> bool:
    """Whether a table names this status, or a word in its place: as ``400`` or ``4xx``."""
    wanted = wanted if isinstance(wanted, list) else [wanted]
    return status in wanted or f"{str(status)[0]}xx" in wanted
