"""Subscribes to the KV events of engines: sockets, connections, replays.

Owns one subscription per DP rank of every instance the scheduler was told of that publishes KV
events, and says which of them cannot be heard. Must not know what the events are good for, nor
their order: that is :mod:`.kv_rank_feed`. SGLang publishes without authentication: only the host
that the worker's own URL names is connected to, and for ranks on other nodes what
:mod:`.kv_addresses` believes. Whatever arrives is bounded and counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import zmq
from prometheus_client.core import Metric
from zmq.utils.monitor import parse_monitor_message

from sglang_sbs.router.engines.urls import split_worker_url
from sglang_sbs.router.metric_families import gauge, total
from sglang_sbs.router.signals.kv_messages import (
    MAX_MESSAGE_BYTES,
    KvBatch,
    decode_in_parts,
    live_frames,
    replay_frames,
    replay_request,
)
from sglang_sbs.router.signals.kv_rank_feed import Message, RankFeed
from sglang_sbs.router.workers.kv_addresses import KvEndpoints, default_endpoints
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import KvEventsBlock, node_of_rank
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.scheduling.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    InstanceId,
)
from sglang_sbs.wire import MalformedMessage

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""An instance is taken to publish nothing after some rank could not be connected to for so long."""
KEEP_S = 60.0
"""An instance that is not used is listened to for so long."""
_TICK_S = 0.5
_SUBSCRIBED_S = 0.2
"""From a connection to the first replay: by then the publisher knows of the subscription."""
_REPLAY_SILENCE_S = 3.0
"""Between two messages of a replay, and before the first."""
_MAX_REPLAYS = 8
"""At once, of all ranks: one can be hundreds of megabytes."""
_TURN_S = 0.002
"""Time for messages of one socket, or for what they say, before other callbacks of the event loop
get a turn."""
_AT_ONCE_BYTES = 64 << 10
"""A larger message is decoded in parts."""
_MOST_UNTOLD = 64
"""Events for the scheduler that wait for their turn."""
_LIVE_HWM = 2_000
_REPLAY_HWM = 1_000
_MAX_SOCKETS = 32_768
_CONNECTION_EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED

BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared


