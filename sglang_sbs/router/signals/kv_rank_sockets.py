"""The sockets to one DP rank that publishes KV events: connections, reading, replays. Whatever
arrives is bounded, counted and read in turns; its :class:`.RankFeed` knows the order of events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import parse_monitor_message

from sglang_sbs.router.signals.kv_messages import (
    MAX_MESSAGE_BYTES,
    KvBatch,
    decode_in_parts,
    live_frames,
    replay_frames,
    replay_request,
)
from sglang_sbs.router.signals.kv_rank_feed import RankFeed
from sglang_sbs.router.workers.kv_addresses import KvEndpoints
from sglang_sbs.scheduling.events import BlocksCleared, BlocksRemoved, BlocksStored, InstanceId
from sglang_sbs.wire import MalformedMessage

if TYPE_CHECKING:
    from sglang_sbs.router.signals.kv_subscriber import KvEventSubscriber

logger = logging.getLogger(__name__)

TURN_S = 0.002
"""Time for messages of one socket, or for what they say, before other callbacks of the event loop
get a turn."""
_SUBSCRIBED_S = 0.2
"""From a connection to the first replay: by then the publisher knows of the subscription."""
_REPLAY_SILENCE_S = 3.0
"""Between two messages of a replay, and before the first."""
_LIVE_HWM = 2_000
_REPLAY_HWM = 1_000
_OF_SOCKETS = {
    zmq.LINGER: 0,
    zmq.IPV6: 1,
    zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 2_000,
    # A host that vanished closes no connection.
    zmq.HEARTBEAT_IVL: 5_000,
    zmq.HEARTBEAT_TIMEOUT: 15_000,
}
_CONNECTION_EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED

BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, hwm: int) -> zmq.Socket[bytes]:
    sock = context.socket(kind)
    for option, value in _OF_SOCKETS.items():
        sock.setsockopt(option, value)
    sock.setsockopt(zmq.RCVHWM, hwm)
    return sock


class RankSockets:
    """The connection to one rank's publisher, and one to its replay endpoint while needed."""

    def __init__(
        self,
        owner: KvEventSubscriber,
        instance: InstanceId,
        endpoints: KvEndpoints,
        topic: str,
        dp_rank: int,
    ) -> None:
        self.endpoints = endpoints
        self.connected = False
        self._owner = owner
        self._topic = topic.encode()
        self._loop = asyncio.get_running_loop()
        self._delay: asyncio.TimerHandle | None = None
        self._going_on: set[zmq.Socket[bytes]] = set()
        self._reading: Generator[None, None, KvBatch] | None = None
        """The message being decoded; no other is taken meanwhile."""
        self._replay_seq = 0
        self._replay_heard_s = 0.0
        self.feed = RankFeed(
            instance,
            dp_rank,
            owner.submit,
            self._ask if endpoints.replay else None,
            owner.counts_of(instance, dp_rank),
        )
        self._foreign_before = self.feed.counts["foreign"]
        self._replay: zmq.Socket[bytes] | None = None
        self._live = _socket(owner.context, zmq.SUB, _LIVE_HWM)
        self._live.setsockopt(zmq.SUBSCRIBE, self._topic)
        self._monitor: zmq.Socket[bytes] = self._live.get_monitor_socket(_CONNECTION_EVENTS)
        self._watch(self._monitor, self._drain_monitor)
        self._watch(self._live, partial(self._drain, self._live))
        self._live.connect(endpoints.live)

    @property
    def foreign(self) -> bool:
        """Another rank publishes there."""
        return self.feed.counts["foreign"] > self._foreign_before

    def close(self) -> None:
        if self._live.closed:
            return
        self._gone()
        # First: with nobody at the monitor's end libzmq would block over its next event.
        self._live.disable_monitor()
        self._end(self._monitor)
        self._end(self._live)

    def tick(self, now_s: float) -> None:
        if self._replay is not None and now_s - self._replay_heard_s >= _REPLAY_SILENCE_S:
            self.feed.replay_failed()
            self._after_replay()

    def _watch(self, sock: zmq.Socket[bytes], drain: Callable[[], None]) -> None:
        self._loop.add_reader(sock.fileno(), drain)
        # ZMQ's descriptor is edge-triggered, and using the socket may use up the edge.
        self._loop.call_soon(drain)

    def _end(self, sock: zmq.Socket[bytes]) -> None:
        self._loop.remove_reader(sock.fileno())
        sock.close(0)

    # Publisher --------------------------------------------------------------------------------

    def _drain_monitor(self) -> None:
        while not self._monitor.closed:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event = parse_monitor_message(frames)["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._gone()
                self.connected = True
                self._delay = self._loop.call_later(_SUBSCRIBED_S, self._subscribed)
            elif event == zmq.Event.DISCONNECTED:
                self._gone()

    def _gone(self) -> None:
        if self._delay is not None:
            self._delay.cancel()
            self._delay = None
        self.connected = False
        self._reading = None
        self.feed.disconnected()
        self._after_replay()

    def _subscribed(self) -> None:
        self._delay = None
        self.learn()

    def learn(self) -> None:
        """Begin anew, with what was before."""
        self._reading = None
        self.feed.connected()

    def _drain(self, sock: zmq.Socket[bytes]) -> None:
        """Take what came on one of the two sockets, for a turn."""
        until_s = time.monotonic() + TURN_S
        while not sock.closed:
            if self._owner.behind or self._reading is not None:
                self._soon(sock)
                return
            if sock is self._live and self.feed.replaying:
                # It holds what follows the replay. Asked for it, its descriptor calls no more.
                sock.getsockopt(zmq.EVENTS)
                return
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            is_live = sock is self._live
            if is_live:  # its publisher may be another one than that of the message before
                self._drain_monitor()
            else:
                self._replay_heard_s = time.monotonic()
            try:
                read = live_frames(frames, self._topic) if is_live else replay_frames(frames)
            except MalformedMessage as error:
                self._malformed(error)
                continue
            if not is_live or (self.connected and self._delay is None):
                self._reading = decode_in_parts(read[1])
                self._read_on(self._reading, sock, read[0])
            if time.monotonic() >= until_s:
                self._soon(sock)
                return

    def _read_on(
        self, parts: Generator[None, None, KvBatch], sock: zmq.Socket[bytes], seq: int
    ) -> None:
        if parts is not self._reading:
            return
        began_s = time.monotonic()
        batch: KvBatch | None = None
        try:
            while True:
                next(parts)
                took_s = time.monotonic() - began_s
                if took_s >= TURN_S:
                    break
            # A part can be a whole message that is one event: as long, others are on their own.
            self._loop.call_later(took_s, self._read_on, parts, sock, seq)
            return
        except StopIteration as over:
            batch = over.value
        except MalformedMessage:
            pass
        self._reading = None
        if sock is self._live:
            self.feed.live(seq, batch)
        elif sock is self._replay:
            self.feed.replayed(seq, batch)
            self._after_replay()

    def _soon(self, sock: zmq.Socket[bytes]) -> None:
        """Go on in the next turn of the loop; once, however often it is asked for: the socket's
        descriptor calls too while anything is left."""
        if sock not in self._going_on:
            self._going_on.add(sock)
            self._loop.call_soon(self._go_on, sock)

    def _go_on(self, sock: zmq.Socket[bytes]) -> None:
        self._going_on.discard(sock)
        self._drain(sock)

    def _malformed(self, error: MalformedMessage) -> None:
        self.feed.counts["malformed"] += 1
        if self.feed.counts["malformed"] == 1:
            text = "malformed KV events at %s (counted from now on): %s"
            logger.warning(text, self.endpoints.live, error)

    # Replay -----------------------------------------------------------------------------------

    def _ask(self, seq: int) -> None:
        self._replay_seq = seq
        if self._owner.may_replay(self):
            self.request_replay()

    def request_replay(self) -> None:
        """Send the request; on a socket of its own, as answers do not say what they answer."""
        self._close_replay()
        self._replay = sock = _socket(self._owner.context, zmq.DEALER, _REPLAY_HWM)
        self._replay_heard_s = time.monotonic()
        sock.connect(self.endpoints.replay)
        sock.send_multipart(replay_request(self._replay_seq))
        self._watch(sock, partial(self._drain, sock))

    def _close_replay(self) -> None:
        sock, self._replay = self._replay, None
        if sock is not None:
            self._end(sock)

    def _after_replay(self) -> None:
        if not self.feed.replaying:
            self._close_replay()
            self._owner.replay_over(self)
            self._soon(self._live)
