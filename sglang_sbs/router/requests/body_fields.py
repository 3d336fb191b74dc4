"""Reads and checks single fields of a request body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.limits import MAX_SESSION_CHARS, clamped_count
from sglang_sbs.router.requests import raw_json
from sglang_sbs.router.requests.raw_json import Raw

_SCALAR_BYTES = 64
_NAME_BYTES = 1 << 16
_MOST_RID_CHARS = 1024
BESIDES_PROMPT = frozenset(
    {"image_data", "video_data", "audio_data", "embed_overrides", "session_params"}
)
"""Fields that add to the prompt: with any of them the engine's prompt is more than the body's."""
NAMESPACE_FIELDS = ("cache_salt", "extra_key", "lora_path")
_TEXT_MEMBERS = ("content", "arguments", "output", "summary")

Fields = Mapping[str, Raw | bytes]


@dataclass(frozen=True, slots=True)
class Namespace:
    """Fields that keep equal tokens of different requests apart in an engine's cache."""

    cache_salt: str | None = None
    extra_key: str | None = None
    lora: str | None = None


PLAIN = Namespace()


def bad_request(message: str, code: str = "invalid_request") -> RouterError:
    return RouterError(400, code, message)


def given(body: Mapping[str, Raw], name: str) -> Raw | None:
    """Return a field; ``None`` if it is missing or null."""
    raw = body.get(name)
    return None if raw is None or raw_json.is_null(raw) else raw


def scalar(body: Mapping[str, Raw], name: str) -> Any:
    """Return a number or word; of a longer value only its beginning, for an error message."""
    raw = given(body, name)
    if raw is None:
        return None
    return raw_json.value_of(raw) if len(memoryview(raw)) <= _SCALAR_BYTES else raw_json.shown(raw)


def stream_of(body: Mapping[str, Raw]) -> bool:
    raw = given(body, "stream")
    if raw is None or not raw_json.is_true(raw):
        return False
    if bytes(memoryview(raw)[:5]) != b"true":
        raise bad_request(f"stream must be true or false, not {raw_json.shown(raw)}")
    return True


def rids_of(raw: Raw | None, units: int) -> tuple[str, ...]:
    if raw is None:
        return ()
    if raw_json.first_byte(raw) == b"[":
        entries = raw_json.count_outside_strings(memoryview(raw), b'",')[ord(",")] + 1
        if entries > units:
            raise bad_request(f"rid has {entries} entries for {units} requests")
        rids = raw_json.value_of(raw)
    else:
        rids = [raw_json.value_of(raw)]
    if not all(isinstance(item, str) for item in rids):
        raise bad_request("rid must be a string or a list of strings")
    if any(len(item) > _MOST_RID_CHARS for item in rids):
        raise bad_request(f"a rid must not be longer than {_MOST_RID_CHARS} characters")
    return tuple(rids)


def any_true(body: Mapping[str, Raw], name: str) -> bool:
    raw = body.get(name)
    if raw is not None and raw_json.first_byte(raw) == b"[":
        return any(map(raw_json.is_true, raw_json.entries_of(raw)))
    return raw_json.is_true(raw)


def is_alone(fields: Fields) -> bool:
    return not any(raw_json.is_true(fields[name]) for name in BESIDES_PROMPT if name in fields)


def namespace_of(fields: Fields) -> Namespace | None:
    """Return the cache namespace; ``None`` if it is unclear (lists, unexpected types)."""
    parts: list[str | None] = []
    for name in NAMESPACE_FIELDS:
        raw = fields.get(name)
        if raw is None or not raw_json.is_true(raw):
            parts.append(None)
            continue
        if raw_json.first_byte(raw) != b'"' or len(memoryview(raw)) > _NAME_BYTES:
            return None
        parts.append(raw_json.value_of(raw))
    return PLAIN if parts == [None, None, None] else Namespace(*parts)


def priority_of(body: Mapping[str, Raw]) -> int:
    raw = given(body, "priority")
    value = 0 if raw is None else scalar(body, "priority")
    if raw is not None and type(value) is not int:
        raise bad_request(f"priority must be a whole number, as in 1, not {raw_json.shown(raw)}")
    return int(value)


def text_of(body: Mapping[str, Raw], name: str) -> str:
    return whole_text_of(body, name)[:MAX_SESSION_CHARS]


def whole_text_of(body: Mapping[str, Raw], name: str) -> str:
    """Return a text; empty if it is not a text or is longer than any name."""
    raw = body.get(name)
    if raw is None or raw_json.first_byte(raw) != b'"' or len(memoryview(raw)) > _NAME_BYTES:
        return ""
    return str(raw_json.value_of(raw))


def text_bytes_of(messages: Raw) -> int:
    """Return the size as JSON of the text in a chat's messages or a response's items, without
    media."""
    entries = map(raw_json.members_of_entry, raw_json.entries_of(messages))
    return sum(_content_bytes(entry.get(name)) for entry in entries for name in _TEXT_MEMBERS)


def _content_bytes(content: Raw | None, depth: int = 0) -> int:
    """Return the size of a message's text; ``depth`` counts nested content, as in Anthropic's tool
    results."""
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


def output_limit(value: Any) -> int | None:
    """Return a limit on output tokens for the scheduler; invalid values are left to the engine."""
    return clamped_count(value) if type(value) is int else None


def positive(name: str, value: Any) -> int:
    if value is None:
        return 1
    if type(value) is not int or value < 1:
        scalar = isinstance(value, str | int | float)
        shown = str(value)[: raw_json.MOST_SHOWN] if scalar else f"a {type(value).__name__}"
        raise bad_request(f"{name} must be a whole number >= 1, not {shown}")
    return value
