"""Accepts tokens of an identity provider (OIDC, JWT) as control-plane keys. Needs the extra
``jwt``, which is imported only when used.

The rules follow ``sglang_router`` 0.3.2 (``src/auth/jwt.rs``, ``jwks.rs``). Signatures are RSA or
ECDSA, by a key that the token names and only with that key's algorithm. Issuer, audience and expiry
are checked, and the role comes from ``roles`` (or ``role``, ``groups``, ``group``). This module
additionally rejects all tokens while no signing keys are known, limits fetches for unknown key
names, and checks ``nbf``."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import aiohttp

from sglang_sbs.router.engines.control_requests import ask
from sglang_sbs.router.options.keys import JwtConfig, Principal, Role, check_provider_url

if TYPE_CHECKING:
    from jwt import PyJWK

logger = logging.getLogger(__name__)

ALGORITHMS = frozenset({"RS256", "RS384", "RS512", "ES256", "ES384"})
"""Accepted algorithms of signatures. All use public keys: with a symmetric key, a verifier could
also forge tokens."""
LEEWAY_S = 30.0
"""Tolerated clock skew between the provider and this machine."""
KEYS_LIVE_S = 3600.0
KEYS_KEPT_S = 2 * KEYS_LIVE_S
"""Age up to which signing keys are used while the provider is unreachable."""
ASK_AGAIN_S = 10.0
"""Shortest time between two fetches of the signing keys because of an unknown key or a failure."""
_FETCH_S = 10.0
_LARGEST_BYTES = 1 << 20
_OTHER_ROLE_CLAIMS = ("role", "groups", "group")


class TokenError(ValueError):
    """The token is invalid; the message may be shown to its bearer."""


class ProviderError(RuntimeError):
    """The identity provider is unreachable or its response is invalid, so no token can be
    checked."""


class SigningKeys:
    """The provider's public keys by name. All are fetched when one is needed, in one request at a
    time."""

    def __init__(self, config: JwtConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._keys: dict[str, PyJWK] = {}
        self._fetched_s = self._asked_s = -math.inf
        self._lock = asyncio.Lock()

    async def get(self, name: str) -> PyJWK:
        """Return the key of that name. Raises: TokenError, the provider has no such key;
        ProviderError, no keys are known and it cannot be asked."""
        if not self._fresh or name not in self._keys:
            async with self._lock:
                if not self._fresh or name not in self._keys:
                    await self._refresh()
        key = self._keys.get(name)
        if key is None:
            raise TokenError("signed with a key that the issuer does not have")
        return key

    @property
    def _fresh(self) -> bool:
        return self._clock() - self._fetched_s < KEYS_LIVE_S

    async def _refresh(self) -> None:
        now_s = self._clock()
        if now_s - self._asked_s >= ASK_AGAIN_S:
            self._asked_s = now_s
            try:
                self._keys = await self._fetch()
                self._fetched_s = self._clock()
                return
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                text = str(error) or type(error).__name__
                logger.error("no signing keys of %s: %s", self._config.issuer, text)
                # Those that waited for this attempt must not each wait for one of their own.
                self._asked_s = self._clock()
        if self._clock() - self._fetched_s >= KEYS_KEPT_S:
            self._keys.clear()
            raise ProviderError("the identity provider cannot be asked for its signing keys")

    async def _fetch(self) -> dict[str, PyJWK]:
        """Fetch all usable signing keys, by name. Raises: ClientError, OSError or TimeoutError,
        there was no response; ValueError, it is invalid."""
        from jwt import PyJWK, PyJWTError

        async with aiohttp.ClientSession(trust_env=True) as session:
            url = self._config.jwks_uri or await self._discover(session)
            found = (await _get(session, url)).get("keys")
        if not isinstance(found, list):
            raise ValueError(f"{url} has no list of keys")
        keys: dict[str, PyJWK] = {}
        for entry in found:
            if not isinstance(entry, dict) or entry.get("use", "sig") != "sig":
                continue
            try:
                key = PyJWK.from_dict(entry)
            except (PyJWTError, ValueError, TypeError) as error:
                logger.warning("a key of %s cannot be used: %s", url, error)
                continue
            if key.key_id and key.algorithm_name in ALGORITHMS:
                keys[key.key_id] = key
        logger.info("%d signing keys of %s", len(keys), self._config.issuer)
        return keys

    async def _discover(self, session: aiohttp.ClientSession) -> str:
        """Find the URL of the signing keys (OpenID Connect Discovery 1.0, section 4). Raises: as
        :meth:`_fetch`."""
        issuer = self._config.issuer.rstrip("/")
        document = await _get(session, f"{issuer}/.well-known/openid-configuration")
        if str(document.get("issuer", "")).rstrip("/") != issuer:
            raise ValueError(f"{issuer} calls itself {document.get('issuer')!r}")
        return check_provider_url(str(document.get("jwks_uri", "")))


async def _get(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    status, raw = await ask(session, "GET", url, timeout_s=_FETCH_S, most_bytes=_LARGEST_BYTES)
    if status != 200:
        raise ValueError(f"{url}: HTTP {status}")
    value = json.loads(raw)
    if not isinstance(value, dict):
        raise ValueError(f"{url}: not a JSON object")
    return value


class TokenCheck:
    def __init__(self, config: JwtConfig, keys: SigningKeys | None = None) -> None:
        self._config = config
        self.keys = keys or SigningKeys(config)

    async def principal(self, token: str) -> Principal:
        """Verify a token and return its owner. Raises: TokenError, it is invalid; ProviderError, it
        cannot be checked now."""
        import jwt

        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError as error:
            raise TokenError(str(error)) from None
        name = header.get("kid")
        if not isinstance(name, str):
            raise TokenError("its header names no key (kid)")
        key = await self.keys.get(name)
        if header.get("alg") != key.algorithm_name:
            raise TokenError(f"signed with {header.get('alg')}, its key is for another algorithm")
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=self._config.audience,
                issuer=self._config.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.PyJWTError as error:
            raise TokenError(str(error)) from None
        names = (claims.get(name) for name in ("sub", "email", "preferred_username"))
        who = str(next(filter(None, names), "unknown"))
        shown = claims.get("name")
        return Principal(who, shown if isinstance(shown, str) else "", self._role(claims))

    def _role(self, claims: Mapping[str, Any]) -> Role:
        """Return ``admin`` if any role in the claims stands for it, else ``user``."""
        present = ("roles",) if "roles" in claims else _OTHER_ROLE_CLAIMS
        names = [text for claim in present for text in _texts(claims.get(claim))]
        roles = self._config.roles
        own = [roles.get(name, "user") if roles else name.lower() for name in names]
        return "admin" if "admin" in own else "user"


def _texts(claim: Any) -> list[str]:
    if isinstance(claim, str):
        return [claim]
    return [text for text in claim if isinstance(text, str)] if isinstance(claim, list) else []
