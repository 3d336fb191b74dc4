"""Limits the connections to a listening ZeroMQ socket. libzmq has no limit: a client that opens
enough of them would use up the process's descriptors and lock others out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time

import zmq
from zmq.utils.monitor import parse_monitor_message

LEAST_PEERS, MOST_PEERS = 64, 16_384
"""Limit on connections to a port: a third of the process's descriptors, within these bounds."""
_HANDSHAKE_MS = 3_000
"""Time limit of a peer's handshake; libzmq's default is 30 s."""
_PROOF_S = 5.0
"""Time after a new connection in which valid messages are looked up to prove connections; later
only while more than half of the limit is in use."""


def most_peers() -> int:
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(max(LEAST_PEERS, descriptors // 3), MOST_PEERS)


class PeerLimit:
    """Limits connections to a bound TCP socket to ``most``. A further connection replaces the
    oldest that has not proved itself by a valid message; if all have, the new one is closed.
    Strangers that hold every place therefore cannot lock engines out. Create the limit before
    ``bind``, and close it before the socket."""

    def __init__(self, sock: zmq.Socket[bytes], most: int) -> None:
        sock.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self.refused = 0
        """Number of connections closed because there were more than ``most``."""
        self._most = most
        self._unproved: dict[int, None] = {}
        """Descriptors of libzmq's unproved connections, oldest first."""
        self._proved: set[int] = set()
        self._accepted_s = 0.0
        """Time of the last accepted connection."""
        self._socket = sock
        # EVENT_DISCONNECTED follows a failed handshake, whose own event has an errno as value.
        self._events = sock.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        self._fd = int(self._events.getsockopt(zmq.FD))
        asyncio.get_running_loop().add_reader(self._fd, self._drain)
        self._drain()  # the descriptor is edge-triggered

    @property
    def connections(self) -> int:
        return len(self._unproved) + len(self._proved)

    @property
    def asks(self) -> bool:
        """Whether :meth:`proved` should get valid messages now: a connection is unproved, and one
        is new or over half of the limit is in use. Finding a message's connection takes time."""
        if not self._unproved:
            return False
        crowded = self.connections > self._most // 2
        return crowded or time.monotonic() - self._accepted_s < _PROOF_S

    def watches(self, sock: zmq.Socket[bytes]) -> bool:
        return sock is self._socket

    def proved(self, frame: zmq.Frame) -> None:
        """Mark the connection of this frame as proved: its message was valid."""
        fd = int(frame.get(zmq.SRCFD))
        if fd in self._unproved:
            del self._unproved[fd]
            self._proved.add(fd)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        self._socket.disable_monitor()
        self._events.close(0)

    def _drain(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
                fd = int(event["value"])
                self._unproved.pop(fd, None)
                self._proved.discard(fd)
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._unproved[fd] = None
                    self._accepted_s = time.monotonic()
                    if self.connections > self._most:
                        self._end_oldest(event["endpoint"])

    def _end_oldest(self, endpoint: bytes) -> None:
        """Shut down the oldest unproved connection; libzmq notices and closes it."""
        fd = next(iter(self._unproved))
        del self._unproved[fd]
        with contextlib.suppress(OSError):  # already gone
            copy = socket.socket(fileno=os.dup(fd))
            try:
                # Otherwise the descriptor has been reused.
                if copy.getsockname()[1] == int(endpoint.rpartition(b":")[2]):
                    copy.shutdown(socket.SHUT_RDWR)
                    self.refused += 1
            finally:
                copy.close()
