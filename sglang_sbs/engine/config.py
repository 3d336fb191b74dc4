"""Reads the environment variables of the engine hook, once per process."""

from __future__ import annotations

import ipaddress
import logging
import math
import re
import time
import uuid
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from sglang_sbs.engine import BIND, ROUTERS
from sglang_sbs.wire.curve import CurveKeys, SecretError, keys_in

logger = logging.getLogger(__name__)

INSTANCE_ID = "SGLANG_SBS_INSTANCE_ID"
BOOT_ID = "SGLANG_SBS_BOOT_ID"
BOOTED_S = "SGLANG_SBS_BOOTED_S"
DECODE_INTERVAL_MS = "SGLANG_SBS_DECODE_INTERVAL_MS"
HEARTBEAT_S = "SGLANG_SBS_HEARTBEAT_S"
KEY_FILE = "SGLANG_SBS_ENDFORWARD_KEY_FILE"
FORMER_KEY_FILE = "SGLANG_SBS_KEY_FILE"
NODE_HOST = "SGLANG_SBS_NODE_HOST"
GANG_GATE_MS = "SGLANG_SBS_GANG_GATE_MS"
_PREFIX = "SGLANG_SBS_"
DEFAULT_GATE_MS = 40.0
"""Default of ``gang_gate_ms``, in ms: the handshake of a decode request, including one decode
pass."""
MOST_GATE_MS = 200.0


class ConfigError(ValueError):
    """A variable has an unusable value; the message names a usable one."""


@dataclass(frozen=True)
class HookConfig:
    routers: tuple[str, ...]
    """Endpoints of routers to connect to: ``tcp://HOST:PORT`` or ``ipc://PATH``."""
    bind: str | None
    """Endpoint to bind, for routers that connect: ``tcp://HOST:PORT`` of rank 0; rank d binds
    ``PORT + d``. None: do not bind."""
    instance_id: str
    boot_id: str
    booted_s: int = 0
    """Start of the engine by this host's clock, Unix seconds; 0 if unknown."""
    decode_interval_s: float = 0.05
    heartbeat_s: float = 1.0
    gang_gate_ms: float | None = None
    """Longest time in ms that a batch waits for its late requests (``gang_hold``); None selects
    ``DEFAULT_GATE_MS``."""
    node_host: str = ""
    """IP address by which routers reach this node; empty: the source of its messages."""
    keys: CurveKeys | None = None
    """Encrypts messages for receivers with the same secret. None: not encrypted."""


def load_config(environ: MutableMapping[str, str]) -> HookConfig:
    """Read the configuration, and leave a boot id and its time in ``environ`` for child processes.

    SGLang calls plugins first in the main process, so every rank inherits the id written there, and
    each start of the engine has a new one. Raises: ConfigError, naming the variable and a value
    that works."""
    given = {name: value.strip() for name, value in environ.items() if name.startswith(_PREFIX)}
    parts = map(str.strip, given.get(ROUTERS, "").split(","))
    routers = tuple(_router(part) for part in parts if part)
    bind = given.get(BIND) or None
    if bind is not None:
        how = "the endpoint of DP rank 0, e.g. tcp://*:7600 (rank d binds port 7600 + d)"
        _split(BIND, bind, how)
    gate_ms = _number(given, GANG_GATE_MS, default=DEFAULT_GATE_MS, least=0.0)
    if gate_ms > MOST_GATE_MS:
        raise ConfigError(
            f"{GANG_GATE_MS}: {given[GANG_GATE_MS]!r} is more than {MOST_GATE_MS:g}, longer than "
            "any batch should wait; write e.g. 40, 0 for never, or unset it"
        )
    if not given.get(BOOT_ID):
        given[BOOT_ID] = environ[BOOT_ID] = uuid.uuid4().hex
        given[BOOTED_S] = environ[BOOTED_S] = str(int(time.time()))
    booted = given.get(BOOTED_S, "")
    return HookConfig(
        routers=routers,
        bind=bind,
        keys=_keys(_key_file(given), routers, bind),
        node_host=_node_host(given.get(NODE_HOST, "")),
        instance_id=given.get(INSTANCE_ID, ""),
        boot_id=given[BOOT_ID],
        booted_s=int(booted) if re.fullmatch("[0-9]{1,15}", booted) else 0,
        decode_interval_s=_number(given, DECODE_INTERVAL_MS, default=50.0, least=0.0) / 1000,
        heartbeat_s=_number(given, HEARTBEAT_S, default=1.0, least=0.05),
        gang_gate_ms=gate_ms if given.get(GANG_GATE_MS) else None,
    )


