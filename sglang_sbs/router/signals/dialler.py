"""Connections of a ZeroMQ socket to endpoints that may have host names.

libzmq looks a name up in the one thread that carries all its messages, and a name server that does
not answer stops them all. It is given addresses only. The event loop looks names up: in the router
that is :class:`~sglang_sbs.router.name_lookup.RouterLoop`.
"""

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

_AGAIN_S = 1.0
"""Until a name without an address is looked up again."""
_FOLLOW_S = 10.0
"""Until a name with an address is, where it is not known that the connection stands."""
_FOLLOW_STANDING_S = 60.0


def host_name_of(endpoint: str) -> str:
    """The name in ``tcp://NAME:PORT``; empty for an address and for any other endpoint."""
    if not endpoint.startswith("tcp://"):
        return ""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return "" if is_address(host.strip("[]")) else host


async def addresses_of(name: str) -> list[str]:
    """IPv4 first: an engine that binds ``tcp://*:PORT`` may take only that.
    Raises: OSError, it has none (now); ValueError, it cannot be a name."""
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
        follow_s: float = 0.0,
    ) -> None:
        """``what`` comes from there, in the log. ``used`` is called after the socket was used,
        which may have used up an edge of its descriptor. ``stands``: whether its connection does,
        if that is known; where it does not, the next address of the name is tried. ``first``: which
        of so many addresses is tried first. ``follow_s``: until a name with an address is looked up
        again; 0: the usual time."""
        self._sock = sock
        self._what = what
        self._used = used
        self._stands = stands
        self._first = first
        self._follow_s = follow_s
        self._wanted: Collection[str] = ()
        self._connected: set[str] = set()
        """Endpoints, with addresses only."""
        self._addresses: dict[str, str] = {}
        """In use, by host name."""
        self._following: dict[str, asyncio.Task[None]] = {}
        """By host name."""

    def dial(self, endpoints: Collection[str]) -> None:
        """Connect to these, and to no others. Names follow when their addresses are known."""
        self._wanted = endpoints
        names = set(map(host_name_of, endpoints)) - {""}
        for name in self._following.keys() - names:
            self._following.pop(name).cancel()
            self._addresses.pop(name, None)
        for name in names - self._following.keys():
            self._following[name] = asyncio.create_task(self._follow(name))
        self._connect()

    def close(self) -> None:
        """Look nothing up any more. The socket is closed by others."""
        for task in self._following.values():
            task.cancel()
        self._following.clear()

    async def _follow(self, name: str) -> None:
        told, until_s = False, 0.0
        while True:
            if self._stands is None or not self._stands() or time.monotonic() >= until_s:
                try:
                    self._choose(name, await addresses_of(name))
                    told, until_s = False, time.monotonic() + _FOLLOW_STANDING_S
                except (OSError, ValueError) as error:
                    if not told:
                        told = True
                        text = "no %s from %r: %s; looking the name up again"
                        logger.warning(text, self._what, name, error)
            follow_s = self._follow_s or _FOLLOW_S
            await asyncio.sleep(follow_s if name in self._addresses else _AGAIN_S)

    def _choose(self, name: str, found: list[str]) -> None:
        used = self._addresses.get(name, "")
        # IPv6 only where there is nothing else.
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
            with suppress(zmq.ZMQError):  # it never was one
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
        """Empty: the address is not known yet."""
        name = host_name_of(endpoint)
        if not name:
            return endpoint
        address = self._addresses.get(name, "")
        port = endpoint.rpartition(":")[2]
        return address and f"tcp://{bracketed(address)}:{port}"