class KvEventSubscriber:
    """Must be used from one event loop only. Follows instances from ``up`` to ``down``."""

    def __init__(self, registry: Registry, submit: Callable[[Event], None]) -> None:
        self._registry = registry
        self._submit = submit
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._instances: dict[InstanceId, _Subscription] = {}
        self._counts: dict[tuple[InstanceId, int], Counter[str]] = {}
        self._named_elsewhere: set[InstanceId] = set()
        self._replaying: set[_RankSockets] = set()
        self._waiting: deque[_RankSockets] = deque()
        self._untold: deque[BlockEvent] = deque()
        self._telling = False
        self._ticker = asyncio.create_task(self._tick())

    # Instances --------------------------------------------------------------------------------

    def up(self, worker: Worker) -> None:
        """The scheduler was told of the instance, or of a change."""
        info = worker.info
        known = self._instances.get(worker.url)
        if info is None or info.kv_events is None or not self._registry.listens_to_events(worker):
            self._forget(worker.url)
            return
        if known is not None:
            if (known.source, len(known.ranks)) == (info.kv_events, info.dp_size):
                known.resume()
                return
            self._forget(worker.url)
        self._say_if_elsewhere(worker, info.kv_events)
        self._instances[worker.url] = _Subscription(self, worker, info.kv_events, info.dp_size)

    def down(self, worker: Worker) -> None:
        """It is not used for now. Often not for long, and a replay is costly: listen on a while."""
        subscription = self._instances.get(worker.url)
        if subscription is None:
            return
        if worker.info is None:  # restarted, though the connections may not know yet
            self._forget(worker.url)
        else:
            subscription.down_s = time.monotonic()

    def _forget(self, instance: InstanceId) -> None:
        subscription = self._instances.pop(instance, None)
        if subscription is not None:
            subscription.close()

    def removed(self, instance: InstanceId) -> None:
        """It will not come back: its counts go too."""
        self._forget(instance)
        self._named_elsewhere.discard(instance)
        for key in [key for key in self._counts if key[0] == instance]:
            del self._counts[key]

    async def close(self) -> None:
        self._ticker.cancel()
        self._untold.clear()
        for instance in list(self._instances):
            self._forget(instance)
        await asyncio.gather(self._ticker, return_exceptions=True)
        self._context.term()

    def _say_if_elsewhere(self, worker: Worker, source: KvEventsBlock) -> None:
        host = split_worker_url(worker.url)[1]
        if source.host in ("", "*", "0.0.0.0", "::", host) or worker.url in self._named_elsewhere:
            return
        self._named_elsewhere.add(worker.url)
        logger.warning(
            "worker %s says that it publishes KV events at host %r, which is not followed: its "
            "own host is connected to",
            worker.url,
            source.host[:256],
        )

    # For its parts ----------------------------------------------------------------------------

    def counts_of(self, instance: InstanceId, rank: int) -> Counter[str]:
        """They outlive the connections."""
        return self._counts.setdefault((instance, rank), Counter())

    def submit(self, instance: InstanceId, event: BlockEvent) -> None:
        """While some rank cannot be heard the scheduler is told nothing of any."""
        worker = self._registry.get(instance)
        if worker is not None and worker.kv_events_missing:
            return
        if isinstance(event, BlocksCleared):  # what waits of that rank is worth nothing
            rank = (event.instance, event.dp_rank)
            self._untold = deque(e for e in self._untold if (e.instance, e.dp_rank) != rank)
            self._submit(event)
            return
        self._untold.append(event)
        self._tell_soon()

    def _tell_soon(self) -> None:
        if self._untold and not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        """As many as there is time for, the others in the next turns of the event loop."""
        self._telling = False
        until_s = time.monotonic() + _TURN_S
        try:
            while self._untold:
                self._submit(self._untold.popleft())
                if time.monotonic() >= until_s:
                    break
        finally:
            self._tell_soon()

    @property
    def behind(self) -> bool:
        """The scheduler has much to be told of what came: no more is to be read."""
        return len(self._untold) >= _MOST_UNTOLD

    def socket(self, kind: int, hwm: int) -> zmq.Socket[bytes]:
        """Not connected yet."""
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.IPV6, 1)
        sock.setsockopt(zmq.RCVHWM, hwm)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        sock.setsockopt(zmq.RECONNECT_IVL, 100)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        # A host that vanished closes no connection.
        sock.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
        return sock

    def may_replay(self, rank: _RankSockets) -> bool:
        """Whether it may send its request now; else it is called back."""
        if rank in self._replaying:
            return True
        if len(self._replaying) < _MAX_REPLAYS:
            self._replaying.add(rank)
            return True
        if rank not in self._waiting:
            self._waiting.append(rank)
        return False

    def replay_over(self, rank: _RankSockets) -> None:
        """Let the next one begin."""
        self._replaying.discard(rank)
        with suppress(ValueError):
            self._waiting.remove(rank)
        while self._waiting and len(self._replaying) < _MAX_REPLAYS:
            following = self._waiting.popleft()
            self._replaying.add(following)
            following.request_replay()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            for instance, subscription in list(self._instances.items()):
                try:
                    subscription.follow()
                    for rank in subscription.ranks:
                        rank.tick(now_s)
                    if subscription.down_s is None:
                        subscription.tick(now_s)
                    elif now_s - subscription.down_s >= KEEP_S:
                        self._forget(instance)
                except Exception:  # a defect must not leave the others unwatched
                    logger.exception("watching KV events of a worker failed")

    def missing(self, worker: Worker, why: str) -> None:
        """Some ranks cannot be heard (empty: all can)."""
        self._registry.set_kv_events_missing(worker, why)

    # Metrics ----------------------------------------------------------------------------------

    def families(self) -> Iterator[Metric]:
        """What arrived, for a scrape."""
        labels = ("worker", "dp_rank")
        families = {
            "events": total("sbs_prefix_events", "Batches of KV events taken", *labels),
            "gaps": total("sbs_prefix_event_gaps", "Missing batches noticed", *labels),
            "replays": total("sbs_prefix_replays", "Replays asked for", *labels),
            "lost": total("sbs_prefix_losses", "A rank's blocks forgotten for a loss", *labels),
            "malformed": total("sbs_prefix_events_malformed", "Messages that are none", *labels),
            "foreign": total("sbs_prefix_events_foreign", "Batches of another rank", *labels),
        }
        blocks = total("sbs_prefix_blocks", "Blocks by what became of them", *labels, "change")
        for (instance, rank), counts in self._counts.items():
            for kind, family in families.items():
                family.add_metric([instance, str(rank)], counts[kind])
            for change in ("stored", "removed"):
                blocks.add_metric([instance, str(rank), change], counts[change])
        source = gauge(
            "sbs_prefix_source", "1 for how an instance's cache is known", "worker", "source"
        )
        for worker in self._registry:
            source.add_metric([worker.url, self._registry.prefix_source_of(worker)], 1)
        yield from families.values()
        yield from (blocks, source)


