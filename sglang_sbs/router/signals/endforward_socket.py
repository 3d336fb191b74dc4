"""Receives and decodes EndForward messages.

Network input is counted and never raises. Without keys the socket has no authentication.

A thousand ranks send tens of thousands of messages per second. Pending messages are received first
and handled for ``_TURN_S`` at a time, so that a storm does not block the process. During a storm, a
message about a rank's state replaces an unread one: all its values are absolute, and the echoed
request ids of both are joined. Starts and ends of prefill passes are never replaced."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import msgspec
import zmq

from sglang_sbs.router.signals.dialler import Dialler
from sglang_sbs.router.signals.inbox import endpoint_of
from sglang_sbs.router.signals.peer_limit import PeerLimit, most_peers
from sglang_sbs.wire import TOPIC, EndForward, decode_endforward
from sglang_sbs.wire.curve import CurveKeys, Gatekeeper
from sglang_sbs.wire.endforward import FRAMES, MAX_RIDS, ImplausibleMessage

logger = logging.getLogger(__name__)

_DRAIN_LIMIT = 4096
"""Messages received before other callbacks of the event loop get a turn."""
_TURN_S = 0.01
"""Longest time spent on messages in one turn."""
_MAX_MESSAGE_BYTES = 1 << 20
_OF_SUBSCRIBERS = {
    zmq.LINGER: 0,
    zmq.IPV6: 1,
    zmq.MAXMSGSIZE: _MAX_MESSAGE_BYTES,
    # Unread messages per sender, in addition to the kernel's buffer: seconds of a rank's reports.
    # More would be outdated, and gigabytes with a thousand ranks.
    zmq.RCVHWM: 128,
    zmq.RCVBUF: 64 << 10,
    # Intervals between connection attempts, and their time limit: packets to an absent host are not
    # rejected, and the kernel would retry ever more rarely.
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 2_000,
    zmq.CONNECT_TIMEOUT: 5_000,
    # A vanished host closes no connection, and the connection of one that returns with the same
    # address would stay dead.
    zmq.HEARTBEAT_IVL: 5_000,
    zmq.HEARTBEAT_TIMEOUT: 15_000,
}
_MAX_WHY_CHARS = 300
"""Limit on the logged reason why a message is rejected, which may quote the sender."""


@dataclass(slots=True, eq=False)
class _Slot:
    report: EndForward
    peer: str


class EndForwardSocket:
    """Listens where engines connect, and connects to engines that bind."""

    def __init__(
        self, handle: Callable[[EndForward, str], None], flag: str = "--sbs-endforward-bind"
    ) -> None:
        """Create the socket; ``handle`` gets each message and the sender's IP address (empty if not
        looked up). ``flag`` is named in errors about the endpoint."""
        self._handle_message = handle
        self._flag = flag
        self._endpoints: Collection[str] = ()
        self.counts: Counter[str] = Counter()
        """Messages by result: ``bound``, ``unbound``, ``malformed``, ``implausible``, ``dropped``,
        ``superseded`` (replaced while unread)."""
        self.busy_s = 0.0
        """Seconds spent on messages, including the events that they cause."""
        self._unread: deque[_Slot] = deque()
        self._newest: dict[tuple[str, int], _Slot] = {}
        """Last unread message of each rank, if a later one may replace it."""
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._going_on: set[int] = set()
        """File descriptors of sockets that are read again in the next turn of the event loop."""
        self._dialler: Dialler | None = None
        """Connects to engines that bind. With keys it needs a separate socket, because one socket
        cannot be both CURVE server and client."""
        self._gatekeeper: Gatekeeper | None = None
        self.peers: PeerLimit | None = None
        """Limit on connections to the bound port."""

    def open(self, bind: str | None, keys: CurveKeys | None = None) -> str | None:
        """Start receiving and return the bound endpoint, with a wildcard port resolved; ``None``
        without ``bind``. With ``keys`` only engines with the same secret are accepted. Raises:
        OSError, it cannot be bound."""
        self._context = zmq.Context(io_threads=1)
        listening = self._subscriber()
        endpoint = None
        if bind is not None and not bind.startswith("ipc:"):
            self.peers = PeerLimit(listening, most_peers())
        if keys is not None:
            self._gatekeeper = Gatekeeper(self._context, keys)
            keys.serve(listening)
        if bind is not None:
            try:
                listening.bind(bind)
            except zmq.ZMQError as error:
                self._end_peers()
                listening.close(0)
                self._end_context()
                text = f"{self._flag} {bind}: {error.strerror}"
                raise OSError(error.errno, text) from error
            endpoint = endpoint_of(listening)
        dialling = listening
        self._watch(listening)
        if keys is not None:
            dialling = self._subscriber()
            keys.connect(dialling)
            self._watch(dialling)
        fd = int(dialling.getsockopt(zmq.FD))
        soon = partial(asyncio.get_running_loop().call_soon, self._drain, fd)
        self._dialler = Dialler(dialling, "EndForward", soon)
        self.dial(self._endpoints)
        return endpoint

    def _subscriber(self) -> zmq.Socket[bytes]:
        assert self._context is not None
        sock = self._context.socket(zmq.SUB)
        for option, value in _OF_SUBSCRIBERS.items():
            sock.setsockopt(option, value)
        sock.setsockopt(zmq.SUBSCRIBE, TOPIC)
        return sock

    def _watch(self, sock: zmq.Socket[bytes]) -> None:
        fd = int(sock.getsockopt(zmq.FD))
        self._sockets[fd] = sock
        asyncio.get_running_loop().add_reader(fd, self._drain, fd)
        self._drain(fd)

    def _end_peers(self) -> None:
        if self.peers is not None:
            self.peers.close()
            self.peers = None

    def close(self) -> None:
        self._end_peers()
        if self._dialler is not None:
            self._dialler.close()
            self._dialler = None
        for fd, sock in self._sockets.items():
            asyncio.get_running_loop().remove_reader(fd)
            sock.close(0)
        self._sockets.clear()
        self._end_context()

    def _end_context(self) -> None:
        if self._gatekeeper is not None:
            self._gatekeeper.close()
            self._gatekeeper = None
        if self._context is not None:
            self._context.term()
            self._context = None

    def dial(self, endpoints: Collection[str]) -> None:
        """Connect to the publishers at these endpoints, and to no others, now or when the socket is
        opened."""
        self._endpoints = endpoints
        if self._dialler is not None:
            self._dialler.dial(endpoints)

    @property
    def has_key(self) -> bool:
        """Whether only engines with the same secret are accepted."""
        return self._gatekeeper is not None

    def asks_peer(self) -> bool:
        """Whether to look up each message's sender, which costs time."""
        return False

    # Messages ---------------------------------------------------------------------------------

    def receive(self, frames: list[bytes], peer: str = "") -> None:
        """Handle one message; ``peer`` is the sender's IP address, if known."""
        if (report := self._parse(frames)) is not None:
            self._handle_message(report, peer)

    def _parse(self, frames: list[bytes]) -> EndForward | None:
        try:
            return decode_endforward(frames)
        except ImplausibleMessage as error:
            self._refused("implausible", error)
        except (ValueError, RecursionError) as error:
            self._refused("malformed", error)
        return None

    def _refused(self, fate: str, why: Exception) -> None:
        self.counts[fate] += 1
        if self.counts[fate] == 1:
            text = "%s EndForward message (counted from now on): %r"
            logger.warning(text, fate, str(why)[:_MAX_WHY_CHARS])

    def _drain(self, fd: int) -> None:
        sock = self._sockets.get(fd)
        if sock is None:
            return
        started_s = time.monotonic()
        # Otherwise input stays where it is bounded: in the socket, then at its sender.
        drained = len(self._unread) < _DRAIN_LIMIT and self._take_in(sock)
        received_s = time.monotonic()
        until_s = received_s + max(_TURN_S, received_s - started_s)
        while self._unread and time.monotonic() < until_s:
            slot = self._unread.popleft()
            key = (slot.report.boot_id, slot.report.dp_rank)
            if self._newest.get(key) is slot:
                del self._newest[key]
            self._handle_message(slot.report, slot.peer)
        self.busy_s += time.monotonic() - started_s
        if (self._unread or not drained) and fd not in self._going_on:
            self._going_on.add(fd)  # the descriptor may trigger as well
            asyncio.get_running_loop().call_soon(self._go_on, fd)

    def _go_on(self, fd: int) -> None:
        self._going_on.discard(fd)
        self._drain(fd)

    def _take_in(self, sock: zmq.Socket[bytes]) -> bool:
        """Receive pending messages up to the limit; return whether that was all."""
        limit = self.peers if self.peers is not None and self.peers.watches(sock) else None
        for _ in range(_DRAIN_LIMIT):
            asks_peer, asks_proof = self.asks_peer(), limit is not None and limit.asks
            frames, first = _receive(sock, asks_sender=asks_peer or asks_proof)
            if not frames:
                return True
            if (report := self._parse(frames)) is not None:
                if first is not None and limit is not None and asks_proof:
                    limit.proved(first)
                self._queue(report, peer_of(first) if first is not None and asks_peer else "")
        return False

    def _queue(self, report: EndForward, peer: str) -> None:
        key = (report.boot_id, report.dp_rank)
        slot = self._newest.get(key)
        rids = slot.report.rids if slot is not None else []
        accepted = slot.report.accepted if slot is not None else []
        fits = max(len(rids) + len(report.rids), len(accepted) + len(report.accepted)) <= MAX_RIDS
        if slot is not None and slot.report.seq < report.seq and fits:
            if rids or accepted:
                report = msgspec.structs.replace(
                    report,
                    rids=[*rids, *report.rids],
                    accepted=[*accepted, *report.accepted],
                )
            self.counts["superseded"] += 1
            slot.report, slot.peer = report, peer
        else:
            slot = _Slot(report, peer)
            self._unread.append(slot)
        if _is_state(report):
            self._newest[key] = slot
        else:
            self._newest.pop(key, None)


