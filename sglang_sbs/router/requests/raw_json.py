"""Splits request bodies into members that stay raw bytes, because a megabyte of JSON can become
eighty of objects. No function here holds the interpreter lock for long."""

from __future__ import annotations

import codecs
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import orjson

T = TypeVar("T")
Json = msgspec.Raw | bytes | bytearray | memoryview
Raw = msgspec.Raw
"""A piece of the body, not copied, which keeps the body alive."""

_PIECE_BYTES = 1 << 18
_SPLIT_BYTES = 1 << 15
"""Bytes of JSON split at quotes in one step, so that the list of short strings, several times as
large as the JSON, stays below about a megabyte."""
_SMALL_BYTES = 1 << 16
"""JSON up to this size is not checked for the memory that its objects would take."""
_HEAD_BYTES = 32
_IDS_BYTES = 1 << 14
"""Bytes of a list of token ids that are converted to objects at a time, to limit memory."""
_FREE_BYTES = 16 << 20
_GROWTH = 4
"""Objects may take this many bytes per byte of JSON, plus ``_FREE_BYTES``."""
_OBJECT_BYTES = {ord("{"): 200, ord("["): 72, ord('"'): 32, ord(","): 40}
"""Estimated memory of objects per character of JSON outside strings (two quotes: one string)."""

MEMBERS = msgspec.json.Decoder(dict[str, Raw])
"""Splits a JSON object. For clients' input use :func:`members_of`, which limits memory."""
ENTRIES = msgspec.json.Decoder(list[Raw])
OBJECTS = msgspec.json.Decoder(list[dict[str, Raw]])
_STRING = msgspec.json.Decoder(str)
_valid = msgspec.json.Decoder(Raw)
_BETWEEN = {1: re.compile(rb"\]\s*,\s*\["), 2: re.compile(rb"\]\s*\]\s*,\s*\[\s*\[")}


class JsonError(ValueError):
    """The text is not valid JSON, or would take too much memory, as the message explains."""


def decoded(decoder: msgspec.json.Decoder[T], raw: Json, prefix: str = "") -> T:
    """Decode JSON. Raises: JsonError, it is invalid; the message begins with ``prefix``."""
    try:
        return decoder.decode(raw)
    except (ValueError, RecursionError) as error:
        raise JsonError(f"{prefix}{error}") from error


def members_of(body: bytes | bytearray) -> dict[str, Raw]:
    """Split an object into its members by name; the last wins for duplicates, as in Python.
    Raises: JsonError, it is not an object, or contains too many values."""
    _check_utf8(body)
    _check_density(body, b'{["')
    if first_byte(body) not in (b"{", b""):
        raise JsonError("it must be a JSON object")
    return decoded(MEMBERS, body, "not valid JSON: ")


def entries_of(raw: Raw) -> list[Raw]:
    """Split a list. Raises: JsonError, it is not a list, or has too many values."""
    _check_density(memoryview(raw), b'{[",')
    return decoded(ENTRIES, raw)


def members_of_entry(raw: Raw) -> dict[str, Raw]:
    """Split an object inside a checked body; empty for any other value. Raises: JsonError, it has
    too many values."""
    if first_byte(raw) != b"{":
        return {}
    _check_density(memoryview(raw), b'{["')
    return decoded(MEMBERS, raw)


def number_lists_of(raw: Raw, depth: int, most: int) -> list[bytes]:
    """Split a list of number lists, each ``depth`` deep (1: token ids, 2: embeddings). A result of
    ``most`` + 1 entries means that there are too many; the last is then not split. Raises:
    JsonError, it contains something else."""
    body = bytes(raw).strip()
    if b'"' in body:
        raise JsonError("there is text among its numbers")
    inner = body[1:-1].strip()
    for _ in range(depth):
        inner = inner[1:-1].strip() if inner[:1] == b"[" and inner[-1:] == b"]" else b""
    if not inner:
        return [bytes(entry) for entry in entries_of(raw)]
    pieces = _BETWEEN[depth].split(inner, maxsplit=most)
    if len(pieces) > most:
        return pieces
    entries = [b"[" * depth + piece + b"]" * depth for piece in pieces]
    for entry in entries:
        decoded(_valid, entry)
    return entries


def value_of(raw: Raw | bytes | bytearray) -> Any:
    """Convert to Python objects. Raises: JsonError, it is invalid, or has too many values."""
    if first_byte(raw) == b'"':
        return decoded(_STRING, raw, "not valid JSON: ")  # orjson copies it, and reserves 12 times
    view = memoryview(raw)
    _check_density(view, b'{[",')
    try:
        return orjson.loads(view)
    except orjson.JSONDecodeError as error:
        raise JsonError(f"not valid JSON: {error}") from error


