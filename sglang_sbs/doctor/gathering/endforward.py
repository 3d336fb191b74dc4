"""Listens for EndForward for a few seconds, at the addresses where a router would.

Engines connect to any process that listens at an address in ``SGLANG_SBS_ROUTERS``. The doctor does
not listen at a port that is in use. It does not listen either if only the engines or only the
doctor has a key, because libzmq would not reconnect to the router soon after a failed handshake."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import zmq

from sglang_sbs.doctor.facts import (
    EngineFacts,
    RankReports,
    ReceivedReports,
    key_differs,
    may_speak_unseen,
)
from sglang_sbs.doctor.options import DoctorOptions
from sglang_sbs.engine.config import join_tcp, split_tcp
from sglang_sbs.engine.publish import resolve_endpoints
from sglang_sbs.router.signals.endforward_listener import publisher_endpoints
from sglang_sbs.router.signals.endforward_socket import peer_of
from sglang_sbs.router.workers.server_info import node_of_rank
from sglang_sbs.wire import TOPIC, decode_endforward
from sglang_sbs.wire.curve import Gatekeeper

_FAILED_HANDSHAKE = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_MAX_MESSAGE_BYTES = 1 << 20
_TURN_MS = 100


def endpoints_to_hear(options: DoctorOptions, engines: Iterable[EngineFacts]) -> list[str]:
    """Return the endpoint given by the user, otherwise those to which engines report. Empty if no
    report could arrive."""
    named: dict[str, bool] = {}
    for facts in engines:
        for endpoint in facts.sbs.routers if facts.sbs is not None else ():
            named[endpoint] = named.get(endpoint, False) or key_differs(options, facts)
    if options.given_bind is not None:
        return [] if any(named.values()) else [options.given_bind]
    default = options.router_flags.endforward_bind
    if not named and default is not None and any(map(may_speak_unseen, engines)):
        return [default]
    return [endpoint for endpoint, differs in named.items() if not differs]


class DoctorListener:
    """Listens once; ``listen`` blocks, so call it in a thread."""

    def __init__(self, options: DoctorOptions, engines: Sequence[EngineFacts]) -> None:
        self._options = options
        self._engines = engines
        self._keys = keys = options.router_flags.endforward_keys
        self._received = ReceivedReports()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        # Two sockets: with keys one cannot be both CURVE server and client.
        self._listening, self._dialling = self._subscriber(), self._subscriber()
        if keys is not None:
            keys.serve(self._listening)
            keys.connect(self._dialling)

    def listen(self) -> ReceivedReports:
        """Listen until every rank with a plugin has reported, or ``wait_s`` is over."""
        gatekeeper = Gatekeeper(self._context, self._keys) if self._keys is not None else None
        started_s = time.monotonic()
        sockets = self._listening, self._dialling
        monitors = [sock.get_monitor_socket(_FAILED_HANDSHAKE) for sock in sockets]
        try:
            for endpoint in endpoints_to_hear(self._options, self._engines):
                self._bind(endpoint)
            for facts in self._engines:
                self._dial(facts)
            if self._received.bound or self._received.dialled:
                self._receive(started_s + self._options.wait_s, monitors)
        finally:
            # Close monitors first: without a reader libzmq would block at its next event.
            for sock in sockets:
                sock.disable_monitor()
            for sock in (*monitors, *sockets):
                sock.close(0)
            if gatekeeper is not None:
                gatekeeper.close()
            self._context.term()
        self._received.listened_s = time.monotonic() - started_s
        return self._received

    def _subscriber(self) -> zmq.Socket[bytes]:
        sock = self._context.socket(zmq.SUB)
        sock.linger, sock.ipv6, sock.maxmsgsize = 0, True, _MAX_MESSAGE_BYTES
        sock.setsockopt(zmq.SUBSCRIBE, TOPIC)
        return sock

    def _bind(self, endpoint: str) -> None:
        """Listen at an endpoint, or record why that is impossible."""
        try:
            errors = [self._bind_one(candidate) for candidate in _addresses(endpoint)]
        except (OSError, ValueError) as error:
            self._received.failed[endpoint] = str(error)
            return
        if errno.EADDRINUSE in errors and 0 not in errors:
            self._received.busy.append(endpoint)
        elif errors and set(errors) <= {errno.EADDRNOTAVAIL, errno.ENODEV}:
            self._received.elsewhere.append(endpoint)
        elif 0 not in errors:
            self._received.failed[endpoint] = zmq.strerror(errors[0]) if errors else "no address"

    def _bind_one(self, endpoint: str) -> int:
        """Bind one address. Return 0, or the errno."""
        if endpoint.startswith("ipc://") and _ipc_taken(endpoint.removeprefix("ipc://")):
            return errno.EADDRINUSE
        try:
            self._listening.bind(endpoint)
        except zmq.ZMQError as error:
            return error.errno or errno.EINVAL
        self._received.bound.append(endpoint)
        return 0

    def _dial(self, facts: EngineFacts) -> None:
        if facts.sbs is None or not facts.sbs.bind or key_differs(self._options, facts):
            return
        address = ""
        for endpoint in publisher_endpoints(facts.url, facts.sbs.bind, facts.known.dp_size):
            host, port = split_tcp(endpoint)
            try:
                # Resolve the name here, because libzmq would block its receiving thread with it.
                address = address or split_tcp(min(resolve_endpoints(host, port)))[0]
            except OSError as error:
                self._received.failed[endpoint] = str(error)
                return
            self._dialling.connect(join_tcp(address, port))
            self._received.dialled.append(endpoint)

    def _receive(self, until_s: float, monitors: Sequence[zmq.Socket[bytes]]) -> None:
        poller = zmq.Poller()
        for sock in (self._listening, self._dialling, *monitors):
            poller.register(sock, zmq.POLLIN)
        speaking = [
            (facts.known, facts.sbs.boot_id)
            for facts in self._engines
            if facts.sbs is not None and not key_differs(self._options, facts)
        ]
        # Each node has its own boot id; only the first node's is reported.
        expected = {
            boot: sum(node_of_rank(info, rank) == 0 for rank in range(info.dp_size))
            for info, boot in speaking
        }
        all_ranks = sum(info.dp_size for info, _ in speaking)
        patient = any(map(may_speak_unseen, self._engines))
        while time.monotonic() < until_s:
            for sock, _ in poller.poll(_TURN_MS):
                for frames in _messages(sock):
                    if sock in monitors:
                        self._received.handshakes_failed += 1
                    else:
                        self._take([frame.bytes for frame in frames], peer_of(frames[0]))
            by_boot = self._received.ranks
            if (
                not patient
                and all(len(by_boot.get(boot, ())) >= ranks for boot, ranks in expected.items())
                and sum(map(len, by_boot.values())) >= all_ranks
            ):
                return

    def _take(self, frames: list[bytes], peer: str) -> None:
        try:
            report = decode_endforward(frames)
        except (ValueError, RecursionError) as error:
            self._received.malformed[str(error)[:120]] += 1
            return
        ranks = self._received.ranks.setdefault(report.boot_id, {})
        before = ranks.get(report.dp_rank)
        messages = before.messages + 1 if before is not None else 1
        ranks[report.dp_rank] = RankReports(messages, report, peer)


def _messages(sock: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    while sock.poll(0):
        yield sock.recv_multipart(zmq.NOBLOCK, copy=False)


def _addresses(endpoint: str) -> list[str]:
    """Return the addresses to bind for an endpoint of engines. Raises: OSError, ValueError."""
    if endpoint.startswith("ipc://"):
        return [endpoint]
    host, port = split_tcp(endpoint)
    if host in ("*", "0.0.0.0", "::"):
        return [endpoint]
    return sorted(resolve_endpoints(host, port))


def _ipc_taken(path: str) -> bool:
    """Return whether another process listens at a Unix socket; binding would take the path over."""
    if not Path(path).exists():
        return False
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(1.0)
        try:
            return sock.connect_ex(path) != errno.ECONNREFUSED
        except OSError:
            return True
