"""Converts the fields of a request body to values, and checks those with rules of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.limits import clamped_count
from sglang_sbs.router.requests import raw_json
from sglang_sbs.router.requests.raw_json import Raw

_SCALAR_BYTES = 64
_NAME_BYTES = 1 << 16
_MOST_RID_CHARS = 1024
_MOST_SHOWN_BYTES = 100
"""Bytes of a bad value quoted in an error message."""
MOST_FIELDS = 1 << 14
"""Limit on the members of a JSON object: a hostile body may have half a million."""
BESIDES_PROMPT = frozenset(
    {"image_data", "video_data", "audio_data", "embed_overrides", "session_params"}
)
"""Fields that add to the prompt: with any of them, the engine's prompt is more than text or ids."""
NAMESPACE_FIELDS = ("cache_salt", "extra_key", "lora_path")
_TEXT_MEMBERS = ("content", "arguments", "output", "summary")

Value = bool | int | float | str | Raw | bytes | None
"""A field's value. Lists, objects and any value over 64 bytes stay JSON (``Raw`` or ``bytes``)."""
Fields = Mapping[str, Value]
_JSON = Raw, bytes
_value_of: Callable[[Raw | bytes], Any] = msgspec.json.Decoder().decode


def typed(raw: Raw | bytes) -> Value:
    if len(memoryview(raw)) > _SCALAR_BYTES:
        return raw
    try:
        value = _value_of(raw)
    except ValueError:  # half a surrogate pair, or a number beyond any float
        with suppress(ValueError):
            return float(bytes(raw))
        return raw
    return raw if type(value) in (list, dict) else value


def typed_fields(members: Mapping[str, Raw | bytes]) -> dict[str, Value]:
    return {name: typed(raw) for name, raw in members.items()}


class Body(dict[str, Raw]):
    """The members of a JSON object as pieces of its text, and their values in :attr:`typed`.
    Members may be removed or replaced; the values stay those of the client."""

    def __init__(self, members: Mapping[str, Raw]) -> None:
        """Convert the values. Raises: RouterError (400), more than ``MOST_FIELDS`` members."""
        if len(members) > MOST_FIELDS:
            raise bad_request(f"{len(members)} fields in one object are over {MOST_FIELDS}")
        super().__init__(members)
        self.typed = typed_fields(members)


@dataclass(frozen=True, slots=True)
class Namespace:
    """Fields that keep equal tokens of different requests apart in an engine's cache."""

    cache_salt: str | None = None
    extra_key: str | None = None
    lora: str | None = None


PLAIN = Namespace()


def bad_request(message: str, code: str = "invalid_request") -> RouterError:
    return RouterError(400, code, message)


def is_true(value: Value) -> bool:
    """Return the value's truth as in Python; but ``[ ]`` and ``{ }``, with a space, are true."""
    if isinstance(value, _JSON):
        return bytes(memoryview(value)[:3]) not in (b"[]", b"{}")
    return bool(value)


def is_text(value: Value) -> bool:
    return isinstance(value, str) or _begins(value, b'"')


def is_list(value: Value) -> bool:
    return _begins(value, b"[")


def _begins(value: Value, first: bytes) -> bool:
    return isinstance(value, _JSON) and raw_json.first_byte(value) == first


def shown(value: Value) -> str:
    """Return the beginning of a value as JSON, for an error message."""
    if isinstance(value, _JSON):
        view = memoryview(value)
        text = bytes(view[:_MOST_SHOWN_BYTES]).decode("utf-8", "replace")
        return text + ("..." if len(view) > _MOST_SHOWN_BYTES else "")
    return str(value) if isinstance(value, float) else msgspec.json.encode(value).decode()


def stream_of(fields: Fields) -> bool:
    stream = fields.get("stream")
    if is_true(stream) and stream is not True:
        raise bad_request(f"stream must be true or false, not {shown(stream)}")
    return stream is True


def rids_of(rid: Value, units: int) -> tuple[str, ...]:
    if rid is None:
        return ()
    if isinstance(rid, Raw) and is_list(rid):
        entries = raw_json.count_outside_strings(memoryview(rid), b'",')[ord(",")] + 1
        if entries > units:
            raise bad_request(f"rid has {entries} entries for {units} requests")
    value: Any = raw_json.value_of(rid) if isinstance(rid, Raw) else rid
    rids = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str) for item in rids):
        raise bad_request("rid must be a string or a list of strings")
    if any(len(item) > _MOST_RID_CHARS for item in rids):
        raise bad_request(f"a rid must not be longer than {_MOST_RID_CHARS} characters")
    return tuple(rids)


def any_true(value: Value) -> bool:
    """Return whether a value is true, or any entry if it is a list."""
    if isinstance(value, Raw) and is_list(value):
        return any(is_true(typed(entry)) for entry in raw_json.entries_of(value))
    return is_true(value)


def is_alone(fields: Fields) -> bool:
    return not any(is_true(fields[name]) for name in BESIDES_PROMPT.intersection(fields))


def namespace_of(fields: Fields) -> Namespace | None:
    """Return the request's namespace in the KV cache; ``None`` if it is unclear (lists, unexpected
    types)."""
    given = [name for name in NAMESPACE_FIELDS if is_true(fields.get(name))]
    if not given:
        return PLAIN
    parts = {name: text_of(fields, name) for name in given}
    if not all(parts.values()):
        return None
    return Namespace(*map(parts.get, NAMESPACE_FIELDS))


def priority_of(fields: Fields) -> int:
    value = fields.get("priority")
    if value is None:
        return 0
    if type(value) is not int or value.bit_length() > 64:
        raise bad_request(f"priority must be a whole number, as in 1, not {shown(value)}")
    return value


def text_of(fields: Fields, name: str) -> str:
    """Return the text of a field; empty if it is missing, not a text, or over 64 KiB of JSON."""
    value = fields.get(name)
    if isinstance(value, Raw) and is_text(value) and len(memoryview(value)) <= _NAME_BYTES:
        value = raw_json.value_of(value)
    return value if isinstance(value, str) else ""


def text_bytes_of(messages: Raw) -> int:
    """Return the size of the text (as JSON, without media) in a chat's messages or a response's
    items."""
    entries = map(raw_json.members_of_entry, raw_json.entries_of(messages))
    return sum(_content_bytes(entry.get(name)) for entry in entries for name in _TEXT_MEMBERS)


def _content_bytes(content: Raw | None, depth: int = 0) -> int:
    """Return the size of the text in a message's content, in bytes of JSON. ``depth``: nesting of
    the content, as in Anthropic's tool results."""
    if content is None:
        return 0
    if raw_json.first_byte(content) == b'"':
        return len(memoryview(content))
    if raw_json.first_byte(content) != b"[" or depth > 1:
        return 0
    size = 0
    for part in map(raw_json.members_of_entry, raw_json.entries_of(content)):
        size += len(memoryview(part["text"])) if "text" in part else 0
        size += _content_bytes(part.get("content"), depth + 1)
    return size


def output_limit(value: Value) -> int | None:
    """Return a limit on output tokens for the scheduler; ``None`` if missing or invalid."""
    return clamped_count(value) if type(value) is int else None


def positive(name: str, value: Value) -> int:
    if value is None:
        return 1
    if type(value) is not int or value < 1:
        raise bad_request(f"{name} must be a whole number >= 1, not {shown(value)}")
    return value
