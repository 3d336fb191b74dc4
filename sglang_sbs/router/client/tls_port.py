"""Accepts TLS connections of a port. asyncio's TLS server reports a connection only after its
handshake, so clients that never start one could not be counted."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sglang_sbs.router.client.intake import Doorman

logger = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""Time limit of a TLS handshake."""
_ACCEPTED_AT_ONCE = 8
"""Connections accepted in one turn of the event loop. More silent ones at once could make a client
in its handshake the oldest connection, which :class:`.Doorman` closes at its limit."""
_PAUSE_S = 0.1
"""Pause before accepting again after no file descriptor was left."""


@dataclass(eq=False, repr=False)
class _Handshake:
    """A connection in its TLS handshake, with the methods of a transport that :class:`.Doorman`
    uses."""

    sock: socket.socket
    task: asyncio.Task[None] | None = None

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.task is None or self.task.done()

    def abort(self) -> None:
        if self.task is not None:
            self.task.cancel()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class TlsPort:
    """Listens for TLS connections until :meth:`close`, in place of the ``asyncio.Server`` used for
    plain HTTP."""

    def __init__(
        self,
        sockets: list[socket.socket],
        tls: ssl.SSLContext,
        doorman: Doorman,
        gate: Callable[[], asyncio.Protocol],
    ) -> None:
        """Accept connections on listening ``sockets``; ``gate`` serves each after its handshake."""
        self.sockets = sockets
        self._tls, self._doorman, self._gate = tls, doorman, gate
        self._loop = asyncio.get_running_loop()
        self._under_way: set[asyncio.Task[None]] = set()
        for sock in sockets:
            sock.setblocking(False)
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    def close(self) -> None:
        """Stop listening; existing connections continue."""
        for sock in self.sockets:
            if sock.fileno() >= 0:
                self._loop.remove_reader(sock.fileno())
                sock.close()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._doorman.close_oldest()
                    self._loop.remove_reader(listening.fileno())
                    self._loop.call_later(_PAUSE_S, self._resume, listening)
                return
            sock.setblocking(False)
            handshake = _Handshake(sock)
            handshake.task = self._loop.create_task(self._shake_hands(handshake))
            self._under_way.add(handshake.task)
            handshake.task.add_done_callback(partial(self._over, handshake))
            self._doorman.enter(handshake, HANDSHAKE_S)

    def _resume(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    async def _shake_hands(self, handshake: _Handshake) -> None:
        try:
            if not await self._first_byte(handshake.sock):
                return
            self._doorman.on_received(handshake)
            self._doorman.enter(handshake, HANDSHAKE_S)  # now behind silent connections
            await self._loop.connect_accepted_socket(
                *(self._gate, handshake.sock), ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError as error:  # not TLS, too late, or gone
            logger.debug("a TLS handshake failed: %s", type(error).__name__)

    async def _first_byte(self, sock: socket.socket) -> bytes:
        """Return the client's first byte without consuming it; empty if the client left. A TLS
        connection's objects take 20 KiB, so silent clients must not get them."""
        fd, arrived = sock.fileno(), self._loop.create_future()

        def readable() -> None:
            if not arrived.done():
                arrived.set_result(None)

        self._loop.add_reader(fd, readable)
        try:
            await arrived
        finally:
            self._loop.remove_reader(fd)
        return sock.recv(1, socket.MSG_PEEK)

    def _over(self, handshake: _Handshake, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._doorman.on_received(handshake)
        if task.cancelled() or task.exception() is not None:
            handshake.sock.close()  # the loop had not taken it yet
