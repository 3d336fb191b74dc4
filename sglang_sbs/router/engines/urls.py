"""Normalises worker URLs and compares their hosts. Names are never resolved here."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_URL_CHARS = 512
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"})


def normalise_worker_url(url: str) -> str:
    """Return ``scheme://host:port`` in lower case; ``http://`` is assumed without a scheme.
    Raises: ValueError, not an http(s) URL with a host, or a port outside 1..65535."""
    if len(url) > _MAX_URL_CHARS:
        raise ValueError(f"worker URL {url[:40]!r}… has {len(url)} characters")
    text = url.strip()
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in _DEFAULT_PORTS:
        raise ValueError(f"worker URL {url!r} must start with http:// or https://")
    if not parts.hostname:
        raise ValueError(f"worker URL {url!r} has no host; write e.g. http://10.0.0.1:30000")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"worker URL {url!r}: {error}") from error
    if parts.path.strip("/") or parts.query:
        raise ValueError(f"worker URL {url!r} must not have a path; write {parts.netloc} only")
    return f"{parts.scheme}://{bracketed(parts.hostname)}:{port or _DEFAULT_PORTS[parts.scheme]}"


@lru_cache(maxsize=4096)
def split_worker_url(url: str) -> tuple[str, str, int]:
    """Return scheme, host (without brackets) and port of a normalised URL."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or _DEFAULT_PORTS[parts.scheme]


def rank_url(url: str, number: int, host: str = "") -> str:
    """Return the URL of a DP rank with its own HTTP server, given rank 0's ``url``. SGLang's Rust
    server (``srt/rust_server/server.py``) uses ``--port`` plus the rank's ``number`` on its node.
    ``host`` is that node's; empty: the first node, with the host of ``url``."""
    scheme, own_host, port = split_worker_url(url)
    return f"{scheme}://{bracketed(host or own_host)}:{port + number}"


def bracketed(host: str) -> str:
    """Put IPv6 literals in brackets, as in URLs and SGLang's ``bootstrap_host``."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address or ``localhost``."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def alias_key(url: str) -> tuple[str, int]:
    """Return host and port by which URLs of the same worker compare equal: all loopback and
    wildcard hosts become ``127.0.0.1``."""
    _, host, port = split_worker_url(url)
    return ("127.0.0.1" if host in _LOOPBACK else host, port)
