"""Receives EndForward: the SUB socket, decoding, and whose message it is.

A message is bound to a worker by configured instance id, by a boot id already bound, or by the
request ids that it echoes. Whatever arrives from the network is counted, never raised. The socket
has no authentication, so nothing a message says is believed beyond what an engine could mean, and
none takes a worker down by itself.

A thousand ranks send tens of thousands of messages per second. What has come is received first, and
worked on for ``_TURN_S`` at a time, so that a storm does not keep the rest of the process waiting.
While it lasts, a message that says how a rank is replaces the one before it that was not looked at
yet: everything in it is absolute, and the request ids it echoes are put together. Launches and ends
of prefill passes are all looked at.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import resource
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import zmq

from sglang_sbs.router.engines.urls import bracketed, is_loopback, split_worker_url
from sglang_sbs.router.signals.dialler import Dialler
from sglang_sbs.router.signals.inbox import endpoint_of
from sglang_sbs.router.signals.peer_limit import PeerLimit
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import WorkerInfo
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.scheduling.events import Event, ForwardEnded
from sglang_sbs.wire import TOPIC, EndForward, decode_endforward
from sglang_sbs.wire.curve import CurveKeys, Gatekeeper
from sglang_sbs.wire.endforward import FRAMES, MAX_RIDS, ImplausibleMessage

logger = logging.getLogger(__name__)

_DRAIN_LIMIT = 4096
"""Messages received before other callbacks of the event loop get a turn."""
_TURN_S = 0.01
"""And time spent on them."""
_MAX_MESSAGE_BYTES = 1 << 20
_OF_SUBSCRIBERS = {
    zmq.LINGER: 0,
    zmq.IPV6: 1,
    zmq.MAXMSGSIZE: _MAX_MESSAGE_BYTES,
    # Unread messages per sender, and what the kernel holds besides: seconds of a rank's reports.
    # More would be of the past, and with a thousand ranks it would be gigabytes.
    zmq.RCVHWM: 128,
    zmq.RCVBUF: 64 << 10,
    # Between two tries to reach an engine that binds, growing, and for each of them: what is sent
    # to a host that is away is not refused, and the kernel alone would try ever more rarely.
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 2_000,
    zmq.CONNECT_TIMEOUT: 5_000,
    # A host that vanished closes no connection, and one that came back with the same address would
    # not be heard.
    zmq.HEARTBEAT_IVL: 5_000,
    zmq.HEARTBEAT_TIMEOUT: 15_000,
}
_MAX_BOOTS = 10_000
_LOG_BOUND_S = 10.0
_LEAST_PEERS, _MOST_PEERS = 64, 16_384
"""Connections to the port: a third of the process's descriptors, within these bounds."""
_MAX_STRANGERS = 64
"""Unknown senders named in the log; more are only counted."""
_MAX_WHY_CHARS = 300
"""Of what is wrong with a message: it may be the sender's own words."""
_BIND = re.compile(r"tcp://[^/\s]+:([0-9]{1,5})")

FindOwner = Callable[[str, str], str | None]
"""``(rid, role) -> worker URL``: where the router sent that leg, if it knows the request."""


@dataclass(slots=True, eq=False)
class _Slot:
    report: EndForward
    peer: str


