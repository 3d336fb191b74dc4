"""Where each DP rank publishes its KV events.

SGLang names one host and port for all ranks of an engine, which is right for those on its first
node. The plugin on the other nodes says where theirs are (``EndForward.kv_address``). That makes
this router connect to a host that somebody else names, so it is believed only

* for ranks that ``/server_info`` puts on another node than the first;
* for the host that the message itself comes from; or, from an engine that has the router's key, for
  any address that another machine can have.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import NamedTuple

from sglang_sbs.router.engines.urls import bracketed, split_worker_url
from sglang_sbs.router.workers.server_info import KvEventsBlock
from sglang_sbs.wire.endforward import KvAddress


class RefusedAddress(ValueError):
    """A rank names an address that is not connected to; the message says why and what to do."""


class KvEndpoints(NamedTuple):
    """Of one rank, as ZeroMQ takes them."""

    live: str
    replay: str
    """Empty: lost events cannot be had again."""


def default_endpoints(worker_url: str, source: KvEventsBlock, dp_rank: int) -> KvEndpoints:
    """At the worker's own host, on the ports that ``/server_info`` names."""
    replay_port = source.replay_port + dp_rank if source.replay_port is not None else 0
    return _endpoints(split_worker_url(worker_url)[1], source.port + dp_rank, replay_port)


@lru_cache(maxsize=4096)
def told_endpoints(told: KvAddress, peer: str, *, has_key: bool) -> KvEndpoints:
    """Where a rank on another node is, by its own message. They repeat it, so it is remembered.

    ``peer``: the IP address it came from; empty if none (``ipc://``). ``has_key``: only engines
    with the router's key can have sent it. Raises: RefusedAddress, it is not to be connected to."""
    for port in (told.port, told.replay_port or told.port):
        if not 1 <= port <= 65535:
            raise RefusedAddress(f"it names port {port}")
    sender = _address(peer)
    host = _address(told.host) if told.host else sender
    if host is None:
        named = f"names {told.host[:100]!r}" if told.host else "speaks from a Unix socket"
        raise RefusedAddress(f"it {named}, which is no IP address: set SGLANG_SBS_NODE_HOST there")
    if host != sender and not has_key:
        raise RefusedAddress(
            f"it names {host} and speaks from {sender or 'a local socket'}, which is only believed "
            "of engines with a key (SGLANG_SBS_ENDFORWARD_KEY_FILE and --sbs-endforward-key-file)"
        )
    if host.is_unspecified or host.is_multicast:
        raise RefusedAddress(f"nobody can connect to {host}: set SGLANG_SBS_NODE_HOST there")
    if host != sender and (host.is_loopback or host.is_link_local):
        raise RefusedAddress(
            f"it names {host}, which means another machine here than there: set "
            "SGLANG_SBS_NODE_HOST there"
        )
    return _endpoints(str(host), told.port, told.replay_port)


def _endpoints(host: str, port: int, replay_port: int) -> KvEndpoints:
    host = bracketed(host)
    return KvEndpoints(f"tcp://{host}:{port}", f"tcp://{host}:{replay_port}" if replay_port else "")


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    # As a socket for both families spells it.
    return getattr(address, "ipv4_mapped", None) or address
