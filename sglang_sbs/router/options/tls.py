"""Builds TLS contexts for serving HTTPS and for engines' certificates. Errors name the unusable
flag and file."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import aiohttp

from sglang_sbs.router.engines.control_requests import engine_session
from sglang_sbs.router.options.router_options import RouterOptions


def server_ssl(options: RouterOptions) -> ssl.SSLContext | None:
    """Return the context of the serving port; ``None`` for plain HTTP. Raises: ValueError, the
    certificate or key is unusable."""
    if options.tls_cert_path is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load_pair(context, "tls", options.tls_cert_path, options.tls_key_path)
    return context


def worker_ssl(options: RouterOptions) -> ssl.SSLContext | None:
    """Return the context for connections to engines; ``None`` for the system's trust store and no
    client certificate. Raises: ValueError, a certificate or key is unusable."""
    if not options.ca_cert_paths and options.client_cert_path is None:
        return None
    context = ssl.create_default_context()
    for path in options.ca_cert_paths:
        with _named(f"--ca-cert-paths {path}", "it contains no certificate in PEM form"):
            context.load_verify_locations(path)
    if options.client_cert_path is not None:
        _load_pair(context, "client", options.client_cert_path, options.client_key_path)
    return context


def worker_session(options: RouterOptions) -> aiohttp.ClientSession:
    """Open a client session for control requests to engines. Raises: ValueError, a certificate or
    key is unusable."""
    tls = worker_ssl(options)
    return engine_session(aiohttp.TCPConnector(limit=0, ssl=tls if tls is not None else True))


def _load_pair(context: ssl.SSLContext, kind: str, cert: Path, key: Path | None) -> None:
    """Load a certificate into a context; without ``key`` the private key is in the certificate's
    file. ``kind`` is the flags' first word. Raises: ValueError, a file is unusable."""
    for what, path in (("cert", cert), ("key", key)):
        if path is not None:
            with _named(f"--{kind}-{what}-path {path}", ""):
                path.read_bytes()
    flags = f"--{kind}-cert-path {cert}, --{kind}-key-path {key or '(not given)'}"
    with _named(flags, "write a certificate and the key that belongs to it, in PEM form"):
        context.load_cert_chain(cert, key, password=_no_password)


def _no_password() -> NoReturn:
    """Raise ValueError for an encrypted key. Without this callback OpenSSL prompts at the terminal
    and blocks."""
    raise ValueError("the key has a passphrase: remove it (openssl pkey -in KEY -out PLAIN)")


@contextmanager
def _named(flags: str, wanted: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:
        raise ValueError(f"{flags}: {wanted} ({error.reason or error})") from None
    except OSError as error:
        raise ValueError(f"{flags}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{flags}: {error}") from None
