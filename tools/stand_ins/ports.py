"""Free ports for servers that take a number, not a socket."""

from __future__ import annotations

import itertools
import os
import socket

# Below Linux's default range of outgoing ports, so that no connection and no server at port 0 takes
# one before it is used; and below those of `sglang_sbs.cluster.ports`.
_FIRST, _LAST = 10_000, 19_999
_MOST = 16
# From a place of this process's own, as tests run in several.
_starts = itertools.count(os.getpid() * 4999, _MOST)


def free_ports(count: int) -> list[int]:
    """Ports in a row on 127.0.0.1, 16 at most, that are free now; others at each call."""
    assert count <= _MOST
    for _ in range((_LAST - _FIRST) // _MOST):
        first = _FIRST + next(_starts) % (_LAST + 1 - _FIRST - _MOST)
        ports = list(range(first, first + count))
        if all(map(_is_free, ports)):
            return ports
    raise RuntimeError(f"no {count} free ports in a row from {_FIRST} to {_LAST}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a port whose last connections linger can be listened at.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
