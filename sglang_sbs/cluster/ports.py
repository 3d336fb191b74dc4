"""Free TCP ports on the loopback interface.

Owns: the search. Must not know what a port is for.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

# Below Linux's default range of outgoing ports (32768 and up), so that no connection takes one
# between the search and the server's start.
FIRST_PORT = 20000
LAST_PORT = 31999


def is_port_free(port: int) -> bool:
    """True if a server could listen on `port` of all interfaces now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def free_port_blocks(size: int) -> Iterator[int]:
    """First ports of disjoint blocks of `size` ports that are all free now.

    The search starts at a place of this process's own, so that two clusters started at the same
    moment do not find the same ports.

    Raises:
        RuntimeError: no such block is left.
    """
    blocks = (LAST_PORT + 1 - FIRST_PORT) // size
    start = os.getpid() * 7 % blocks
    for index in range(blocks):
        first = FIRST_PORT + (start + index) % blocks * size
        if all(is_port_free(port) for port in range(first, first + size)):
            yield first
    raise RuntimeError(f"no {size} free ports in a row between {FIRST_PORT} and {LAST_PORT}")