class _Subscription:
    """All ranks of one instance."""

    def __init__(
        self, owner: KvEventSubscriber, worker: Worker, source: KvEventsBlock, dp_size: int
    ) -> None:
        self.source = source
        self.down_s: float | None = None
        """Since when it is not used."""
        self._owner = owner
        self._worker = worker
        self._heard_s = time.monotonic()
        self.ranks = [self._open(dp_rank) for dp_rank in range(dp_size)]

    def _open(self, dp_rank: int) -> _RankSockets:
        worker = self._worker
        endpoints = worker.kv_endpoints.get(dp_rank)
        if endpoints is None:
            endpoints = default_endpoints(worker.url, self.source, dp_rank)
        return _RankSockets(self._owner, worker.url, endpoints, self.source.topic, dp_rank)

    def follow(self) -> None:
        """Connect to ranks on other nodes where they say they are. A connection that was made so is
        kept while it stands: nodes do not move, and who speaks in a rank's name may be another."""
        told = self._worker.kv_endpoints
        if not told:
            return
        for dp_rank, rank in enumerate(self.ranks):
            endpoints = told.get(dp_rank, rank.endpoints)
            default = default_endpoints(self._worker.url, self.source, dp_rank)
            if endpoints != rank.endpoints and (rank.endpoints == default or not rank.connected):
                rank.close()
                self.ranks[dp_rank] = self._open(dp_rank)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def resume(self) -> None:
        """It is used (again)."""
        if self.down_s is not None:
            self.down_s = None
            self._heard_s = time.monotonic()

    def tick(self, now_s: float) -> None:
        """Notice ranks that cannot be heard."""
        silent = [rank for rank in self.ranks if not rank.connected]
        foreign = [rank for rank in self.ranks if rank.foreign]
        if not silent and not foreign:
            self._heard_s = now_s
            if self._worker.kv_events_missing:
                self._owner.missing(self._worker, "")
                for rank in self.ranks:
                    rank.feed.connected()
        elif foreign:
            self._owner.missing(
                self._worker,
                f"at {foreign[0].endpoint} another DP rank than {foreign[0].feed.dp_rank} "
                "publishes KV events: do the ports of two engines overlap?",
            )
        elif now_s - self._heard_s >= PATIENCE_S:
            shown = ", ".join(f"rank {r.feed.dp_rank} at {r.endpoint}" for r in silent[:4])
            more = " …" if len(silent) > 4 else ""
            self._owner.missing(
                self._worker,
                f"KV events cannot be had from {shown}{more}: {self._why(silent[0].feed.dp_rank)}",
            )

    def _why(self, dp_rank: int) -> str:
        """What to do about a rank that cannot be heard."""
        worker = self._worker
        node = node_of_rank(worker.info, dp_rank) if worker.info is not None else 0
        refused = worker.kv_refused.get(dp_rank)
        if refused is not None:
            return f"of rank {dp_rank} on node {node}, {refused}"
        if node > 0 and dp_rank not in worker.kv_endpoints:
            return (
                f"rank {dp_rank} is on node {node}, and no EndForward says where that is: it needs "
                "the plugin and SGLANG_SBS_ROUTERS as the first node has them"
            )
        return (
            "can those ports be reached from here, and does the endpoint in --kv-events-config "
            "have a wildcard host?"
        )


