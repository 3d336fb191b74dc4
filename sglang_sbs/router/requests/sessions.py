"""Finds the conversation of a request, by the names that clients give it.

Names and their senders (seen in the source of the client or of a router that reads it, except where
marked *believed*), in the order of :data:`HEADERS`, the body, then :data:`LAST_HEADER`:

- ``x-smg-routing-key``: clients of SGLang's routers
- ``x-dynamo-session-id``: clients of Dynamo, AIPerf with its Dynamo modes
- ``x-claude-code-session-id``: Claude Code from 2.1.86
- ``session-id`` (believed), ``session_id``, ``conversation_id`` (believed): Codex, by release
- ``x-session-id``: OpenCode and others
- ``session_id``, ``prompt_cache_key`` in the body: SGLang's and OpenAI's APIs
- ``metadata.user_id`` of ``/v1/messages``: Claude Code; other users of the field name a person
- ``x-correlation-id``: AIPerf, for all turns of a conversation; others for a single request"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import orjson

from sglang_sbs.router.requests import body_fields
from sglang_sbs.router.requests.body_fields import Body
from sglang_sbs.router.requests.raw_json import members_of_entry

HEADERS = (
    "x-smg-routing-key",
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "conversation_id",
    "x-session-id",
)
LAST_HEADER = "x-correlation-id"
"""Header used only if nothing else names a session, because most senders mean a single request."""
ALL_HEADERS = frozenset({*HEADERS, LAST_HEADER})
_FIELDS = ("session_id", "prompt_cache_key")
_MOST_METADATA_BYTES = 4096
_CLAUDE_CODE = re.compile(r".*_session_([0-9a-fA-F-]{36})", re.DOTALL)
"""Claude Code's ``user_id`` before it used JSON: ``user_HASH_account_UUID_session_UUID``."""
_DIGEST_BYTES = 16


def session_in_headers(headers: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return the session id in the headers (names in lower case), and the fallback from
    ``LAST_HEADER``; each is empty if missing."""
    given = {name: value.strip() for name, value in reversed(headers)}
    found = (given[name] for name in HEADERS if given.get(name))
    return next(found, ""), given.get(LAST_HEADER, "")


def session_in_body(body: Body, *, has_user: bool) -> str:
    """Return the session id in a body; empty if missing. ``has_user``: the body is for
    ``/v1/messages``, so ``metadata.user_id`` counts."""
    for name in _FIELDS:
        if session := body_fields.text_of(body.typed, name):
            return session
    return _session_of_user(body) if has_user else ""


def _session_of_user(body: Body) -> str:
    """Return the session id in ``metadata.user_id``, in either of Claude Code's formats; empty if
    missing. The rest of that field names a person or a device, which have many conversations."""
    metadata = body.get("metadata")
    if metadata is None or len(memoryview(metadata)) > _MOST_METADATA_BYTES:
        return ""
    user = body_fields.text_of(Body(members_of_entry(metadata)).typed, "user_id")
    if found := _CLAUDE_CODE.fullmatch(user):
        return found[1]
    try:
        session = orjson.loads(user).get("session_id")
    except (AttributeError, ValueError):
        return ""
    return session if isinstance(session, str) else ""


def digest_of(session: str) -> str:
    """Return the router's name of a session: bounded, equal on all front ends, and without the
    client's text, which may name a person, in event logs. Empty if there is no session."""
    if not session:
        return ""
    raw = session.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(raw, digest_size=_DIGEST_BYTES).hexdigest()
