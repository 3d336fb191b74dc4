"""ZMQ sockets between front ends and the scheduler process. Invalid frames are counted, logged once
and dropped. Directory permissions protect ``ipc``, CURVE keys protect ``tcp``."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Sequence

import zmq

from sglang_sbs.router.processes import messages
from sglang_sbs.router.processes.messages import FromScheduler, ToScheduler, encode
from sglang_sbs.router.signals.dialler import Dialler, host_name_of
from sglang_sbs.router.signals.inbox import endpoint_of
from sglang_sbs.router.signals.peer_limit import PeerLimit, most_peers
from sglang_sbs.wire import MalformedMessage
from sglang_sbs.wire.curve import CurveKeys, Gatekeeper

logger = logging.getLogger(__name__)

_DRAIN_LIMIT = 512
"""Most messages handled before other callbacks of the event loop get a turn."""
_HWM = 100_000
_OPTIONS = {zmq.LINGER: 0, zmq.IPV6: 1, zmq.MAXMSGSIZE: messages.MAX_MESSAGE_BYTES}
_HEARTBEAT_MS = 1000
_SILENCE_MS = 4000
"""Milliseconds of silence, or of a failing connect, after which ZMQ connects anew. A network that
silently drops packets closes no connection."""


Receive = Callable[[bytes, ToScheduler], None]
"""Called with each message of a front end, and the ZMQ identity of its socket."""


class _Socket:
    """A ZMQ socket of an event loop that handles messages as they arrive."""

    def __init__(self, kind: int, peer: str, options: dict[zmq.SocketOption, int]) -> None:
        """Open a socket of the ZMQ type ``kind``; ``peer`` names the other side in logs. Raises:
        zmq.ZMQError, no more sockets are possible."""
        self.malformed = 0
        self.peers: PeerLimit | None = None
        """Limit on connections, if the socket listens at a TCP port."""
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._again = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            self._socket = self._context.socket(kind)
        except zmq.ZMQError:
            self._context.term()
            raise
        self._socket.set_hwm(_HWM)
        patience = (zmq.HEARTBEAT_TIMEOUT, zmq.HANDSHAKE_IVL, zmq.CONNECT_TIMEOUT)
        times = {zmq.HEARTBEAT_IVL: _HEARTBEAT_MS, **dict.fromkeys(patience, _SILENCE_MS)}
        for option, value in (_OPTIONS | times | options).items():
            self._socket.setsockopt(option, value)

    def watch(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self.drain)
        self._soon()

    def take(self, frames: list[bytes]) -> None:
        """Decode and handle one message. Raises: MalformedMessage, it cannot be decoded."""
        raise NotImplementedError

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send one message; return False if there is no receiver, or it does not read."""
        if self._socket.closed:
            return False
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:  # not connected, peer gone, or not reading
            return False
        finally:
            # ZMQ's descriptor is edge-triggered, and sending may consume the edge.
            self._soon()
        return True

    def _soon(self) -> None:
        if not self._again:
            self._again = True
            self._loop.call_soon(self.drain)

    def drain(self) -> None:
        self._again = False
        for _ in range(_DRAIN_LIMIT):
            if self._socket.closed:
                return
            limit = self.peers if self.peers is not None and self.peers.asks else None
            first: zmq.Frame | None = None
            try:
                if limit is None:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
                else:
                    whole = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                    first, frames = whole[0], [frame.bytes for frame in whole]
            except zmq.Again:
                return
            try:
                self.take(frames)
                if limit is not None and first is not None:
                    limit.proved(first)
            except MalformedMessage as error:
                self.malformed += 1
                if self.malformed == 1:
                    text = "malformed message from %s (counted from now on): %s"
                    logger.warning(text, self._peer, error)
            except Exception:  # an error must not leave the rest unread
                logger.exception("handling a message failed")
        self._soon()

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket. ``linger_ms``: how long unsent messages may still be sent."""
        if self.peers is not None:
            self.peers.close()
            self.peers = None
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger_ms)


class FrontEndSocket(_Socket):
    """Socket of a front end (DEALER). Each one is a new session for the scheduler."""

    def __init__(
        self,
        keys: CurveKeys | None,
        endpoint: str,
        receive: Callable[[FromScheduler], None],
        *,
        silent_s: float = 10.0,
        follow_s: float = 2.0,
    ) -> None:
        """Connect to a scheduler. After ``silent_s`` seconds of silence its host name is resolved
        again every ``follow_s`` seconds and the next address is tried: the scheduler may have
        moved. Raises: zmq.ZMQError, no more sockets are possible, or the endpoint is invalid."""
        # Queue nothing for an absent scheduler, because it would be stale later.
        options = {zmq.IMMEDIATE: 1, zmq.RECONNECT_IVL: 50, zmq.RECONNECT_IVL_MAX: 500}
        super().__init__(zmq.DEALER, "the scheduler", options)
        self._receive = receive
        self._last_message_s = -math.inf
        # Several schedulers may share a name: each new line tries any of them.
        self._dialler = Dialler(
            self._socket,
            "scheduler's messages",
            self._soon,
            stands=lambda: self._loop.time() - self._last_message_s < silent_s,
            first=random.randrange,
            follow_s=follow_s,
        )
        try:
            if keys is not None:
                keys.connect(self._socket)
            if host_name_of(endpoint):
                self._dialler.dial([endpoint])
            else:
                self._socket.connect(endpoint)
            self.watch()
        except BaseException:
            self.close()
            raise

    def send_message(self, message: ToScheduler) -> bool:
        return self.send(encode(message))

    def take(self, frames: list[bytes]) -> None:
        message = messages.decode_from_scheduler(frames)
        self._last_message_s = self._loop.time()
        self._receive(message)

    def close(self, linger_ms: int = 0) -> None:
        """Close the connection. ``linger_ms``: how long unsent messages may still be sent."""
        self._dialler.close()
        super().close(linger_ms)
        self._context.term()


class SchedulerSocket(_Socket):
    """Socket of the scheduler (ROUTER), which addresses front ends by their ZMQ identity."""

    _receive: Receive

    def __init__(self) -> None:
        super().__init__(zmq.ROUTER, "a front end", {zmq.ROUTER_MANDATORY: 1})
        self._gatekeeper: Gatekeeper | None = None
        self._taken = 0

    def open(self, endpoint: str, keys: CurveKeys | None, receive: Receive) -> str:
        """Listen; return the endpoint with its actual port. Raises: OSError, it cannot be bound."""
        self._receive = receive
        if endpoint.startswith("tcp:"):
            self.peers = PeerLimit(self._socket, most_peers())
        if keys is not None:
            self._gatekeeper = Gatekeeper(self._context, keys)
            keys.serve(self._socket)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(f"--sbs-listen {endpoint}: {error}") from error
        self.watch()
        return endpoint_of(self._socket)

    def send_message(self, identity: bytes, message: FromScheduler) -> bool:
        return self.send([identity, *encode(message)])

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of messages by result (``taken``, ``malformed``), of clients ``refused`` for
        their key, and of connections ``crowded_out`` by the limit."""
        refused = self._gatekeeper.refused if self._gatekeeper is not None else 0
        crowded = self.peers.refused if self.peers is not None else 0
        taken = {"taken": self._taken, "malformed": self.malformed}
        return taken | {"refused": refused, "crowded_out": crowded}

    def take(self, frames: list[bytes]) -> None:
        message = messages.decode_to_scheduler(frames[1:])
        self._taken += 1
        self._receive(frames[0], message)

    def close(self, linger_ms: int = 0) -> None:
        super().close(linger_ms)
        if self._gatekeeper is not None:
            self._gatekeeper.close()
            self._gatekeeper = None
        self._context.term()