def _receive(sock: zmq.Socket[bytes], *, asks_sender: bool) -> tuple[list[bytes], zmq.Frame | None]:
    """Return the frames of one message (``FRAMES`` of them if its topic is right); empty if none is
    pending. With ``asks_sender`` also return the first frame with libzmq's data about the sender.

    Checking after each frame whether another follows (``recv_multipart``) would cost more than
    everything else. A message of another length spoils at most the next one, and the rank's next
    report corrects that."""
    frames: list[bytes] = []
    first: zmq.Frame | None = None
    try:
        if asks_sender:
            first = sock.recv(zmq.NOBLOCK, copy=False)
            frames.append(first.bytes)
        else:
            frames.append(sock.recv(zmq.NOBLOCK))
        if frames[0] == TOPIC:
            while len(frames) < FRAMES:
                frames.append(sock.recv(zmq.NOBLOCK))
        else:
            while sock.getsockopt(zmq.RCVMORE):
                frames.append(sock.recv(zmq.NOBLOCK))
    except zmq.Again:
        pass
    return frames, first


def peer_of(frame: zmq.Frame) -> str:
    """Return the sender's IP address; empty for a Unix socket."""
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""


def _is_state(report: EndForward) -> bool:
    """Return whether a report describes a rank's state and no prefill pass."""
    return report.role == "decode" or report.kind == "heartbeat"
