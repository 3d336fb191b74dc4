"""Free TCP ports on the loopback interface."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

# Below Linux's default range of outgoing ports (32768 and up), so that no connection takes one
# between the search and the server's start.
FIRST_PORT = 20000
LAST_PORT = 31999

_CLAIM_PORTS = 16
_claims: list[socket.socket] = []
"""Sockets whose names mark claimed ports; held until this process ends."""


def is_port_free(port: int) -> bool:
    """True if a server could listen on `port` of all interfaces now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def claim_ports(ports: range) -> bool:
    """Reserve ports for the life of this process; False if a cluster on this machine has them.

    Engines bind their ports seconds after they were planned. ZeroMQ aborts a process if another
    cluster sends HTTP to its socket meanwhile. A claim is an abstract Unix socket for each
    `_CLAIM_PORTS` aligned ports, so it ends with the process."""
    claimed: list[socket.socket] = []
    for unit in range(ports.start // _CLAIM_PORTS, (ports.stop - 1) // _CLAIM_PORTS + 1):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        claimed.append(claim)
        try:
            claim.bind(f"\0sglang-sbs-ports-{unit * _CLAIM_PORTS}")
        except OSError:
            for taken in claimed:
                taken.close()
            return False
    _claims.extend(claimed)
    return True


def free_port_blocks(size: int) -> Iterator[int]:
    """Yield the first ports of disjoint blocks of `size` ports. Each block is free and is claimed
    before it is returned. Each process starts its search at another port. Raises: RuntimeError, no
    free block is left."""
    blocks = (LAST_PORT + 1 - FIRST_PORT) // size
    start = os.getpid() * 7 % blocks
    for index in range(blocks):
        first = FIRST_PORT + (start + index) % blocks * size
        ports = range(first, first + size)
        if all(is_port_free(port) for port in ports) and claim_ports(ports):
            yield first
    raise RuntimeError(f"no {size} free ports in a row between {FIRST_PORT} and {LAST_PORT}")
