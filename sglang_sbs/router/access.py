"""Who may do what: bearer keys, roles, the audit log.

Owns the keys and the decision on each request. Must not know what lies behind a path. The control
plane (workers, caches, loads, aborts) wants a key with the role ``admin`` as soon as there is one;
without any it wants the API key, as everything else does. Keys are compared in constant time, all
of them whichever fits, and never leave this module: the audit log names a key by its id.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from aiohttp import web

logger = logging.getLogger("sglang_sbs.audit")

Role = Literal["admin", "user"]

CONTROL_PLANE = ("/workers", "/flush_cache", "/get_loads", "/v1/loads", "/abort_request")
"""Paths that begin like this change or show the cluster."""
OPEN_PATHS = frozenset(
    {
        *("/health", "/liveness", "/readiness", "/health_generate"),
        *("/v1/models", "/model_info", "/get_model_info", "/engine_metrics"),
    }
)
"""Served without a key, as sglang_router does."""


@dataclass(frozen=True, slots=True)
class ControlKey:
    """One of ``--control-plane-api-keys``."""

    id: str
    name: str
    role: Role
    key: str = field(repr=False)


def parse_control_key(text: str) -> ControlKey:
    """``ID:NAME:ROLE:KEY``; the key may hold colons.

    Raises:
        ValueError: not of that form. The message does not repeat the key.
    """
    parts = text.split(":", 3)
    if len(parts) != 4 or not parts[0] or not parts[3]:
        raise ValueError("write ID:NAME:ROLE:KEY, e.g. ops:Operations:admin:SECRET")
    role = parts[2].lower()
    if role not in ("admin", "user"):
        raise ValueError(f"the role of key {parts[0]!r} must be admin or user, not {parts[2]!r}")
    return ControlKey(parts[0], parts[1], "admin" if role == "admin" else "user", parts[3])


class Access:
    def __init__(
        self,
        api_key: str | None,
        control_keys: Sequence[ControlKey],
        *,
        audit: bool = False,
    ) -> None:
        self._api_key = api_key
        self._control_keys = tuple(control_keys)
        self._audit = audit

    def refusal(
        self, method: str, path: str, headers: Mapping[str, str], request_id: str
    ) -> web.Response | None:
        """The answer to a request that may not pass; ``None`` if it may."""
        if self._control_keys and path.startswith(CONTROL_PLANE):
            return self._control(method, path, headers, request_id)
        if self._api_key is None or path in OPEN_PATHS:
            return None
        given = _bearer(headers)
        if given is not None and hmac.compare_digest(given, self._api_key.encode()):
            return None
        return web.Response(status=401)

    def _control(
        self, method: str, path: str, headers: Mapping[str, str], request_id: str
    ) -> web.Response | None:
        given = _bearer(headers)
        found = None
        for candidate in self._control_keys:
            if given is not None and hmac.compare_digest(given, candidate.key.encode()):
                found = candidate
        if found is not None and found.role == "admin":
            self._record(method, path, request_id, found, "success")
            return None
        if found is not None:
            text = "Admin role required for control plane access"
            self._record(method, path, request_id, found, "denied")
            return web.Response(status=403, text=text)
        self._record(method, path, request_id, None, "denied")
        missing = "Missing or invalid Authorization header"
        return web.Response(
            status=401,
            text=missing if given is None else "Invalid authentication token",
            headers={"WWW-Authenticate": 'Bearer realm="control-plane"'},
        )

    def _record(
        self, method: str, path: str, request_id: str, who: ControlKey | None, outcome: str
    ) -> None:
        """One line of JSON, so that nothing a client sends can forge another line."""
        if not self._audit:
            return
        record = {
            "principal": who.id if who else "unauthenticated",
            "name": who.name if who else None,
            "role": who.role if who else None,
            "method": method,
            "path": path[:1024],
            "outcome": outcome,
            "request_id": request_id[:1024],
        }
        logger.info("control_plane_audit %s", json.dumps(record))


def _bearer(headers: Mapping[str, str]) -> bytes | None:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return None
    # Header bytes that are no UTF-8 arrive as surrogates.
    return value.strip().encode("utf-8", "surrogateescape")
