"""A bound on the connections to a ZeroMQ socket that listens. libzmq has none: whoever opens enough
of them takes all descriptors of the process, and clients are turned away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import zmq
from zmq.utils.monitor import parse_monitor_message

HANDSHAKE_MS = 3_000
"""How long a peer may take to say hello; libzmq's default is 30 s."""


class PeerLimit:
    """Watches a bound TCP socket, and closes what connects beyond ``most``. Must be made before
    ``bind`` and be closed before the socket."""

    def __init__(self, sock: zmq.Socket[bytes], most: int) -> None:
        sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self.refused = 0
        """Connections closed as there were too many."""
        self._most = most
        self._open: set[int] = set()
        """Descriptors of libzmq's connections."""
        self._socket = sock
        self._events = sock.get_monitor_socket(
            zmq.EVENT_ACCEPTED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CLOSED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        self._fd = int(self._events.getsockopt(zmq.FD))
        asyncio.get_running_loop().add_reader(self._fd, self._drain)
        self._drain()  # the descriptor is edge-triggered

    @property
    def connections(self) -> int:
        return len(self._open)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        self._socket.disable_monitor()

    def _drain(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
                fd = int(event["value"])
                if event["event"] != zmq.EVENT_ACCEPTED:
                    self._open.discard(fd)
                elif len(self._open) < self._most or not self._end(fd, event["endpoint"]):
                    self._open.add(fd)

    def _end(self, fd: int, endpoint: bytes) -> bool:
        """Shut a connection down; libzmq notices and closes it. False: it is another's by now."""
        with contextlib.suppress(OSError):
            copy = socket.socket(fileno=os.dup(fd))
            try:
                if copy.getsockname()[1] == int(endpoint.rpartition(b":")[2]):
                    copy.shutdown(socket.SHUT_RDWR)
                    self.refused += 1
                    return True
            finally:
                copy.close()
        return False