class EndForwardListener:
    def __init__(
        self,
        registry: Registry,
        submit: Callable[[Event], None],
        find_owner: FindOwner,
        on_report: Callable[[Worker, EndForward], None] | None = None,
    ) -> None:
        self._registry = registry
        self._submit = submit
        self._find_owner = find_owner
        self._on_report = on_report
        self._boots: OrderedDict[str, str] = OrderedDict()
        """Worker URL by boot id, the one heard last at the end."""
        self._bound_s: dict[str, float] = {}
        """When the log last said who a boot is, by worker URL."""
        self._unbound_warned: set[str] = set()
        self._binding: dict[str, list[str]] = {}
        """Where engines bind, by worker URL: what is connected to while the socket is open."""
        self.counts: Counter[str] = Counter()
        """Messages by fate: ``bound``, ``unbound``, ``malformed``, ``implausible``, ``dropped``,
        ``superseded`` (before anybody looked at it)."""
        self.busy_s = 0.0
        """Time spent on them, what they caused included."""
        self._unread: deque[_Slot] = deque()
        self._newest: dict[tuple[str, int], _Slot] = {}
        """The last unread message of each rank that a later one may replace."""
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._going_on: set[int] = set()
        """By file descriptor."""
        self._dialler: Dialler | None = None
        """Connects to engines that bind. With keys it is a socket of its own: one socket cannot be
        CURVE's server and its client."""
        self._gatekeeper: Gatekeeper | None = None
        self.peers: PeerLimit | None = None
        """Of the port that engines connect to."""

    def open(self, bind: str | None, keys: CurveKeys | None = None) -> str | None:
        """Start receiving; returns the endpoint bound (a wildcard port resolved). With ``keys``
        only engines with the same secret are heard. Raises: OSError, it cannot be bound."""
        self._context = zmq.Context(io_threads=1)
        listening = self._subscriber()
        endpoint = None
        if bind is not None and not bind.startswith("ipc:"):
            most = max(_LEAST_PEERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3)
            self.peers = PeerLimit(listening, min(most, _MOST_PEERS))
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
                text = f"--sbs-endforward-bind {bind}: {error.strerror}"
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
        self._dial()
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

    def described(self, worker: Worker, info: WorkerInfo) -> None:
        """``/server_info`` was read: connect to a publisher that binds, and to no earlier one."""
        if self._registry.get(worker.url) is not worker:
            return  # removed while it was asked
        if info.nodes > 1 and self._registry.kv_events_of(worker) is not None:
            self._registry.asks_peers = True
        bind = info.sbs.bind if info.sbs is not None else ""
        if info.boot_id:
            self._boots[info.boot_id] = worker.url
        endpoints = publisher_endpoints(worker.url, bind, info.dp_size)
        problem = ""
        if bind and not endpoints:
            problem = (
                f"it binds {bind[:100]!r}, where no router can connect: set "
                f"SGLANG_SBS_BIND=tcp://*:PORT there, with {info.dp_size} ports from PORT on"
            )
        self._registry.report_problem(worker, "bind", problem)
        if endpoints != self._binding.get(worker.url, []):
            self._binding[worker.url] = endpoints
            self._dial()

    def removed(self, worker_url: str) -> None:
        for boot_id in [boot_id for boot_id, url in self._boots.items() if url == worker_url]:
            del self._boots[boot_id]
        if self._binding.pop(worker_url, None):
            self._dial()

    def _dial(self) -> None:
        """Connect to all that bind, and to no others."""
        if self._dialler is not None:
            self._dialler.dial(set().union(*self._binding.values()))

    # Messages ---------------------------------------------------------------------------------

    def receive(self, frames: list[bytes], peer: str = "") -> None:
        """Handle one message. ``peer``: the IP address it came from, if that is known."""
        if (report := self._parse(frames)) is not None:
            self._handle(report, peer)

    def _parse(self, frames: list[bytes]) -> EndForward | None:
        try:
            return decode_endforward(frames)
        except ImplausibleMessage as error:
            self._refused("implausible", error)
        except (ValueError, RecursionError) as error:
            self._refused("malformed", error)
        return None

    def _handle(self, report: EndForward, peer: str) -> None:
        worker = self._bind(report)
        if worker is None:
            self.counts["unbound"] += 1
            return
        if not self._registry.reported(worker, report):
            self.counts["dropped"] += 1
            return
        self.counts["bound"] += 1
        has_key = self._gatekeeper is not None
        if has_key and peer:
            address = peer.removeprefix("::ffff:")
            if not is_loopback(address) or is_loopback(split_worker_url(worker.url)[1]):
                # Else it means another machine to front ends elsewhere than here.
                worker.speaks_from[report.dp_rank] = address
        if report.kv_address is not None:
            self._registry.kv_address_told(worker, report, peer, has_key=has_key)
        if worker.announced:
            self._submit(ForwardEnded(instance=worker.url, report=report))
        if self._on_report is not None:
            self._on_report(worker, report)

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
        # Otherwise what comes stays where it is bounded: in the socket, then at its sender.
        drained = len(self._unread) < _DRAIN_LIMIT and self._take_in(sock)
        received_s = time.monotonic()
        until_s = received_s + max(_TURN_S, received_s - started_s)
        while self._unread and time.monotonic() < until_s:
            slot = self._unread.popleft()
            key = (slot.report.boot_id, slot.report.dp_rank)
            if self._newest.get(key) is slot:
                del self._newest[key]
            self._handle(slot.report, slot.peer)
        self.busy_s += time.monotonic() - started_s
        if (self._unread or not drained) and fd not in self._going_on:
            self._going_on.add(fd)  # the descriptor calls too while anything is left
            asyncio.get_running_loop().call_soon(self._go_on, fd)

    def _go_on(self, fd: int) -> None:
        self._going_on.discard(fd)
        self._drain(fd)

    def _take_in(self, sock: zmq.Socket[bytes]) -> bool:
        """Receive what is there, up to the limit; whether that was all."""
        for _ in range(_DRAIN_LIMIT):
            frames, peer = _receive(sock, asks_peer=self._registry.asks_peers)
            if not frames:
                return True
            if (report := self._parse(frames)) is not None:
                self._queue(report, peer)
        return False

    def _queue(self, report: EndForward, peer: str) -> None:
        key = (report.boot_id, report.dp_rank)
        slot = self._newest.get(key)
        rids = slot.report.rids if slot is not None else []
        fits = len(rids) + len(report.rids) <= MAX_RIDS
        if slot is not None and slot.report.seq < report.seq and fits:
            if rids:
                report = msgspec.structs.replace(report, rids=[*rids, *report.rids])
            self.counts["superseded"] += 1
            slot.report, slot.peer = report, peer
        else:
            slot = _Slot(report, peer)
            self._unread.append(slot)
        if _is_state(report):
            self._newest[key] = slot
        else:
            self._newest.pop(key, None)

    def _bind(self, report: EndForward) -> Worker | None:
        url = self._boots.get(report.boot_id)
        if url is not None and (worker := self._registry.get(url)) is not None:
            self._boots.move_to_end(report.boot_id)
            return worker
        worker, warned = self._identify(report), self._unbound_warned
        if worker is not None:
            if len(self._boots) >= _MAX_BOOTS:
                self._boots.popitem(last=False)
            self._boots[report.boot_id] = worker.url
            # Anybody can invent boot ids where there is no key.
            now_s = time.monotonic()
            if now_s - self._bound_s.get(worker.url, -math.inf) >= _LOG_BOUND_S:
                self._bound_s[worker.url] = now_s
                how = "by instance id" if report.instance_id else "by echoed request ids"
                boot = report.boot_id[:8]
                logger.info("EndForward of boot %s is worker %s (%s)", boot, worker.url, how)
        elif report.instance_id and len(warned) < _MAX_STRANGERS and report.boot_id not in warned:
            warned.add(report.boot_id)
            logger.warning(
                "EndForward from instance %r, which is no worker of this router; waiting for "
                "request ids it echoes. Set SGLANG_SBS_INSTANCE_ID to the worker URL given here",
                report.instance_id,
            )
        return worker

    def _identify(self, report: EndForward) -> Worker | None:
        if report.instance_id and (worker := self._registry.by_alias(report.instance_id)):
            return worker
        owners = (self._find_owner(rid, report.role) for rid in report.rids)
        url = next((url for url in owners if url is not None), "")
        return self._registry.get(url)


