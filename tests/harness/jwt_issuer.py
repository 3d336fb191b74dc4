"""An issuer of tokens at 127.0.0.1."""

from __future__ import annotations

import json
import time
from typing import Any

import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, rsa

AUDIENCE = "api://router"


class Issuer:
    """Discovery document, key set and tokens of an OIDC provider."""

    def __init__(self) -> None:
        self.private: dict[str, Any] = {}
        self.hidden: set[str] = set()
        """Keys that sign and are not published."""
        self.extra: list[Any] = []
        self.status = 200
        self.document: dict[str, Any] = {}
        self.raw: bytes | None = None
        self.asked: list[str] = []
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/.well-known/openid-configuration", self._discovery)
        app.router.add_get("/keys", self._keys)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self.document = {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        self.add_rsa("rsa-1")

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def add_rsa(self, name: str) -> None:
        self.private[name] = rsa.generate_private_key(public_exponent=65537, key_size=2048)

    def add_ec(self, name: str) -> None:
        self.private[name] = ec.generate_private_key(ec.SECP256R1())

    def token(self, key: str = "rsa-1", *, drop: tuple[str, ...] = (), **claims: Any) -> str:
        now = int(time.time())
        private = self.private[key]
        default = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "alice",
            "exp": now + 300,
            "roles": ["admin"],
        }
        payload = {k: v for k, v in (default | claims).items() if k not in drop}
        algorithm = "RS256" if isinstance(private, rsa.RSAPrivateKey) else "ES256"
        return jwt.encode(payload, private, algorithm=algorithm, headers={"kid": key})

    async def _discovery(self, _request: web.Request) -> web.Response:
        self.asked.append("discovery")
        return web.json_response(self.document, status=self.status)

    async def _keys(self, _request: web.Request) -> web.Response:
        self.asked.append("keys")
        if self.raw is not None:
            return web.Response(body=self.raw)
        keys: list[Any] = list(self.extra)
        for name, private in self.private.items():
            if name in self.hidden:
                continue
            of_rsa = isinstance(private, rsa.RSAPrivateKey)
            algorithm = jwt.algorithms.RSAAlgorithm if of_rsa else jwt.algorithms.ECAlgorithm
            keys.append(json.loads(algorithm.to_jwk(private.public_key())) | {"kid": name})
        return web.json_response({"keys": keys}, status=self.status)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
