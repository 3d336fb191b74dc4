"""Awaitable receiving from a ZeroMQ socket, and a listening socket's endpoint."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress

import zmq


def endpoint_of(sock: zmq.Socket[bytes]) -> str:
    """Return the bound endpoint, with a wildcard port resolved and IPv4 addresses in IPv4 form."""
    return re.sub(r"\[::ffff:([0-9.]+)\]", r"\1", sock.getsockopt_string(zmq.LAST_ENDPOINT))


class Inbox:
    """Awaits messages on a socket, at a fraction of the cost of :mod:`zmq.asyncio`."""

    def __init__(self, sock: zmq.Socket[bytes]) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None
        self._loop.add_reader(sock.fileno(), self._called)

    async def get(self) -> list[bytes]:
        """Return the frames of the next message."""
        while True:
            with suppress(zmq.Again):
                return self.sock.recv_multipart(zmq.NOBLOCK)
            self._waiting = self._loop.create_future()
            await self._waiting

    def _called(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
        else:
            self.sock.getsockopt(zmq.EVENTS)  # clears the descriptor's edge

    def close(self) -> None:
        self._loop.remove_reader(self.sock.fileno())
        self.sock.close(0)