class _RankSockets:
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
        self._going_on: set[Callable[..., None]] = set()
        self._reading: Generator[None, None, KvBatch] | None = None
        """A large message being decoded; no other is taken meanwhile."""
        self._replay_seq = 0
        self._replay_heard_s = 0.0
        self.feed = RankFeed(
            instance,
            dp_rank,
            partial(owner.submit, instance),
            self._ask if endpoints.replay else None,
            owner.counts_of(instance, dp_rank),
        )
        self._foreign_before = self.feed.counts["foreign"]
        self._replay: zmq.Socket[bytes] | None = None
        self._live: zmq.Socket[bytes] | None = owner.socket(zmq.SUB, _LIVE_HWM)
        self._live.setsockopt(zmq.SUBSCRIBE, self._topic)
        self._monitor: zmq.Socket[bytes] | None = self._live.get_monitor_socket(_CONNECTION_EVENTS)
        self._watch(self._monitor, self._drain_monitor)
        self._watch(self._live, self._drain_live)
        self._live.connect(self.endpoint)

    @property
    def endpoint(self) -> str:
        return self.endpoints.live

    @property
    def foreign(self) -> bool:
        """Another rank publishes there."""
        return self.feed.counts["foreign"] > self._foreign_before

    def close(self) -> None:
        if self._delay is not None:
            self._delay.cancel()
        self._close_replay()
        self._owner.replay_over(self)
        live, self._live = self._live, None
        monitor, self._monitor = self._monitor, None
        if monitor is not None and live is not None:
            self._loop.remove_reader(int(monitor.getsockopt(zmq.FD)))
            self._loop.remove_reader(int(live.getsockopt(zmq.FD)))
            live.disable_monitor()
            monitor.close(0)
            live.close(0)
        self.feed.disconnected()

    def tick(self, now_s: float) -> None:
        """Notice a replay that stopped."""
        if self._replay is not None and now_s - self._replay_heard_s >= _REPLAY_SILENCE_S:
            self._close_replay()
            self.feed.replay_failed()
            self._after_replay()

    def _watch(self, sock: zmq.Socket[bytes], drain: Callable[[], None]) -> None:
        self._loop.add_reader(int(sock.getsockopt(zmq.FD)), drain)
        # ZMQ's descriptor is edge-triggered, and using the socket may use up the edge.
        self._loop.call_soon(drain)

    # Publisher --------------------------------------------------------------------------------

    def _drain_monitor(self) -> None:
        monitor = self._monitor
        while monitor is not None and monitor is self._monitor:
            try:
                frames = monitor.recv_multipart(zmq.NOBLOCK)
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
        self._close_replay()
        self._owner.replay_over(self)
        self.feed.disconnected()

    def _subscribed(self) -> None:
        self._delay = None
        self.feed.connected()

    def _drain_live(self) -> None:
        until_s = time.monotonic() + _TURN_S
        while self._live is not None:
            if self._owner.behind or self._reading is not None:
                self._soon(self._drain_live)
                return
            try:
                frames = self._live.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # The publisher of this message may be another one than that of the message before.
            self._drain_monitor()
            try:
                seq, payload = live_frames(frames, self._topic)
            except MalformedMessage as error:
                self._malformed(error)
                continue
            if self._delay is None:
                self._read(self._live, seq, payload)
            if time.monotonic() >= until_s:
                self._soon(self._drain_live)
                return

    def _read(self, sock: zmq.Socket[bytes], seq: int, payload: bytes) -> None:
        """Take what came on one of the two sockets: a large message in parts."""
        if len(payload) <= _AT_ONCE_BYTES:
            self._told(sock, seq, payload)
            return
        self._reading = decode_in_parts(payload)
        self._read_on(self._reading, sock, seq)

    def _read_on(
        self, parts: Generator[None, None, KvBatch], sock: zmq.Socket[bytes], seq: int
    ) -> None:
        if parts is not self._reading:
            return
        until_s = time.monotonic() + _TURN_S
        message: Message = b""
        try:
            next(parts)
            while time.monotonic() < until_s:
                next(parts)
            self._loop.call_soon(self._read_on, parts, sock, seq)
            return
        except StopIteration as over:
            message = over.value
        except MalformedMessage:
            pass  # so is nothing
        self._reading = None
        self._told(sock, seq, message)

    def _told(self, sock: zmq.Socket[bytes], seq: int, message: Message) -> None:
        if sock is self._live:
            self.feed.live(seq, message)
        elif sock is self._replay:
            self.feed.replayed(seq, message)
            self._after_replay()

    def _soon(self, drain: Callable[..., None], *args: Any) -> None:
        """Go on in the next turn of the loop; once, however often it is asked for: the socket's
        descriptor calls too while anything is left."""
        if drain not in self._going_on:
            self._going_on.add(drain)
            self._loop.call_soon(self._go_on, drain, args)

    def _go_on(self, drain: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._going_on.discard(drain)
        drain(*args)

    def _malformed(self, error: MalformedMessage) -> None:
        self.feed.counts["malformed"] += 1
        if self.feed.counts["malformed"] == 1:
            logger.warning(
                "malformed KV events at %s (counted from now on): %s", self.endpoint, error
            )

    # Replay -----------------------------------------------------------------------------------

    def _ask(self, seq: int) -> None:
        self._replay_seq = seq
        if self._owner.may_replay(self):
            self.request_replay()

    def request_replay(self) -> None:
        """Send the request; on a socket of its own, as answers do not say what they answer."""
        self._close_replay()
        self._replay = sock = self._owner.socket(zmq.DEALER, _REPLAY_HWM)
        self._replay_heard_s = time.monotonic()
        sock.connect(self.endpoints.replay)
        sock.send_multipart(replay_request(self._replay_seq))
        self._watch(sock, partial(self._drain_replay, sock))

    def _close_replay(self) -> None:
        sock, self._replay = self._replay, None
        if sock is not None:
            self._loop.remove_reader(int(sock.getsockopt(zmq.FD)))
            sock.close(0)

    def _after_replay(self) -> None:
        if not self.feed.replaying:
            self._close_replay()
            self._owner.replay_over(self)

    def _drain_replay(self, sock: zmq.Socket[bytes]) -> None:
        until_s = time.monotonic() + _TURN_S
        while sock is self._replay:
            if self._owner.behind or self._reading is not None:
                self._soon(self._drain_replay, sock)
                return
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._replay_heard_s = time.monotonic()
            try:
                seq, payload = replay_frames(frames)
            except MalformedMessage as error:
                self._malformed(error)
                continue
            self._read(sock, seq, payload)
            if self._replay_heard_s >= until_s:
                self._soon(self._drain_replay, sock)
                return
