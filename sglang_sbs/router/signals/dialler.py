"""Connects a ZeroMQ socket to endpoints that may have host names.

libzmq resolves names in the one thread that carries all its messages, so an unresponsive name
server would stop them all. It therefore gets addresses only, and the event loop resolves names; in
the router that is :class:`~sglang_sbs.router.name_lookup.RouterLoop`."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress

import zmq

from sglang_sbs.router.engines.urls import bracketed
from sglang_sbs.router.name_lookup import is_address

logger = logging.getLogger(__name__)

FOLLOW_S = 10.0
_AGAIN_S = 1.0
"""Pause before a name without an address is resolved again."""
_FOLLOW_STANDING_S = 60.0


def host_name_of(endpoint: str) -> str:
    """Return the host name in ``tcp://NAME:PORT``; empty if it is an address or another form."""
    if not endpoint.startswith("tcp://"):
        return ""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return "" if is_address(host.strip("[]")) else host


async def addresses_of(name: str) -> list[str]:
    """Resolve a name, IPv4 first: an engine that binds ``tcp://*:PORT`` may accept only that.
    Raises: OSError, it has no address now; ValueError, it is not a possible name."""
    found = await asyncio.get_running_loop().getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(str(info[4][0]) for info in found)
    return sorted(addresses, key=lambda address: ":" in address)


class Dialler:
    """Keeps ``sock`` connected to the endpoints last given to :meth:`dial`."""

    def __init__(
        self,
        sock: zmq.Socket[bytes],
        what: str,
        used: Callable[[], object] = lambda: None,
        stands: Callable[[], bool] | None = None,
        first: Callable[[int], int] = lambda _count: 0,
        follow_s: float = FOLLOW_S,
    ) -> None:
        """Create a dialler. ``what`` names the data in log messages. ``used`` is called after each
        use of the socket, which may consume an edge of its descriptor. ``stands`` returns whether
        the connection is up, if known; if not, the name's next address is tried. ``first`` selects
        the first address to try, given their number. A name with an address is resolved again after
        ``follow_s`` if the connection may be down."""
        self._sock = sock
        self._what = what
        self._used = used
        self._stands = stands
        self._first = first
        self._follow_s = follow_s
        self._wanted: Collection[str] = ()
        self._connected: set[str] = set()
        """Endpoints that the socket is connected to, with addresses in place of names."""
        self._addresses: dict[str, str] = {}
        """Address in use by host name."""
        self._following: dict[str, asyncio.Task[None]] = {}
        """Tasks that keep resolving the host names in use, by name."""

    def dial(self, endpoints: Collection[str]) -> None:
        """Connect to these endpoints and drop all others; names follow once they are resolved."""
        self._wanted = endpoints
        names = set(map(host_name_of, endpoints)) - {""}
        for name in self._following.keys() - names:
            self._following.pop(name).cancel()
            self._addresses.pop(name, None)
        for name in names - self._following.keys():
            self._following[name] = asyncio.create_task(self._follow(name))
        self._connect()

    def close(self) -> None:
        """Stop resolving. The caller closes the socket."""
        for task in self._following.values():
            task.cancel()
        self._following.clear()

    async def _follow(self, name: str) -> None:
        warned, until_s = False, 0.0
        while True:
            if self._stands is None or not self._stands() or time.monotonic() >= until_s:
                try:
                    self._choose(name, await addresses_of(name))
                    warned, until_s = False, time.monotonic() + _FOLLOW_STANDING_S
                except (OSError, ValueError) as error:
                    if not warned:
                        warned = True
                        text = "no %s from %r: %s; resolving the name again"
                        logger.warning(text, self._what, name, error)
            found = name in self._addresses
            await asyncio.sleep(self._follow_s if found else _AGAIN_S)

    def _choose(self, name: str, found: list[str]) -> None:
        used = self._addresses.get(name, "")
        # Use IPv6 only if there is no IPv4 address.
        number = self._first(sum(":" not in address for address in found) or len(found))
        if used in found:
            if self._stands is None or self._stands():
                return
            number = (found.index(used) + 1) % len(found)
        self._addresses[name] = found[number]
        self._connect()

    def _connect(self) -> None:
        wanted = {endpoint for endpoint in map(self.by_address, self._wanted) if endpoint}
        for endpoint in self._connected - wanted:
            with suppress(zmq.ZMQError):  # it was never connected
                self._sock.disconnect(endpoint)
        for endpoint in wanted - self._connected:
            try:
                self._sock.connect(endpoint)
            except zmq.ZMQError as error:
                reason = os.strerror(error.errno or 0)
                logger.warning("no %s from %r: %s", self._what, endpoint, reason)
        self._connected = wanted
        self._used()

    def by_address(self, endpoint: str) -> str:
        """Return the endpoint with the address in use for its name; empty if none is known yet."""
        name = host_name_of(endpoint)
        if not name:
            return endpoint
        address = self._addresses.get(name, "")
        port = endpoint.rpartition(":")[2]
        return address and f"tcp://{bracketed(address)}:{port}"
