"""Hides secrets in an engine's ``/server_info`` from holders of the inference key, and in pages,
logs, metrics and the doctor's report.

Launch flags can hold passwords and tokens under any name. A field whose name suggests a secret is
hidden, whatever its type. In fields without a schema (``*_config``, ``*_kwargs``, environment,
headers), including JSON in a string, only numbers and booleans are shown."""

from __future__ import annotations

import re
from typing import Any

import orjson

HIDDEN = None
_MOST_DEPTH = 24
_LONGEST_TEXT = 1 << 20
_SECRET_WORDS = frozenset({
    "key", "keys", "apikey", "apikeys", "token", "tokens", "secret", "secrets", "password",
    "passwords", "passwd", "passphrase", "pwd", "pass", "credential", "credentials", "cred",
    "creds", "auth", "authorization", "bearer", "cookie", "cookies", "jwt", "sas", "signature",
    "private",
})  # fmt: skip
_IN_ONE_WORD = ("apikey", "password", "passwd", "secret", "credential")
_COUNTED = frozenset({"key", "keys", "token", "tokens"})
_COUNTS = frozenset({
    "max", "min", "num", "number", "total", "prefill", "decode", "cached", "chunked", "page", "new",
    "input", "output", "prompt", "completion", "req", "len", "length", "size", "per", "count",
    "counts", "usage", "id", "ids", "limit", "ratio", "budget", "draft", "speculative", "gen",
    "clip", "batch", "kv",
})  # fmt: skip
"""Words that mark a number as a count, although its name also has a word such as "tokens"."""
_OPEN = re.compile(
    r"_(?:config|configs|args|kwargs|options|opts|params|env|envs|environ|environment|headers|"
    r"metadata|labels|extra)$|^(?:env|envs|environ|environment|headers|metadata|labels|args|argv)$"
)
_SHOWN_OPEN = frozenset({"kv_events_config"})
"""Fields that match ``_OPEN`` but are shown, because the doctor reads the publisher and its
endpoints there. Names inside are still checked."""
_NAME_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_IN_URL = re.compile(r"(?<=://)[^/\s@]*@")
_IN_TEXT = re.compile(
    # Bounded and without backtracking, and flags start only at their own beginning, because texts
    # may be hostile.
    r"((?:api[_-]?key|token|secret|passw(?:or)?d|passphrase|pwd|credentials?|signature|\bsig|"
    r"authorization)[\w-]{0,64}+[\"']?\s*+[=:]\s*+|"
    r"(?<![\w-])--[\w-]{0,64}(?:key|token|secret|password)s?\s++)"
    r"((?:bearer\s++|basic\s++)?(?:\"[^\"]*\"|'[^']*'|[\"']?[^\s&\"',;}]+))",
    re.IGNORECASE,
)
_HOW_MANY = re.compile(r"tokens[\"']?\s*[=:]\s*(?:[0-9][0-9.,]*|value|input|field)", re.IGNORECASE)
"""Matches a number of tokens, or the beginning of pydantic's message about one ("Value error",
"Field required")."""
_BEARER = re.compile(r"\b(bearer|basic)\s++\S+", re.IGNORECASE)


def names_secret(name: str, value: Any = "") -> bool:
    """Return whether ``value`` must be hidden because ``name``, in any spelling, suggests a secret.
    Numbers whose names suggest a count of tokens or keys are shown."""
    parts = [part.lower() for part in _NAME_PARTS.findall(name.replace("-", "_"))]
    found = _SECRET_WORDS.intersection(parts)
    if not found:
        joined = "".join(parts)
        return any(word in joined for word in _IN_ONE_WORD)
    is_number = isinstance(value, int | float)
    return not (is_number and found <= _COUNTED and not _COUNTS.isdisjoint(parts))


def without_secrets(value: Any) -> Any:
    """Return a copy of an engine's JSON with ``None`` in place of possible secrets."""
    return _shown(value, free=False, depth=0)


def _shown(value: Any, *, free: bool, depth: int) -> Any:
    """Return a copy of a value without secrets. ``free``: it is inside a field without a schema,
    where all strings are hidden."""
    if depth > _MOST_DEPTH:
        return HIDDEN
    if isinstance(value, dict):
        return {
            text_without_secrets(key): _field(key, item, free=free, depth=depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list):
        shown, after_flag = [], False
        for item in value:
            # In a command line a flag is followed by its value.
            is_flag = isinstance(item, str) and item.startswith("-")
            shown.append(HIDDEN if after_flag else _shown(item, free=free, depth=depth + 1))
            after_flag = is_flag and "=" not in item and names_secret(item)
        return shown
    if isinstance(value, str):
        return _string(value, free=free, depth=depth)
    return value


def _field(name: str, value: Any, *, free: bool, depth: int) -> Any:
    if names_secret(name, value):
        return value if value is None or isinstance(value, bool) else HIDDEN
    opens = _OPEN.search(name.lower()) is not None and name not in _SHOWN_OPEN
    return _shown(value, free=free or opens, depth=depth)


def _string(text: str, *, free: bool, depth: int) -> Any:
    """Return a string without secrets, or ``HIDDEN``. JSON inside it is parsed and written
    again."""
    if len(text) > _LONGEST_TEXT:
        return HIDDEN
    if text.lstrip()[:1] in ("{", "["):
        try:
            inner = orjson.loads(text)
        except orjson.JSONDecodeError:
            return HIDDEN if free else text_without_secrets(text)
        return orjson.dumps(_shown(inner, free=free, depth=depth + 1)).decode()
    return HIDDEN if free else text_without_secrets(text)


def text_without_secrets(text: str) -> str:
    """Hide passwords in URLs, and values after words such as ``token=`` or ``--api-key``."""
    text = _IN_URL.sub("***@", text)
    return _BEARER.sub(r"\1 ***", _IN_TEXT.sub(_hidden, text))


def beginning_without_secrets(raw: bytes, most: int) -> str:
    """Return the first ``most`` bytes of an engine's response as text for an error message."""
    return text_without_secrets(raw[:most].decode("utf-8", "replace").strip())


def _hidden(found: re.Match[str]) -> str:
    """Return the replacement of a match of ``_IN_TEXT``: the value is hidden, unless it is a number
    of tokens or an error message about one."""
    counts = _HOW_MANY.fullmatch(found[0], found[0].lower().rfind("tokens"))
    return found[0] if counts else f"{found[1]}***"