def token_ids_of(raw: Raw | bytes) -> array[int] | None:
    """Convert a list of token ids to uint32; ``None`` if an entry is not a token id."""
    view = memoryview(raw)
    if bytes(view[:1]) != b"[" or bytes(view[-1:]) != b"]":
        view = memoryview(bytes(raw).strip())
    ids = array("I")
    start, last = 1, len(view) - 1
    try:
        while start < last:
            piece = bytes(view[start : min(start + _IDS_BYTES, last)])
            if start + len(piece) < last:
                piece = piece[: piece.rindex(b",")]
            ids.extend(orjson.loads(b"[%b]" % piece))
            start += len(piece) + 1
    except (ValueError, TypeError, OverflowError):
        return None
    return ids


def json_of_ids(ids: array[int]) -> bytes:
    parts = (ids[at : at + _SMALL_BYTES].tolist() for at in range(0, len(ids), _SMALL_BYTES))
    return b"[%b]" % b",".join(orjson.dumps(part)[1:-1] for part in parts)


def first_byte(raw: Raw | bytes | bytearray, position: int = 0) -> bytes:
    """Return the first byte of a value: ``{``, ``[``, ``"``, or the start of a number or word.
    ``position`` 1 selects the first entry of a list, 2 the first entry of that."""
    view = memoryview(raw)
    if not position and (first := bytes(view[:1])) > b" ":
        return first
    for size in (_HEAD_BYTES, _SMALL_BYTES):  # more white space than the head is rare
        head = bytes(view[:size])
        for _ in range(position):
            head = head.lstrip()[1:]
        if first := head.lstrip()[:1]:
            break
    return first


def is_null(raw: Raw) -> bool:
    return len(memoryview(raw)) == 4 and bytes(raw) == b"null"


Members = Iterable[tuple[str, Raw]] | Iterable[tuple[str, Raw | bytes]]


def joined(members: Members) -> bytes | bytearray:
    """Join members as ``"name":value`` with commas, copying them once."""
    pieces = member_pieces(members)
    # Every other piece is a colon or a comma.
    if sum([len(memoryview(piece)) for piece in pieces[::2]]) <= _PIECE_BYTES:
        return b"".join(pieces)
    whole = bytearray()
    for piece in pieces:
        view = memoryview(piece)
        for at in range(0, len(view), _PIECE_BYTES):
            whole += view[at : at + _PIECE_BYTES]
    return whole


def list_of(values: Iterable[bytes | bytearray]) -> bytes:
    pieces = [piece for value in values for piece in (b",", value)]
    return b"".join((b"[", *pieces[1:], b"]"))


def member_pieces(members: Members) -> list[bytes | Raw]:
    pieces = [piece for name, raw in members for piece in (b",", orjson.dumps(name), b":", raw)]
    return pieces[1:]


def count_outside_strings(
    body: bytes | bytearray | memoryview, characters: bytes
) -> dict[int, int]:
    """Count each of ``characters`` in JSON outside its strings; quotes are counted as well."""
    counts = dict.fromkeys(characters, 0)
    inside, carried = False, b""
    for piece in _pieces(body, _SPLIT_BYTES):
        text = (carried + piece).replace(b"\\\\", b"")
        carried = b"\\" if text.endswith(b"\\") else b""
        parts = text.removesuffix(b"\\").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[inside::2])
        for code in counts:
            counts[code] += len(parts) - 1 if code == ord('"') else outside.count(code)
        inside ^= len(parts) % 2 == 0
    return counts


def _check_density(body: bytes | bytearray | memoryview, characters: bytes) -> None:
    """Check the memory that the parsed objects would take. ``characters``: those that make objects.
    Raises: JsonError, it is far more than the JSON (``_GROWTH``)."""
    size = len(body)
    if size <= _SMALL_BYTES:
        return
    most = _FREE_BYTES + _GROWTH * size
    at_most = dict.fromkeys(characters, 0)
    for piece in _pieces(body):
        for code in at_most:
            at_most[code] += piece.count(code)
    if _objects_bytes(at_most) <= most:
        return
    needed = _objects_bytes(count_outside_strings(body, characters))
    if needed > most:
        why = f"they would take {needed >> 20} MiB (the limit for that size is {most >> 20} MiB)"
        raise JsonError(f"too many values in {size} bytes of JSON: {why}")


def _objects_bytes(counts: Mapping[int, int]) -> int:
    return sum(_OBJECT_BYTES[code] * count for code, count in counts.items())


def _pieces(body: bytes | bytearray | memoryview, size: int = _PIECE_BYTES) -> Iterator[bytes]:
    view = memoryview(body)
    return (bytes(view[at : at + size]) for at in range(0, len(view), size))


def _check_utf8(body: bytes | bytearray) -> None:
    if body.isascii():
        return
    try:
        for _ in codecs.iterdecode(_pieces(body), "utf-8"):
            pass
    except UnicodeDecodeError as error:
        raise JsonError(f"not valid JSON: {error.reason} in its UTF-8") from error
