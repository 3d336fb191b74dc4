"""Answers of engines, opened only as far as somebody has to look into them.

A long answer is nearly all text, logprobs or hidden states that only pass through: they stay the
JSON they came as. Unfolding them would take ten times their size, and keep the event loop for a
second where it reads megabytes.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from sglang_sbs.router.requests.raw_json import JsonError, Raw, decoded, list_of, value_of

SHORT_BYTES = 64 << 10
"""What is shorter is unfolded without a thought."""
_OPENED = ("meta_info", "usage", "logprobs")
"""Objects that are looked into, of an answer or of its choice."""

_members = msgspec.json.Decoder(dict[str, Raw])
_entries = msgspec.json.Decoder(list[Raw])
_only_one = msgspec.json.Decoder(tuple[Raw])

_HERE = b"\0"
"""Stands for something long: in JSON there is no such byte."""

Parts = Generator[None, None, dict[str, Any]]


def opened(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """An answer or event; what is long in it is a ``Raw``. Raises: JsonError, it is no object."""
    parts = opened_in_parts(body)
    while True:
        try:
            next(parts)
        except StopIteration as over:
            value: dict[str, Any] = over.value
            return value


def opened_in_parts(body: bytes | bytearray | memoryview) -> Parts:
    """The same with pauses: each part looks at every byte once."""
    try:
        if len(body) <= SHORT_BYTES:
            value = orjson.loads(body)
            if not isinstance(value, dict):
                raise JsonError("it is no JSON object")
            return value
        answer = yield from _opened_object(Raw(body))
        choices = answer.get("choices")
        if isinstance(choices, Raw):
            yield
            try:
                (only,) = _only_one.decode(choices)
            except msgspec.ValidationError:  # several, and who sends them in one is no engine
                answer["choices"] = value_of(choices)
            else:
                answer["choices"] = [(yield from _opened_object(only))]
        return answer
    except (ValueError, RecursionError) as error:
        raise JsonError(str(error)) from error


def _opened_object(raw: Raw) -> Parts:
    value: dict[str, Any] = {}
    for name, member in _members.decode(raw).items():
        if memoryview(member).nbytes <= SHORT_BYTES:
            value[name] = orjson.loads(memoryview(member))
        elif name in _OPENED and bytes(memoryview(member)[:1]) == b"{":
            yield
            value[name] = yield from _opened_object(member)
        else:
            value[name] = member
    return value


@dataclass(slots=True, eq=False)
class _Spliced:
    """JSON in pieces that were not copied so far."""

    pieces: list[bytes | memoryview]


def dumped(value: Any) -> bytes:
    """JSON of what was opened; what is long in it is copied once."""
    return b"".join(dumped_pieces(value))


def dumped_pieces(value: Any) -> list[bytes | memoryview]:
    """The same before that copy."""
    long: list[list[bytes | memoryview]] = []

    def as_it_came(value: Any) -> orjson.Fragment:
        if isinstance(value, Raw | _Spliced):
            long.append([memoryview(value)] if isinstance(value, Raw) else value.pieces)
            return orjson.Fragment(_HERE)
        raise TypeError(type(value).__name__)

    text = orjson.dumps(value, default=as_it_came)
    first, *others = text.split(_HERE)
    pieces: list[bytes | memoryview] = [first]
    for inserted, other in zip(long, others, strict=True):
        pieces += (*inserted, other)
    return pieces


def is_list(value: Any) -> bool:
    return isinstance(value, list) or (
        isinstance(value, Raw) and bytes(memoryview(value)[:1]) == b"["
    )


def one_after_the_other(first: Any, second: Any, leave_out: int = 0) -> Any:
    """Two lists as one, without the last ``leave_out`` entries of the first. Raises: JsonError."""
    if isinstance(first, list) and isinstance(second, list):
        return first[: len(first) - leave_out] + second
    texts = [memoryview(v if isinstance(v, Raw) else dumped(v)) for v in (first, second)]
    if leave_out:
        entries = decoded(_entries, texts[0])
        texts[0] = memoryview(list_of(entries[: len(entries) - leave_out]))
    inner = [text[1:-1] for text in texts if text.nbytes > len(b"[]")]
    pieces = [one for text in inner for one in (b",", text)]
    return _Spliced([b"[", *pieces[1:], b"]"])
