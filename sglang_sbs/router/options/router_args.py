"""Starts a router from Python: ``RouterArgs`` has one field per flag, as in ``sglang_router``
0.3.2. The fields become a command line, so bad values get the same errors."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sglang_sbs.router.options.arguments import FlagError, add_flags
from sglang_sbs.router.options.config import BOOTSTRAP_PORT_ANNOTATION, parse_selector
from sglang_sbs.router.options.keys import parse_control_key, parse_roles
from sglang_sbs.router.options.option import prefill_of

_FIELD_OF_FLAG = {
    "prefill": "prefill_urls",
    "decode": "decode_urls",
    "tls_cert_path": "server_cert_path",
    "tls_key_path": "server_key_path",
    "frontends": "workers",
    "sbs_scheduler_key_file": "sbs_key_file",
}
"""Field of :class:`RouterArgs` by ``dest`` of its flag, where the two names differ."""


def _read_flags() -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser, prefix="")
    found: dict[str, argparse.Action] = {}
    for action in parser._actions:  # former names come after the present ones
        found.setdefault(_FIELD_OF_FLAG.get(action.dest, action.dest), action)
    return found


_FLAGS = _read_flags()
"""The flag, as an action of argparse, of each field of :class:`RouterArgs`."""
_MAPPINGS = ("selector", "prefill_selector", "decode_selector", "jwt_role_mapping")
_LISTS = ("worker_urls", "prefill_urls", "decode_urls")


def _with_fields(cls: type[RouterArgs]) -> type[RouterArgs]:
    """Turn a class into a dataclass with a field for each flag, whose default is the flag's."""
    for name, action in _FLAGS.items():
        cls.__annotations__[name] = Any
        default = None if action.default is argparse.SUPPRESS else action.default
        if name in _MAPPINGS:
            setattr(cls, name, dataclasses.field(default_factory=dict))
        elif name in _LISTS or isinstance(default, tuple):
            setattr(cls, name, dataclasses.field(default_factory=list))
        else:
            setattr(cls, name, False if action.nargs == 0 else default)
    return dataclasses.dataclass(kw_only=True)(cls)


@_with_fields
class RouterArgs:
    """Options of a router; ``None`` selects a flag's default.

    ``prefill_urls`` are pairs of URL and bootstrap port (or ``None``), selectors and
    ``jwt_role_mapping`` dicts, ``control_plane_api_keys`` tuples ``(id, name, key, role)``; all
    others have the type of their flag. Values are checked when the router starts.
    """

    bootstrap_port_annotation: str = BOOTSTRAP_PORT_ANNOTATION

    if TYPE_CHECKING:  # the fields come from the flags

        def __init__(self, **fields: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    @staticmethod
    def add_cli_args(
        parser: argparse.ArgumentParser,
        use_router_prefix: bool = False,
        exclude_host_port: bool = False,
    ) -> None:
        """Add the router's flags to a parser, as ``--router-x`` with ``use_router_prefix``.
        ``exclude_host_port`` omits ``--host`` and ``--port``."""
        prefix = "router-" if use_router_prefix else ""
        add_flags(parser, prefix, without=("host", "port") if exclude_host_port else ())

    @classmethod
    def from_cli_args(cls, args: Any, use_router_prefix: bool = False) -> RouterArgs:
        """Create options from the namespace of a parser that has these flags; other attributes are
        ignored. With ``use_router_prefix``, ``router_x`` takes precedence over ``x``. Raises:
        FlagError, a value is malformed."""
        given = vars(args)
        values: dict[str, Any] = {}
        for name, action in _FLAGS.items():
            for key in (f"router_{action.dest}", action.dest)[0 if use_router_prefix else 1 :]:
                if key in given:
                    values[name] = _value(name, given[key])
                    break
        return cls(**values)

    def command_line(self) -> list[str]:
        """Return the command line with the same values, without defaults. Raises: FlagError, a
        field has no matching flag."""
        if self.bootstrap_port_annotation != BOOTSTRAP_PORT_ANNOTATION:
            raise FlagError(
                f"bootstrap_port_annotation {self.bootstrap_port_annotation!r}: pods are annotated "
                f"with {BOOTSTRAP_PORT_ANNOTATION} here"
            )
        words: list[str] = []
        for name, action in _FLAGS.items():
            value, flag = getattr(self, name), action.option_strings[0]
            if value == action.default or value is None or value is False or value in ((), [], {}):
                continue
            if action.nargs == 0:
                words.append(flag)
            elif name == "prefill_urls":
                for url, port in value:
                    words += [flag, url, "none" if port is None else str(port)]
            elif name == "decode_urls":
                for url in value:
                    words += [flag, url]
            elif action.nargs is None:
                words.append(f"{flag}={value}")  # it may begin with a dash
            else:
                words += [flag, *_texts(name, value)]
        return words


def _value(name: str, raw: Any) -> Any:
    """Convert a value parsed by argparse to the type of the field. Raises: FlagError, it is
    malformed."""
    read: dict[str, Callable[[Any], Any]] = {
        "prefill_urls": lambda entries: list(map(prefill_of, entries)),
        "decode_urls": lambda entries: [url for (url,) in entries],
        "control_plane_api_keys": lambda texts: [_control_key(text) for text in texts],
        "jwt_role_mapping": parse_roles,
        **dict.fromkeys(_MAPPINGS[:3], _labels),
    }
    if name in read:
        try:
            return read[name](raw or ())
        except ValueError as error:
            raise FlagError(f"{_FLAGS[name].option_strings[0]}: {error}") from None
    return list(raw) if isinstance(raw, tuple) else raw


def _control_key(text: str) -> tuple[str, str, str, str]:
    key = parse_control_key(text)
    return key.id, key.name, key.key, key.role


def _labels(words: Sequence[str]) -> dict[str, str]:
    if not words:
        return {}
    return dict(label.split("=", 1) for label in parse_selector(words).split(","))


def _texts(name: str, value: Any) -> Iterable[str]:
    if isinstance(value, dict):
        return [f"{key}={text}" for key, text in value.items()]
    if name == "control_plane_api_keys":
        return [f"{id_}:{owner}:{role}:{key}" for id_, owner, key, role in value]
    return [str(item) for item in value]
