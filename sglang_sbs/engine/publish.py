"""The PUB socket of one DP rank. It belongs to the thread that calls :meth:`Publisher.send`; name
resolution, which may block for seconds, runs in a daemon thread."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import zmq
from zmq.utils.monitor import parse_monitor_message

from sglang_sbs.engine.config import NODE_HOST, is_hostname, join_tcp, split_tcp
from sglang_sbs.wire.curve import CurveKeys, Gatekeeper

logger = logging.getLogger(__name__)

RESOLVE_INTERVAL_S = 30.0
REVIVE_INTERVAL_S = 5.0
"""Seconds between checks for routers whose connection libzmq has abandoned."""
SEND_HWM = 64
"""Limit on messages queued for a stalled router; further ones are lost, and the next one that
arrives makes up for them."""

_MORE = zmq.NOBLOCK | zmq.SNDMORE

Resolve = Callable[[str, int], frozenset[str]]


class BindError(OSError):
    """This rank has no usable endpoint; the message has the reason and the remedy."""


def resolve_endpoints(host: str, port: int) -> frozenset[str]:
    """Return all addresses of ``host`` as endpoints. IPv6 is used only without IPv4, because a
    router that listens on both must not get messages twice. May block. Raises: OSError, the name
    does not resolve."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    v4 = {str(item[4][0]) for item in found if item[0] == socket.AF_INET}
    chosen = v4 or {str(item[4][0]) for item in found if item[0] == socket.AF_INET6}
    return frozenset(join_tcp(address, port) for address in chosen)


def is_own_address(host: str) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


class Publisher:
    """Sends frames to every router without blocking; nothing is queued for absent routers."""

    def __init__(
        self,
        routers: Sequence[str],
        bind: str | None,
        *,
        resolve: Resolve = resolve_endpoints,
        resolve_interval_s: float = RESOLVE_INTERVAL_S,
        revive_interval_s: float = REVIVE_INTERVAL_S,
        keys: CurveKeys | None = None,
        source: str = "",
    ) -> None:
        """Open the socket; connections are made in the background.

        ``bind``: the endpoint of this rank (not of rank 0). ``source``: the IP address to connect
        from, if it is this machine's. ``keys``: accept only routers with the same secret; then
        either ``routers`` or ``bind``. Raises: BindError, it cannot be bound and there are no
        routers."""
        named = [e for e in routers if e.startswith("tcp://") and is_hostname(split_tcp(e)[0])]
        self._literal = frozenset(routers) - frozenset(named)
        self._wanted = self._connected = self._literal
        self._closed = threading.Event()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PUB)
        self._gatekeeper: Gatekeeper | None = None
        self._monitor = self._socket.get_monitor_socket(zmq.Event.HANDSHAKE_FAILED_PROTOCOL)
        self._revive_s = 0.0
        self._revive_interval_s = revive_interval_s
        self._source = source
        if source and not is_own_address(source):
            # With address translation it may still be right.
            logger.warning("%s: %s is not an address of this machine", NODE_HOST, source)
            self._source = ""
        if keys is not None and bind is not None:
            self._gatekeeper = Gatekeeper(self._context, keys)
            keys.serve(self._socket)
        elif keys is not None:
            keys.connect(self._socket)
        self._socket.set_hwm(SEND_HWM)
        self._socket.linger, self._socket.ipv6 = 0, True
        # Keep no pipe while a router is away, because it would get stale messages on return.
        self._socket.immediate = True
        # Reconnect quickly, because a returning router sends requests at once.
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = 100, 500
        # Detect router hosts that vanish without closing the connection.
        self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = 5000, 15000
        # In bind mode, silent connections must not use up the engine's descriptors.
        self._socket.handshake_ivl = 2000
        try:
            if bind is not None:
                self._bind(bind, fatal=not routers)
            for endpoint in self._literal:
                self._socket.connect(self._from_source(endpoint))
        except Exception:
            self.close()
            raise
        self._found: dict[str, frozenset[str]] = {}
        self._naming = threading.Lock()
        for endpoint in named:
            follow = partial(self._follow_name, endpoint, resolve, resolve_interval_s)
            threading.Thread(target=follow, name="sglang-sbs-resolver", daemon=True).start()

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue one message for all connected routers. Raises: zmq.ZMQError."""
        if self._wanted is not self._connected:
            self._follow(self._wanted)
        now_s = time.monotonic()
        if now_s >= self._revive_s:
            self._revive_s = now_s + self._revive_interval_s
            self._revive()
        # send_multipart would check and wrap each frame in Python, half the cost of a message.
        send = super(zmq.Socket, self._socket).send
        for frame in frames[:-1]:
            send(frame, _MORE)
        send(frames[-1], zmq.NOBLOCK)

    def close(self) -> None:
        """Stop resolving and drop the socket. May be called twice."""
        self._closed.set()
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(0)
        self._socket.close(0)
        if self._gatekeeper is not None:
            self._gatekeeper.close()
            self._gatekeeper = None
        self._context.term()

    def _bind(self, endpoint: str, *, fatal: bool) -> None:
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            reason = os.strerror(error.errno or 0)
            message = (
                f"SGLANG_SBS_BIND: cannot bind {endpoint}: {reason}; give each engine on this host "
                "its own base port, at least its DP size apart, or use SGLANG_SBS_ROUTERS"
            )
            if fatal:
                raise BindError(message) from error
            logger.warning("%s (still connecting to SGLANG_SBS_ROUTERS)", message)

    def _follow_name(self, endpoint: str, resolve: Resolve, interval_s: float) -> None:
        """Follow the addresses of one host name, in a separate thread because an unanswered lookup
        takes half a minute."""
        warned = known = False
        retry_s = min(1.0, interval_s)
        while True:
            try:
                found = resolve(*split_tcp(endpoint))
                warned, known = False, True
                with self._naming:
                    self._found[endpoint] = found
                    wanted = self._literal.union(*self._found.values())
                    if wanted != self._wanted:
                        self._wanted = wanted
            except OSError as error:
                # Keep the known addresses: a name server outage must not silence the engine.
                if not warned:
                    warned = True
                    text = "SGLANG_SBS_ROUTERS: %s does not resolve (%s); trying again"
                    logger.warning(text, endpoint, error)
            retry_s = interval_s if known else min(2 * retry_s, interval_s)
            if self._closed.wait(retry_s):
                return

    def _revive(self) -> None:
        """Reconnect where libzmq has given up, as it does when only one side has a key: a router
        restarted with the right key must be found."""
        ports = set()
        with suppress(zmq.Again):
            while True:
                message = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
                # The address may be spelled differently than given (IPv4 within IPv6).
                ports.add(message["endpoint"].decode().rpartition(":")[2])
        for endpoint in self._connected:
            if endpoint.rpartition(":")[2] in ports:
                self._socket.disconnect(self._from_source(endpoint))
                self._socket.connect(self._from_source(endpoint))

    def _from_source(self, endpoint: str) -> str:
        """Return the endpoint in libzmq's form with the source address (``zmq_tcp(7)``)."""
        scheme, _, address = endpoint.partition("://")
        if not self._source or scheme != "tcp" or (":" in self._source) != ("[" in address):
            return endpoint
        return f"{join_tcp(self._source, 0)};{address}"

    def _follow(self, endpoints: frozenset[str]) -> None:
        for gone in self._connected - endpoints:
            self._socket.disconnect(self._from_source(gone))
        for new in endpoints - self._connected:
            self._socket.connect(self._from_source(new))
        logger.info("EndForward goes to %s", ", ".join(sorted(endpoints)) or "no endpoint")
        self._connected = endpoints