def _receive(sock: zmq.Socket[bytes], *, asks_peer: bool) -> tuple[list[bytes], str]:
    """The frames of one message, as many as it should have, and who sent it if asked; none if there
    is none.

    Asking after each frame whether another follows (``recv_multipart``) costs more than all the
    rest. A message of another length costs the one behind it at most; the rank's next makes good.
    """
    frames: list[bytes] = []
    peer = ""
    try:
        if asks_peer:
            first = sock.recv(zmq.NOBLOCK, copy=False)
            frames.append(first.bytes)
            peer = peer_of(first)
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
    return frames, peer


def peer_of(frame: zmq.Frame) -> str:
    """The IP address it came from; empty for a Unix socket."""
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""


def _is_state(report: EndForward) -> bool:
    """Whether it says how a rank is, and nothing about a prefill pass."""
    return report.role == "decode" or report.kind == "heartbeat"


def publisher_endpoints(worker_url: str, bind: str, dp_size: int) -> list[str]:
    """Where to connect for an engine that binds ``tcp://HOST:PORT`` (rank d at ``PORT + d``):
    always at the worker's own host, as an answer must not make the router connect to others. Not of
    that form, or not a port for every rank: none."""
    match = _BIND.fullmatch(bind)
    first = int(match[1]) if match is not None else 0
    if not 1 <= first <= 65536 - dp_size:
        return []
    host = bracketed(split_worker_url(worker_url)[1])
    return [f"tcp://{host}:{port}" for port in range(first, first + dp_size)]
