"""Finds where each DP rank publishes its KV events.

SGLang names one host and port for all ranks of an engine, which is right for ranks on its first
node. The plugin on other nodes reports their addresses (``EndForward.kv_address``). The router
connects to such a reported host, so it accepts one only

* for ranks that ``/server_info`` places on another node than the first;
* if it is the host that sent the message; or, from an engine that has the router's key, any address
  of another machine."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import NamedTuple

from sglang_sbs.router.engines.urls import bracketed, split_worker_url
from sglang_sbs.router.workers.server_info import KvEventsBlock
from sglang_sbs.wire.endforward import KvAddress


class RefusedAddress(ValueError):
    """A rank reported an address that must not be connected to; the message has the reason and the
    fix."""


class KvEndpoints(NamedTuple):
    """ZeroMQ endpoints of one rank."""

    live: str
    replay: str
    """Empty: lost events cannot be requested again."""


def default_endpoints(worker_url: str, source: KvEventsBlock, dp_rank: int) -> KvEndpoints:
    """Return endpoints at the worker's own host, on the ports in ``/server_info``."""
    replay_port = source.replay_port + dp_rank if source.replay_port is not None else 0
    return _endpoints(split_worker_url(worker_url)[1], source.port + dp_rank, replay_port)


@lru_cache(maxsize=4096)
def reported_endpoints(reported: KvAddress, peer: str, *, has_key: bool) -> KvEndpoints:
    """Return the endpoints in a report of a rank on another node. Reports repeat, so results are
    cached.

    ``peer``: IP address of the sender; empty for ``ipc://``. ``has_key``: only engines with the
    router's key can have sent it. Raises: RefusedAddress, it must not be connected to."""
    for port in (reported.port, reported.replay_port or reported.port):
        if not 1 <= port <= 65535:
            raise RefusedAddress(f"it names port {port}")
    sender = _address(peer)
    host = _address(reported.host) if reported.host else sender
    if host is None:
        named = f"names {reported.host[:100]!r}" if reported.host else "sends from a Unix socket"
        raise RefusedAddress(
            f"it {named}, which is not an IP address: set SGLANG_SBS_NODE_HOST there"
        )
    if host != sender and not has_key:
        raise RefusedAddress(
            f"it names {host} but sends from {sender or 'a local socket'}, which is accepted only "
            "from engines with a key (SGLANG_SBS_ENDFORWARD_KEY_FILE and --sbs-endforward-key-file)"
        )
    if host.is_unspecified or host.is_multicast:
        raise RefusedAddress(
            f"it is impossible to connect to {host}: set SGLANG_SBS_NODE_HOST there"
        )
    if host != sender and (host.is_loopback or host.is_link_local):
        raise RefusedAddress(
            f"it names {host}, which means a different machine here: set SGLANG_SBS_NODE_HOST there"
        )
    return _endpoints(str(host), reported.port, reported.replay_port)


def _endpoints(host: str, port: int, replay_port: int) -> KvEndpoints:
    host = bracketed(host)
    return KvEndpoints(f"tcp://{host}:{port}", f"tcp://{host}:{replay_port}" if replay_port else "")


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    # A dual-stack socket writes IPv4 addresses this way.
    return getattr(address, "ipv4_mapped", None) or address
