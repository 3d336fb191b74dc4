"""Controls access: bearer keys, roles and the audit log.

Control-plane paths (workers, caches, loads, aborts) need a key or token with the role ``admin`` if
any such key or provider is configured, else the API key like all other paths. Every configured key
is compared, in constant time, and keys never leave this module: the audit log has ids."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import web

from sglang_sbs.dashboard import pages
from sglang_sbs.router.api.identity import TokenCheck
from sglang_sbs.router.errors import error_style
from sglang_sbs.router.options.keys import ControlKey, Principal
from sglang_sbs.router.requests.headers import KEY_HEADER

logger = logging.getLogger("sglang_sbs.audit")

CONTROL_PLANE = (
    "/workers", "/policy", "/trial", "/requests/", "/flush_cache", "/get_loads", "/v1/loads",
    "/abort_request", pages.EVENTS_PATH, pages.WELL_PATH,
)  # fmt: skip
"""Prefixes of the paths that change or show the cluster."""
OPEN_PATHS = pages.OPEN_PATHS | {
    "/health", "/liveness", "/readiness", "/health_generate",
    "/v1/models", "/model_info", "/get_model_info", "/engine_metrics",
}  # fmt: skip
"""Paths served without a key, as in sglang_router. The dashboard page itself shows no data: it asks
for the key and sends it with its own request."""
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="control-plane"'}


@dataclass(frozen=True, repr=False)
class Access:
    api_key: str | None
    control_keys: Sequence[ControlKey]
    audit: bool = False
    tokens: TokenCheck | None = None

    @property
    def open_to_all(self) -> bool:
        return self.api_key is None and not self.control_keys and self.tokens is None

    async def refusal(
        self, method: str, path: str, headers: Mapping[str, str], request_id: str
    ) -> web.Response | None:
        """Return the error response for an unauthorized request; ``None`` if it is allowed."""
        controls = bool(self.control_keys or self.tokens) and path.startswith(CONTROL_PLANE)
        if not controls and (self.api_key is None or path in OPEN_PATHS):
            return None
        given = _bearer(headers)
        if given is None and error_style(path) == "anthropic" and KEY_HEADER in headers:
            given = headers[KEY_HEADER].encode("utf-8", "surrogateescape")
        if controls:
            found = await self._judged(given)
            who = found if isinstance(found, Principal) else None
            refused = found if isinstance(found, web.Response) else None
            if who is not None and who.role != "admin":
                text = "Admin role required for control plane access"
                refused = web.Response(status=403, text=text)
            if self.audit:
                outcome = "success" if refused is None else "denied"
                _record(method, path, request_id, who, outcome)
            return refused
        key = self.api_key
        if key is not None and given is not None and hmac.compare_digest(given, key.encode()):
            return None
        return web.Response(status=401)

    async def _judged(self, given: bytes | None) -> Principal | web.Response:
        """Return the owner of a control-plane credential, or the error response."""
        if given is None:
            return _unauthorized("Missing or invalid Authorization header")
        found = None
        for candidate in self.control_keys:
            if hmac.compare_digest(given, candidate.key.encode()):
                found = candidate
        if found is not None:
            return found
        if self.tokens is None or given.count(b".") != 2:  # a token has three parts
            return _unauthorized("Invalid authentication token")
        try:
            return await self.tokens.principal(given.decode("ascii", "replace"))
        except ValueError as error:
            return _unauthorized(f"Invalid JWT: {error}")
        except RuntimeError as error:
            return web.Response(status=503, text=str(error), headers={"Retry-After": "10"})


def _unauthorized(text: str) -> web.Response:
    return web.Response(status=401, text=text, headers=_CHALLENGE)


def _record(method: str, path: str, request_id: str, who: Principal | None, outcome: str) -> None:
    """Log an access to the control plane as one line of JSON, so that clients cannot forge log
    lines."""
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
    """Return whether a ``Host`` header (lower case) certainly names this machine. True for IP
    addresses and for names that do not come from public DNS. Any other name could belong to a
    foreign page that resolves it to this address (DNS rebinding) and would share the router's
    origin."""
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
    # Header bytes that are not UTF-8 arrive as surrogates.
    return value.strip().encode("utf-8", "surrogateescape")
