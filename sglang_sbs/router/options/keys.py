"""Parses control-plane keys and JWT settings from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

Role = Literal["admin", "user"]
_ROLES: dict[str, Role] = {"admin": "admin", "user": "user"}


@dataclass(frozen=True, slots=True)
class Principal:
    id: str
    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class ControlKey(Principal):
    """One key of ``--control-plane-api-keys``, and its owner."""

    key: str = field(repr=False)


def parse_control_key(text: str) -> ControlKey:
    """Parse ``ID:NAME:ROLE:KEY``; the key may contain colons.
    Raises: ValueError, wrong form; the message never contains the key."""
    parts = text.split(":", 3)
    if len(parts) != 4 or not parts[0] or not parts[3]:
        raise ValueError("write ID:NAME:ROLE:KEY, e.g. ops:Operations:admin:SECRET")
    role = _ROLES.get(parts[2].lower())
    if role is None:
        raise ValueError(f"the role of key {parts[0]!r} must be admin or user, not {parts[2]!r}")
    return ControlKey(parts[0], parts[1], role, parts[3])


def parse_control_keys(texts: Sequence[str]) -> tuple[ControlKey, ...]:
    """Parse all keys, each ``ID:NAME:ROLE:KEY``. Raises: ValueError, one has the wrong form, or two
    have the same id."""
    found: dict[str, ControlKey] = {}
    for key in map(parse_control_key, texts):
        if found.setdefault(key.id, key) is not key:
            raise ValueError(f"two keys have the id {key.id!r}")
    return tuple(found.values())


def keys_from(flag: str, given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Return the keys given by the flag, else those on the lines of its file. A process's command
    line is visible to all users of a machine; a file or a variable is not.
    Raises: ValueError, flag and file are both given, or the file is empty or unreadable."""
    if file is None:
        return tuple(given)
    if given:
        raise ValueError(f"--{flag} and --{flag}-file: give one of them")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ValueError(f"--{flag}-file {file}: {why}") from None
    if not (found := tuple(filter(None, map(str.strip, lines)))):
        raise ValueError(f"--{flag}-file {file}: it contains no key")
    return found


_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class JwtConfig:
    """Settings of the ``--jwt-*`` flags. ``jwks_uri=None`` uses the issuer's discovery document."""

    issuer: str
    audience: str
    jwks_uri: str | None = None
    roles: Mapping[str, Role] = field(default_factory=dict)
    """The router's role by the provider's role name. Empty: tokens name ``admin`` and ``user``
    themselves."""


def check_provider_url(url: str) -> str:
    """Return ``url`` if signing keys can be fetched from it safely. Raises: ValueError, the
    connection could be intercepted and the keys replaced."""
    parts = urlsplit(url)
    here = parts.scheme == "http" and parts.hostname in _LOOPBACK
    if here or (parts.scheme == "https" and parts.hostname):
        return url
    raise ValueError(f"{url!r} must be an https:// URL (http:// only on this machine)")


def parse_roles(texts: Sequence[str]) -> dict[str, Role]:
    """Return roles by the provider's names from items ``PROVIDER_ROLE=admin`` or
    ``PROVIDER_ROLE=user``. Raises: ValueError, an item has another form."""
    roles: dict[str, Role] = {}
    for text in texts:
        name, _, written = text.rpartition("=")
        if not name or (role := _ROLES.get(written.lower())) is None:
            how = "write PROVIDER_ROLE=admin or =user, e.g. Gateway.Admin=admin"
            raise ValueError(f"{text!r}: {how}")
        roles[name] = role
    return roles
