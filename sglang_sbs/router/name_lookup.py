"""Host names, looked up so that a name server that does not answer delays nobody else.

uvloop resolves in libuv's pool of four threads, for every connection that aiohttp opens,
also to an IP address. Four names whose DNS hangs stop all of that. Here an address is never looked
up, each name takes one thread of its own at most, and the addresses it had before hold while DNS is
away.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import uvloop

LIMIT_S = 5.0
"""How long a caller waits for DNS. The lookup goes on, and its result is kept for the next one."""
FRESH_S = 60.0
"""Addresses younger than this are answered at once, while the name is looked up again."""
MOST_LOOKUPS = 64
"""Names looked up at the same time; further ones fail at once, or get the addresses they had."""
_MOST_KNOWN = 4096

Addresses = list[tuple[Any, ...]]
"""As :func:`socket.getaddrinfo` returns them."""


def is_address(host: object) -> bool:
    """Whether ``host`` is a literal IP address, maybe with a scope (``fe80::1%eth0``)."""
    if not isinstance(host, str):
        return False
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


class NameLookup:
    """One per event loop."""

    def __init__(
        self,
        lookup: Callable[..., Addresses] = socket.getaddrinfo,
        *,
        limit_s: float = LIMIT_S,
        most_lookups: int = MOST_LOOKUPS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._lookup = lookup
        self._limit_s = limit_s
        self._most_lookups = most_lookups
        self._under_way: dict[tuple[Any, ...], tuple[float, asyncio.Future[Addresses]]] = {}
        """When a lookup began, and its result."""
        self._known: OrderedDict[tuple[Any, ...], tuple[float, Addresses]] = OrderedDict()
        """When a name was found, and its addresses."""

    async def getaddrinfo(self, *wanted: Any) -> Addresses:
        """``wanted``: host, port, family, type, proto, flags. Raises: socket.gaierror."""
        if wanted[0] is None or is_address(wanted[0]):
            return self._lookup(*wanted[:5], wanted[5] | socket.AI_NUMERICHOST)
        found_s, known = self._known.get(wanted, (0.0, None))
        try:
            began_s, flight = self._flight(wanted)
            limit_s = self._limit_s
            if known is not None:
                now_s = self._clock()
                if now_s - found_s < FRESH_S:
                    return known
                limit_s = max(0.0, began_s + limit_s - now_s)  # of the lookup, not of each caller
            return await asyncio.wait_for(asyncio.shield(flight), limit_s)
        except (TimeoutError, socket.gaierror) as error:
            if known is not None:
                return known
            if isinstance(error, socket.gaierror):
                raise
            why = f"DNS did not answer within {self._limit_s:g} s"
            raise socket.gaierror(socket.EAI_AGAIN, why) from None

    def _flight(self, wanted: tuple[Any, ...]) -> tuple[float, asyncio.Future[Addresses]]:
        if wanted in self._under_way:
            return self._under_way[wanted]
        if len(self._under_way) >= self._most_lookups:
            why = f"{self._most_lookups} host names are being looked up already"
            raise socket.gaierror(socket.EAI_AGAIN, why)
        loop = asyncio.get_running_loop()
        flight: asyncio.Future[Addresses] = loop.create_future()
        self._under_way[wanted] = self._clock(), flight

        def ended(found: Addresses | None, error: BaseException | None) -> None:
            del self._under_way[wanted]
            if found is not None:
                self._known[wanted] = self._clock(), found
                self._known.move_to_end(wanted)
                if len(self._known) > _MOST_KNOWN:
                    self._known.popitem(last=False)
                flight.set_result(found)
            else:
                flight.set_exception(error or socket.gaierror(socket.EAI_NONAME, "no address"))
                flight.exception()  # maybe nobody waits for it any more

        def look_up() -> None:
            found, error = None, None
            try:
                found = self._lookup(*wanted)
            except Exception as caught:
                error = caught
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended, found, error)

        # A daemon: a name server that never answers must not keep the process from ending.
        threading.Thread(target=look_up, name="name lookup", daemon=True).start()
        return self._under_way[wanted]


class RouterLoop(uvloop.Loop):
    """uvloop's event loop with :class:`NameLookup`."""

    def __init__(self) -> None:
        self._names = NameLookup()

    async def getaddrinfo(
        self,
        host: Any,
        port: Any,
        *,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> Any:
        return await self._names.getaddrinfo(host, port, family, type, proto, flags)

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """uvloop's own looks an IP address up, too."""
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or not is_address(address[0]):
            await super().sock_connect(sock, address)
            return
        try:
            sock.connect(address)
            return
        except (BlockingIOError, InterruptedError):
            pass
        connected = self.create_future()

        def writable() -> None:
            if connected.done():
                return
            number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                connected.set_exception(OSError(number, f"Connect call failed {address}"))
            else:
                connected.set_result(None)

        fd = sock.fileno()
        self.add_writer(fd, writable)
        try:
            await connected
        finally:
            self.remove_writer(fd)