def _key_file(given: dict[str, str]) -> str:
    path, former = given.get(KEY_FILE, ""), given.get(FORMER_KEY_FILE, "")
    if former and not path:
        logger.warning(
            "%s is called %s now; the former name still works", FORMER_KEY_FILE, KEY_FILE
        )
    if former and path and former != path:
        raise ConfigError(f"{FORMER_KEY_FILE} is the former name of {KEY_FILE}: unset it")
    return path or former


def _keys(path: str, routers: tuple[str, ...], bind: str | None) -> CurveKeys | None:
    if not path:
        return None
    if routers and bind is not None:
        raise ConfigError(f"with {KEY_FILE} set either {ROUTERS} or {BIND}, not both")
    try:
        return keys_in(Path(path))
    except SecretError as error:
        raise ConfigError(
            f"{KEY_FILE}: {error}; name the file that the router's --sbs-endforward-key-file "
            "names, or unset it"
        ) from error


def _node_host(text: str) -> str:
    try:
        address = ipaddress.ip_address(text) if text else None
    except ValueError:
        raise ConfigError(
            f"{NODE_HOST}: {text!r} is not an IP address; write the address by which routers reach "
            "this node, e.g. 10.0.0.2, or unset it"
        ) from None
    if address is not None and (address.is_unspecified or address.is_multicast):
        raise ConfigError(
            f"{NODE_HOST}: no router can connect to {text}; write the address routers reach "
            "this node by, e.g. 10.0.0.2, or unset it"
        )
    return text


def split_tcp(endpoint: str) -> tuple[str, int]:
    """Return host (without brackets) and port of ``tcp://HOST:PORT``. Raises: ValueError."""
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if scheme != "tcp" or not host or not (port.isascii() and port.isdigit()):
        raise ValueError("not of the form tcp://HOST:PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 address needs brackets: tcp://[ADDRESS]:PORT")
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"port {port} is not in 1..65535")
    return host, int(port)


def join_tcp(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_hostname(host: str) -> bool:
    """Return whether ``host`` needs name resolution, i.e. is not a literal IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def _router(endpoint: str) -> str:
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return endpoint
    several = "several separated by commas, e.g. tcp://router-0:7600,tcp://router-1:7600"
    host, _ = _split(ROUTERS, endpoint, f"tcp://HOST:PORT or ipc://PATH, {several}")
    if host == "*":
        raise ConfigError(
            f"{ROUTERS}: {endpoint!r} has no address to connect to; write the router's host, e.g. "
            f"tcp://router-0:7600 (to listen on this engine instead, set {BIND})"
        )
    return endpoint


def _split(variable: str, endpoint: str, how: str) -> tuple[str, int]:
    try:
        return split_tcp(endpoint)
    except ValueError as error:
        raise ConfigError(f"{variable}: {endpoint!r}: {error}; write {how}") from error


def _number(given: dict[str, str], name: str, *, default: float, least: float) -> float:
    text = given.get(name) or f"{default:g}"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value) and value >= least:
        return value
    raise ConfigError(
        f"{name}: {text!r} is not a number >= {least:g}; write e.g. {default:g}, "
        "or unset it for that default"
    )
