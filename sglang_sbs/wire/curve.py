"""One shared secret for both ends of a ZMQ socket: derives CURVE keys from it and checks them. Each
side accepts every peer with the secret; session keys are separate per connection."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth.thread
import zmq.utils.z85

MIN_SECRET_CHARS = 32
_DOMAIN = "sglang-sbs"


class SecretError(ValueError):
    """The secret is unusable; the message has the remedy."""


@dataclass(frozen=True, repr=False)
class CurveKeys:
    """Keys in Z85, 40 characters each. They are secret, so ``repr`` hides them."""

    server_public: bytes = field(repr=False)
    server_secret: bytes = field(repr=False)
    client_public: bytes = field(repr=False)
    client_secret: bytes = field(repr=False)

    def serve(self, sock: zmq.Socket[bytes]) -> None:
        """Make a socket a server, before ``bind``. Only clients accepted by a :class:`Gatekeeper`
        can connect."""
        sock.curve_server = True
        sock.curve_publickey = self.server_public
        sock.curve_secretkey = self.server_secret
        sock.zap_domain = _DOMAIN.encode()

    def connect(self, sock: zmq.Socket[bytes]) -> None:
        """Make a socket a client, before ``connect``. It connects only to servers with the same
        secret."""
        sock.curve_serverkey = self.server_public
        sock.curve_publickey = self.client_public
        sock.curve_secretkey = self.client_secret


def keys_of(secret: str) -> CurveKeys:
    """Derive both key pairs from the secret. Raises: SecretError, the secret is unusable."""
    secret = secret.strip()
    if len(secret) < MIN_SECRET_CHARS:
        raise SecretError(
            f"needs at least {MIN_SECRET_CHARS} characters; make one with: openssl rand -hex 32"
        )
    if not zmq.has("curve"):
        raise SecretError("this pyzmq was built without CURVE: install its binary wheel")

    def pair(role: str) -> tuple[bytes, bytes]:
        raw = hmac.digest(secret.encode(), f"sglang-sbs {role}".encode(), hashlib.sha256)
        private = zmq.utils.z85.encode(raw)
        return zmq.curve_public(private), private

    return CurveKeys(*pair("server"), *pair("client"))


def keys_in(path: Path) -> CurveKeys:
    """Derive the keys from the secret in a file. Raises: SecretError, the file or the secret is
    unusable."""
    try:
        return keys_of(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SecretError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SecretError(f"cannot read {path}: {error}") from error
    except SecretError as error:
        raise SecretError(f"{path}: {error}") from error


class Gatekeeper:
    """Decides for libzmq which clients of a context are accepted (ZAP handler)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> None:
        self._public = zmq.utils.z85.decode(keys.client_public)
        self.refused = 0
        """Number of clients with a wrong key; clients without the server's key fail earlier."""
        self._thread = zmq.auth.thread.ThreadAuthenticator(context)
        self._thread.start()
        self._thread.configure_curve_callback(domain=_DOMAIN, credentials_provider=self)

    def callback(self, _domain: str, key: bytes) -> bool:
        """Called by the authenticator with a client's public key in Z85."""
        known = hmac.compare_digest(zmq.utils.z85.decode(key), self._public)
        self.refused += not known
        return known

    def close(self) -> None:
        self._thread.stop()
