"""Who may do what: bearer keys, roles, the audit log.

The control plane (workers, caches, loads, aborts) wants a key or a token with the role ``admin`` as
soon as there is any such key or provider; without it wants the API key, as everything else does.
Keys are compared in constant time, all of them whichever fits, and never leave this module: the
audit log names a key by its id.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol
from urllib.parse import urlsplit

from aiohttp import web

from sglang_sbs.router.options.keys import ControlKey, Principal

logger = logging.getLogger("sglang_sbs.audit")


CONTROL_PLANE = (
    *("/workers", "/flush_cache", "/get_loads", "/v1/loads", "/abort_request"),
    "/dashboard/events",
)
"""Paths that begin like this change or show the cluster."""
OPEN_PATHS = frozenset(
    {
        *("/health", "/liveness", "/readiness", "/health_generate"),
        *("/v1/models", "/model_info", "/get_model_info", "/engine_metrics"),
        # The page itself shows nothing: it asks for the key and sends it with its own request.
        *("/dashboard", "/dashboard/app.js", "/dashboard/stream.js", "/dashboard/heatmap.js"),
        *("/dashboard/charts.js", "/dashboard/style.css"),
    }
)
"""Served without a key, as sglang_router does (it has no dashboard)."""
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="control-plane"'}


class Tokens(Protocol):
    """What judges tokens: :class:`.identity.TokenCheck`."""

    async def principal(self, token: str) -> Principal:
        """Raises: ValueError, it is not good; RuntimeError, that cannot be found out now."""


class Access:
    def __init__(
        self,
        api_key: str | None,
        control_keys: Sequence[ControlKey],
        *,
        audit: bool = False,
        tokens: Tokens | None = None,
    ) -> None:
        self._api_key = api_key
        self._control_keys = tuple(control_keys)
        self._audit = audit
        self._tokens = tokens

    @property
    def open_to_all(self) -> bool:
        """No key or token is wanted for anything."""
        return self._api_key is None and not self._control_keys and self._tokens is None

    async def refusal_after_asking(
        self, method: str, path: str, headers: Mapping[str, str], request_id: str
    ) -> web.Response | None:
        """As :meth:`refusal`, for requests that may bring a token of an identity provider."""
        given = _bearer(headers)
        if (
            self._tokens is None
            or given is None
            or given.count(b".") != 2  # a token has three parts
            or not path.startswith(CONTROL_PLANE)
            or self._owner_of(given) is not None
        ):
            return self.refusal(method, path, headers, request_id)
        try:
            who = await self._tokens.principal(given.decode("ascii", "replace"))
        except ValueError as error:
            self._record(method, path, request_id, None, "denied")
            return web.Response(status=401, text=f"Invalid JWT: {error}", headers=_CHALLENGE)
        except RuntimeError as error:
            self._record(method, path, request_id, None, "denied")
            return web.Response(status=503, text=str(error), headers={"Retry-After": "10"})
        return self._judged(method, path, request_id, who)

    def refusal(
        self, method: str, path: str, headers: Mapping[str, str], request_id: str
    ) -> web.Response | None:
        """The answer to a request that may not pass; ``None`` if it may."""
        if (self._control_keys or self._tokens) and path.startswith(CONTROL_PLANE):
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
        found = None if given is None else self._owner_of(given)
        if found is not None:
            return self._judged(method, path, request_id, found)
        self._record(method, path, request_id, None, "denied")
        missing = "Missing or invalid Authorization header"
        return web.Response(
            status=401,
            text=missing if given is None else "Invalid authentication token",
            headers=_CHALLENGE,
        )

    def _owner_of(self, given: bytes) -> ControlKey | None:
        found = None
        for candidate in self._control_keys:
            if hmac.compare_digest(given, candidate.key.encode()):
                found = candidate
        return found

    def _judged(
        self, method: str, path: str, request_id: str, who: Principal
    ) -> web.Response | None:
        admin = who.role == "admin"
        self._record(method, path, request_id, who, "success" if admin else "denied")
        if admin:
            return None
        return web.Response(status=403, text="Admin role required for control plane access")

    def _record(
        self, method: str, path: str, request_id: str, who: Principal | None, outcome: str
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


def is_own_host(host: str, listens_at: str) -> bool:
    """Whether a ``Host`` header (lower case) can be nobody else's name for this machine.

    A page of elsewhere may have its own name resolve to this address (DNS rebinding): for the
    browser it is of one origin with the router then. An address, or a name that comes from no DNS
    of others, cannot be had so.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    if name in (listens_at.lower(), socket.gethostname().lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _bearer(headers: Mapping[str, str]) -> bytes | None:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return None
    # Header bytes that are no UTF-8 arrive as surrogates.
    return value.strip().encode("utf-8", "surrogateescape")
