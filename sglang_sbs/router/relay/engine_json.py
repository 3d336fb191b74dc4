"""Parses engines' responses (SGLang's ``managers/tokenizer_manager.py``, ``entrypoints/openai``)
only as deeply as needed. Text, logprobs and hidden states stay JSON: parsing them takes ten times
their size and blocks the event loop."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any

import msgspec
import orjson

from sglang_sbs.router.requests import raw_json
from sglang_sbs.router.requests.raw_json import JsonError, Raw

SHORT_BYTES = 64 << 10
"""Shorter JSON is parsed whole."""
_OPENED = ("meta_info", "usage", "logprobs")
"""Members of a response, or of its only choice, that are parsed even if they are long."""

_only_one = msgspec.json.Decoder(tuple[Raw])

_HERE = b"\0"
"""Placeholder for a long value; JSON never contains this byte."""

Parts = Generator[None, None, dict[str, Any]]


def opened(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Parse a response or event; long values stay ``Raw``. Raises: JsonError, it is not an
    object."""
    parts = opened_in_parts(body)
    try:
        while True:
            next(parts)
    except StopIteration as over:
        value: dict[str, Any] = over.value
        return value


def opened_in_parts(body: bytes | bytearray | memoryview) -> Parts:
    """Parse as :func:`opened` does, in steps between which other work can run; the generator's
    return value is the result. Each step reads every byte at most once. Raises: JsonError."""
    try:
        if len(body) <= SHORT_BYTES:
            value = orjson.loads(body)
            if not isinstance(value, dict):
                raise JsonError("it is not a JSON object")
            return value
        answer = yield from _opened_object(Raw(body))
        choices = answer.get("choices")
        if isinstance(choices, Raw):
            yield
            try:
                (only,) = _only_one.decode(choices)
            except msgspec.ValidationError:  # several choices, which engines never send at once
                answer["choices"] = raw_json.value_of(choices)
            else:
                answer["choices"] = [(yield from _opened_object(only))]
        return answer
    except (ValueError, RecursionError) as error:
        raise JsonError(str(error)) from error


def _opened_object(raw: Raw) -> Parts:
    value: dict[str, Any] = {}
    for name, member in raw_json.MEMBERS.decode(raw).items():
        if memoryview(member).nbytes <= SHORT_BYTES:
            value[name] = orjson.loads(memoryview(member))
        elif name in _OPENED and raw_json.first_byte(member) == b"{":
            yield
            value[name] = yield from _opened_object(member)
        else:
            value[name] = member
    return value


class Spliced:
    """A JSON list whose entries have not been copied; each is given in pieces. It is not a
    dataclass, which orjson would serialize itself."""

    __slots__ = ("pieces",)

    def __init__(self, entries: Iterable[Sequence[bytes | bytearray | memoryview | Raw]]) -> None:
        pieces = [memoryview(piece) for entry in entries for piece in (b",", *entry)]
        self.pieces: list[bytes | memoryview] = [b"[", *pieces[1:], b"]"]


def dumped_pieces(value: Any) -> list[bytes | memoryview]:
    """Serialize a parsed response in pieces, without copying long values."""
    long: list[list[bytes | memoryview]] = []

    def as_it_came(value: Any) -> orjson.Fragment:
        if isinstance(value, Raw | Spliced):
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
        isinstance(value, Raw) and raw_json.first_byte(value) == b"["
    )


def one_after_the_other(first: Any, second: Any, leave_out: int = 0) -> Any:
    """Concatenate two lists (parsed, or ``Raw`` JSON) without the last ``leave_out`` entries of the
    first. Any other ``second`` counts as an empty list. Raises: JsonError, ``first`` is not valid
    JSON."""
    if not is_list(second):
        second = []
    if isinstance(first, list) and isinstance(second, list):
        return first[: len(first) - leave_out] + second
    if leave_out:
        entries = raw_json.decoded(raw_json.ENTRIES, _text(first))
        first = Raw(raw_json.list_of(entries[: len(entries) - leave_out]))
    return spliced_lists((first, second))


def spliced_lists(lists: Iterable[Any]) -> Spliced:
    """Concatenate lists (parsed, or ``Raw`` JSON)."""
    texts = map(_text, lists)
    return Spliced([text[1:-1]] for text in texts if text.nbytes > len(b"[]"))


def _text(value: Any) -> memoryview:
    return memoryview(value if isinstance(value, Raw) else b"".join(dumped_pieces(value)))
