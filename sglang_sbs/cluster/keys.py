"""The API keys of engines, and the keys that their router needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

from sglang_sbs.cluster.dp_ranks import EngineFlagError
from sglang_sbs.cluster.flag_words import text_flag

API_FLAG, ADMIN_FLAG = "--api-key", "--admin-api-key"
VARIABLES = {API_FLAG: "SGLANG_SBS_API_KEY", ADMIN_FLAG: "SGLANG_SBS_ADMIN_API_KEY"}
"""Environment variable from which the router reads each key. Unlike command lines, other users of
the machine cannot see it."""
_SECRETS = {API_FLAG, ADMIN_FLAG, "--control-plane-api-keys"}


@dataclass(frozen=True)
class Keys:
    """The API key and admin API key of one server; empty: none."""

    api: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)

    @property
    def operator(self) -> str:
        """Key that opens ``/freeze_gc`` and ``/abort_request`` (``decide_request_auth`` of SGLang's
        ``srt/utils/auth.py``)."""
        return self.admin or self.api

    @classmethod
    def of_flags(cls, flags: Sequence[str]) -> Self:
        """Read the keys from `flags`. Raises: EngineFlagError, the router cannot take a key."""
        for word in flags:
            name = word.partition("=")[0]
            if any(len(name) > 4 and f.startswith(name) and f != name for f in VARIABLES):
                raise EngineFlagError(f"{name}: write {API_FLAG} or {ADMIN_FLAG} in full")
        for flag in VARIABLES:
            if len(text_flag(flags, flag).split()) > 1:
                raise EngineFlagError(
                    f"{flag}: a key with spaces in it cannot be given to the router"
                )
        return cls(text_flag(flags, API_FLAG), text_flag(flags, ADMIN_FLAG))


def keys_of_router(engines: Iterable[Keys], given: Keys) -> Keys:
    """Return the keys for a router of these engines: those `given`, otherwise the engines'. Raises:
    EngineFlagError, an engine would refuse them."""
    engines = list(engines)
    api = given.api or next((engine.api for engine in engines if engine.api), "")
    admin = given.admin or next((engine.admin for engine in engines if engine.admin), "")
    keys = Keys(api, admin)
    for engine in engines:
        if engine.api not in ("", keys.api):
            raise EngineFlagError(
                f"{API_FLAG}: the router has one key for clients and all engines. Give prefill, "
                "decode and the router the same, or the router none"
            )
        if engine.operator not in ("", keys.operator):
            raise EngineFlagError(
                f"{ADMIN_FLAG}: the router aborts requests with one key on all engines. Give "
                "prefill, decode and the router the same"
            )
    return keys


def without_keys(words: Iterable[str]) -> list[str]:
    """Return a command line for display, with ``***`` in place of each key."""
    shown: list[str] = []
    secret = False
    for word in words:
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            secret = name in _SECRETS
            shown.append(f"{name}=***" if secret and equals else word)
        else:
            shown.append("***" if secret else word)
    return shown
