"""The ZMQ sockets between front ends and the scheduler process.

Frames that are no message are counted, logged once and dropped. An ``ipc`` socket is protected by
the directory it lies in, a ``tcp`` one by CURVE keys.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from sglang_sbs.router.processes.messages import (
    MAX_MESSAGE_BYTES,
    FromScheduler,
    ToScheduler,
    decode_from_scheduler,
    decode_to_scheduler,
    encode,
)
from sglang_sbs.wire import MalformedMessage
from sglang_sbs.wire.curve import CurveKeys, Gatekeeper

logger = logging.getLogger(__name__)

_DRAIN_LIMIT = 512
"""Messages handled before other callbacks of the event loop get a turn."""
_HWM = 100_000
_HEARTBEAT_MS = 1000
_UNHEARD_MS = 4000
"""A connection on which nothing is heard, or not made, for so long is made anew."""


class _Socket:
    def __init__(self, kind: int, take: Callable[[list[bytes]], None]) -> None:
        """Raises: zmq.ZMQError, there is no room for another one."""
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._fd = -1
        self._again = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] | None = None
        try:
            self._socket = self._context.socket(kind)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.IPV6, 1)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            self._socket.set_hwm(_HWM)
            # A network that swallows everything breaks no connection; this does.
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            for patience in (zmq.HEARTBEAT_TIMEOUT, zmq.HANDSHAKE_IVL, zmq.CONNECT_TIMEOUT):
                self._socket.setsockopt(patience, _UNHEARD_MS)
        except BaseException:
            _Socket.close(self)
            self.end()
            raise

    def watch(self) -> None:
        assert self._socket is not None
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self.drain)
        self._soon()

    def send(self, frames: Sequence[bytes]) -> bool:
        """False: there is nobody to take it (any more)."""
        if self._socket is None:
            return False
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:  # nobody connected, peer gone, or it does not read
            return False
        finally:
            # ZMQ's descriptor is edge-triggered, and sending may use up the edge.
            self._soon()
        return True

    def _soon(self) -> None:
        if not self._again:
            self._again = True
            self._loop.call_soon(self.drain)

    def drain(self) -> None:
        self._again = False
        for _ in range(_DRAIN_LIMIT):
            if self._socket is None:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(frames)
            except Exception:  # a defect must not leave the rest unread
                logger.exception("handling a message failed")
        self._soon()

    def close(self, linger_ms: int = 0) -> None:
        """``linger_ms``: how long what was sent last may take to leave."""
        if self._socket is None:
            return
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
        self._socket.close(linger_ms)
        self._socket = None

    def end(self) -> None:
        """After ``close``: nothing else uses the context."""
        self._context.term()


class FrontEndSocket(_Socket):
    """The front end's end (DEALER). Each one is a new session for the scheduler."""

    def __init__(
        self, endpoint: str, keys: CurveKeys | None, receive: Callable[[FromScheduler], None]
    ) -> None:
        """Raises: zmq.ZMQError, there is no room for another one, or no such endpoint."""
        super().__init__(zmq.DEALER, self._received)
        self._receive = receive
        self.malformed = 0
        assert self._socket is not None
        try:
            # Queue nothing for a scheduler that is away: by its return it would be stale.
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
            self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
            if keys is not None:
                keys.connect(self._socket)
            self._socket.connect(endpoint)
            self.watch()
        except BaseException:
            self.close()
            raise

    def tell(self, message: ToScheduler) -> bool:
        return self.send(encode(message))

    def _received(self, frames: list[bytes]) -> None:
        try:
            message = decode_from_scheduler(frames)
        except MalformedMessage as error:
            self.malformed += 1
            if self.malformed == 1:
                logger.warning("malformed message from the scheduler: %s", error)
            return
        self._receive(message)

    def close(self, linger_ms: int = 0) -> None:
        """``linger_ms``: for last words. Without any nothing is waited for: libzmq's thread may be
        in a look-up of the scheduler's name, which can take many seconds."""
        super().close(linger_ms)
        if linger_ms:
            self.end()
        else:
            threading.Thread(target=self.end, name="closing a line", daemon=True).start()


class SchedulerSocket(_Socket):
    """The scheduler's end (ROUTER); peers are told apart by their ZMQ identity."""

    def __init__(self, receive: Callable[[bytes, ToScheduler], None]) -> None:
        super().__init__(zmq.ROUTER, self._received)
        self._receive = receive
        self._gatekeeper: Gatekeeper | None = None
        self._counts: Counter[str] = Counter()

    def open(self, endpoint: str, keys: CurveKeys | None) -> str:
        """Listen; returns the endpoint with a wildcard port resolved. Raises: OSError."""
        assert self._socket is not None
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        if keys is not None:
            self._gatekeeper = Gatekeeper(self._context, keys)
            keys.serve(self._socket)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(f"--sbs-listen {endpoint}: {error}") from error
        self.watch()
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def tell(self, identity: bytes, message: FromScheduler) -> bool:
        return self.send([identity, *encode(message)])

    @property
    def counts(self) -> dict[str, int]:
        """Messages by fate (``taken``, ``malformed``) and clients ``refused`` by their key."""
        refused = self._gatekeeper.refused if self._gatekeeper is not None else 0
        return {"taken": 0, "malformed": 0, **self._counts, "refused": refused}

    def _received(self, frames: list[bytes]) -> None:
        try:
            message: Any = decode_to_scheduler(frames[1:])
        except MalformedMessage as error:
            self._counts["malformed"] += 1
            if self._counts["malformed"] == 1:
                logger.warning(
                    "malformed message from a front end (counted from now on): %s", error
                )
            return
        self._counts["taken"] += 1
        self._receive(frames[0], message)

    def close(self, linger_ms: int = 0) -> None:
        super().close(linger_ms)
        if self._gatekeeper is not None:
            self._gatekeeper.close()
            self._gatekeeper = None
        self.end()
