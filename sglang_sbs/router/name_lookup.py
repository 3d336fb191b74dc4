"""Resolves host names so that an unresponsive name server delays no other connections.

uvloop resolves in libuv's pool of four threads, for every connection that aiohttp opens, even to an
IP address, so four names with hanging DNS would stop all of them. Here addresses are never
resolved, each name uses at most one thread, and its former addresses are used while DNS is down."""

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
"""Longest wait of a caller for DNS. The lookup continues, and its result serves the next caller."""
FRESH_S = 60.0
"""Age up to which known addresses are returned at once, while the name is resolved again."""
MOST_LOOKUPS = 64
"""Limit on concurrent lookups; further ones fail at once or use former addresses."""
_MOST_KNOWN = 4096

Addresses = list[tuple[Any, ...]]
"""Addresses in the format of :func:`socket.getaddrinfo`."""


def is_address(host: object) -> bool:
    """Return whether ``host`` is a literal IP address, possibly with a scope (``fe80::1%eth0``)."""
    if not isinstance(host, str):
        return False
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


class NameLookup:
    """Resolves names; create one per event loop."""

    def __init__(
        self,
        lookup: Callable[..., Addresses] = socket.getaddrinfo,
        *,
        limit_s: float = LIMIT_S,
        fresh_s: float = FRESH_S,
        most_lookups: int = MOST_LOOKUPS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._lookup = lookup
        self._limit_s, self._fresh_s = limit_s, fresh_s
        self._most_lookups = most_lookups
        self._under_way: dict[tuple[Any, ...], tuple[float, asyncio.Future[Addresses]]] = {}
        """Start and future result of each running lookup, by the arguments of ``getaddrinfo``."""
        self._known: OrderedDict[tuple[Any, ...], tuple[float, Addresses]] = OrderedDict()
        """Time and result of the last successful lookup, by the arguments of ``getaddrinfo``;
        oldest first."""

    async def getaddrinfo(self, *wanted: Any) -> Addresses:
        """Resolve a name. ``wanted`` is host, port, family, type, proto, flags. Raises:
        socket.gaierror, DNS failed and no former addresses are known."""
        if wanted[0] is None or is_address(wanted[0]):
            return self._lookup(*wanted[:5], wanted[5] | socket.AI_NUMERICHOST)
        found_s, known = self._known.get(wanted, (0.0, None))
        try:
            began_s, flight = self._flight(wanted)
            limit_s = self._limit_s
            if known is not None:
                now_s = self._clock()
                if now_s - found_s < self._fresh_s:
                    return known
                # Count from the lookup's start, not per caller.
                limit_s = max(0.0, began_s + limit_s - now_s)
            return await asyncio.wait_for(asyncio.shield(flight), limit_s)
        except (TimeoutError, socket.gaierror) as error:
            if known is not None:
                return known
            if isinstance(error, socket.gaierror):
                raise
            why = f"DNS did not respond within {self._limit_s:g} s"
            raise socket.gaierror(socket.EAI_AGAIN, why) from None

    def _flight(self, wanted: tuple[Any, ...]) -> tuple[float, asyncio.Future[Addresses]]:
        if wanted in self._under_way:
            return self._under_way[wanted]
        if len(self._under_way) >= self._most_lookups:
            why = f"{self._most_lookups} host names are already being resolved"
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
                flight.exception()  # possibly no caller is waiting

        def look_up() -> None:
            found, error = None, None
            try:
                found = self._lookup(*wanted)
            except Exception as caught:
                error = caught
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended, found, error)

        # A daemon thread, because a hanging lookup must not keep the process from exiting.
        threading.Thread(target=look_up, name="name lookup", daemon=True).start()
        return self._under_way[wanted]


class RouterLoop(uvloop.Loop):
    """uvloop's event loop, which resolves names with :class:`NameLookup`."""

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
        """Connect without uvloop's lookup, which it does even for IP addresses."""
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
