"""Follows the KV events of engines that are announced to the scheduler.

SGLang publishes without authentication, so the router connects only to the host in the worker's own
URL, and for ranks on other nodes to addresses accepted by
:mod:`~sglang_sbs.router.workers.kv_addresses`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import zmq
from prometheus_client.core import Metric
from zmq.utils.monitor import parse_monitor_message

from sglang_sbs.router.engines.urls import split_worker_url
from sglang_sbs.router.metric_families import gauge, total
from sglang_sbs.router.signals.dialler import Dialler
from sglang_sbs.router.signals.inbox import Inbox
from sglang_sbs.router.signals.kv_messages import (
    END_OF_REPLAY,
    MAX_MESSAGE_BYTES,
    KvBatch,
    decode_in_parts,
    live_frames,
    replay_frames,
    replay_request,
)
from sglang_sbs.router.signals.kv_rank_feed import BlockEvent, RankFeed
from sglang_sbs.router.signals.kv_times import KvTimes
from sglang_sbs.router.workers.kv_addresses import KvEndpoints, default_endpoints
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import KvEventsBlock, node_of_rank
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.scheduling.events import BlocksCleared, Event, InstanceId
from sglang_sbs.wire import MalformedMessage

logger = logging.getLogger(__name__)

_MAX_REPLAYS = 8
"""Concurrent replays of all ranks; one can be hundreds of megabytes."""
_MOST_QUEUED = 64
"""Limit on KV events queued for the scheduler; at the limit no more messages are read."""
_MAX_SOCKETS = 32_768
_MOST_HELD_BYTES = 16 << 20
"""Limit on the live messages that are held for a rank during a replay."""
_FRAME_BYTES = 64
"""Memory that each held ZeroMQ frame counts as, in addition to its bytes."""
_LIVE_HWM = 128
"""Number of messages that a live socket queues; further ones wait at the engine."""
_REPLAY_HWM = 1_000
_OF_SOCKETS = {
    zmq.LINGER: 0,
    zmq.IPV6: 1,
    zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 2_000,
    # A vanished host closes no connection.
    zmq.HEARTBEAT_IVL: 5_000,
    zmq.HEARTBEAT_TIMEOUT: 15_000,
}
_CONNECTION_EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


class KvEventSubscriber:
    """Subscribes to the KV events of instances, each from :meth:`up` until some time after
    :meth:`down`. Use only from one event loop."""

    def __init__(
        self, registry: Registry, submit: Callable[[Event], None], times: KvTimes | None = None
    ) -> None:
        self.registry = registry
        self.times = times or KvTimes()
        self._submit = submit
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._instances: dict[InstanceId, _Subscription] = {}
        self._counts: dict[tuple[InstanceId, int], Counter[str]] = {}
        self._named_elsewhere: set[InstanceId] = set()
        self.replays = asyncio.Semaphore(_MAX_REPLAYS)
        self._queued: deque[BlockEvent] = deque()
        self._submitting = False
        self.room = asyncio.Event()
        """Set while the queue accepts more events."""
        self.room.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.start(self._tick())

    # Instances --------------------------------------------------------------------------------

    def up(self, worker: Worker) -> None:
        """Subscribe to an instance that was announced to the scheduler, or that changed."""
        source, known = self.registry.kv_events_of(worker), self._instances.get(worker.url)
        if known is not None and (known.source, len(known.ranks)) == (source, worker.dp_size):
            known.resume()
            return
        self._forget(worker.url)
        if source is not None:
            self._say_if_elsewhere(worker, source)
            self._instances[worker.url] = _Subscription(self, worker, source)

    def down(self, worker: Worker) -> None:
        """Keep following an unused instance for a while, because it often returns soon and a replay
        is costly."""
        if worker.info is None:  # restarted, even if connections still look open
            self._forget(worker.url)
        elif worker.url in self._instances:
            self._instances[worker.url].down_s = time.monotonic()

    def _forget(self, instance: InstanceId) -> None:
        if subscription := self._instances.pop(instance, None):
            for rank in subscription.ranks:
                rank.close()

    def removed(self, instance: InstanceId) -> None:
        """Forget an instance for good, with its counts."""
        self._forget(instance)
        self._named_elsewhere.discard(instance)
        for key in [key for key in self._counts if key[0] == instance]:
            del self._counts[key]

    async def close(self) -> None:
        self._queued.clear()
        for instance in list(self._instances):
            self._forget(instance)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.term()

    def _say_if_elsewhere(self, worker: Worker, source: KvEventsBlock) -> None:
        host = split_worker_url(worker.url)[1]
        if source.host in ("", "*", "0.0.0.0", "::", host) or worker.url in self._named_elsewhere:
            return
        self._named_elsewhere.add(worker.url)
        text = "worker %s reports KV events at host %r, which is ignored: the router connects to"
        logger.warning(f"{text} the worker's own host", worker.url, source.host[:256])

    # For its parts ----------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` in a task, which :meth:`close` cancels."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def socket(self, kind: int, hwm: int) -> zmq.Socket[bytes]:
        sock = self._context.socket(kind)
        for option, value in _OF_SOCKETS.items():
            sock.setsockopt(option, value)
        sock.setsockopt(zmq.RCVHWM, hwm)
        return sock

    def counts_of(self, instance: InstanceId, rank: int) -> Counter[str]:
        return self._counts.setdefault((instance, rank), Counter())

    def submit(self, event: BlockEvent) -> None:
        """Queue an event for the scheduler; drop it while some rank of its instance is
        unreachable."""
        worker = self.registry.get(event.instance)
        if worker is not None and worker.kv_events_missing:
            return
        if isinstance(event, BlocksCleared):  # queued changes of that rank are obsolete
            rank = (event.instance, event.dp_rank)
            self._queued = deque(e for e in self._queued if (e.instance, e.dp_rank) != rank)
            self._submit(event)
            return
        self._queued.append(event)
        if len(self._queued) >= _MOST_QUEUED:
            self.room.clear()
        self._submit_soon()

    def _submit_soon(self) -> None:
        if self._queued and not self._submitting:
            self._submitting = True
            asyncio.get_running_loop().call_soon(self._submit_queued)

    def _submit_queued(self) -> None:
        """Submit queued events for at most ``turn_s``; the next event-loop turn continues."""
        self._submitting = False
        until_s = time.monotonic() + self.times.turn_s
        try:
            while self._queued:
                self._submit(self._queued.popleft())
                if time.monotonic() >= until_s:
                    break
        finally:
            if len(self._queued) < _MOST_QUEUED:
                self.room.set()
            self._submit_soon()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.times.tick_s)
            now_s = time.monotonic()
            for instance, subscription in list(self._instances.items()):
                try:
                    subscription.follow()
                    if subscription.down_s is None:
                        subscription.tick(now_s)
                    elif now_s - subscription.down_s >= self.times.keep_s:
                        self._forget(instance)
                except Exception:  # an error must not leave the others unwatched
                    logger.exception("watching KV events of a worker failed")

    # Metrics ----------------------------------------------------------------------------------

    def families(self) -> Iterator[Metric]:
        for kind, name, text in (
            ("events", "sbs_prefix_events", "Batches of KV events received"),
            ("gaps", "sbs_prefix_event_gaps", "Missing batches noticed"),
            ("replays", "sbs_prefix_replays", "Replays requested"),
            ("lost", "sbs_prefix_losses", "Times that a rank's blocks were dropped after a loss"),
            ("malformed", "sbs_prefix_events_malformed", "Messages that could not be decoded"),
            ("foreign", "sbs_prefix_events_foreign", "Batches of another rank"),
        ):
            found = {(url, str(rank)): counts[kind] for (url, rank), counts in self._counts.items()}
            yield total(name, text, found, "worker", "dp_rank")
        blocks = {
            (instance, str(rank), change): counts[change]
            for (instance, rank), counts in self._counts.items()
            for change in ("stored", "removed")
        }
        about = "Blocks by kind of change"
        yield total("sbs_prefix_blocks", about, blocks, "worker", "dp_rank", "change")
        sources = {(w.url, self.registry.prefix_source_of(w)): 1 for w in self.registry}
        about = "1 for the source of an instance's prefixes"
        yield gauge("sbs_prefix_source", about, sources, "worker", "source")


class _Subscription:
    """Connections to all ranks of one instance."""

    def __init__(self, owner: KvEventSubscriber, worker: Worker, source: KvEventsBlock) -> None:
        self.source = source
        self.down_s: float | None = None
        """Time when the instance went down; ``None`` while it is up."""
        self._owner = owner
        self._worker = worker
        self._missing = partial(owner.registry.set_kv_events_missing, worker)
        self._connected_s = time.monotonic()
        """Last time all ranks were connected; at first, the start of the subscription."""
        self.ranks = [self._open(dp_rank) for dp_rank in range(worker.dp_size)]

    def _open(self, dp_rank: int) -> _RankConnection:
        worker = self._worker
        endpoints = worker.kv_endpoints.get(dp_rank)
        if endpoints is None:
            endpoints = default_endpoints(worker.url, self.source, dp_rank)
        return _RankConnection(self._owner, worker.url, endpoints, self.source.topic, dp_rank)

    def follow(self) -> None:
        """Connect to ranks on other nodes at their reported addresses. A working connection made
        that way is kept: nodes do not move, and another host may send in a rank's name."""
        reported = self._worker.kv_endpoints
        if not reported:
            return
        for dp_rank, rank in enumerate(self.ranks):
            endpoints = reported.get(dp_rank, rank.endpoints)
            default = default_endpoints(self._worker.url, self.source, dp_rank)
            if endpoints != rank.endpoints and (rank.endpoints == default or not rank.connected):
                rank.close()
                self.ranks[dp_rank] = self._open(dp_rank)

    def resume(self) -> None:
        if self.down_s is not None:
            self.down_s = None
            self._connected_s = time.monotonic()

    def tick(self, now_s: float) -> None:
        silent = [rank for rank in self.ranks if not rank.connected]
        foreign = [rank for rank in self.ranks if rank.foreign]
        if not silent and not foreign:
            self._connected_s = now_s
            if self._worker.kv_events_missing:
                self._missing("")
                for rank in self.ranks:
                    rank.learn()
        elif foreign:
            self._missing(
                f"at {foreign[0].endpoints.live} a DP rank other than {foreign[0].feed.dp_rank} "
                "publishes KV events: do the ports of two engines overlap?",
            )
        elif now_s - self._connected_s >= self._owner.times.patience_s:
            shown = ", ".join(f"rank {r.feed.dp_rank} at {r.endpoints.live}" for r in silent[:4])
            more = " …" if len(silent) > 4 else ""
            why = self._why(silent[0].feed.dp_rank)
            self._missing(f"no KV events from {shown}{more}: {why}")

    def _why(self, dp_rank: int) -> str:
        worker = self._worker
        node = node_of_rank(worker.known, dp_rank)
        refused = worker.kv_refused.get(dp_rank)
        if refused is not None:
            return f"rank {dp_rank} on node {node}: {refused}"
        if node > 0 and dp_rank not in worker.kv_endpoints:
            return (
                f"rank {dp_rank} is on node {node}, whose address no EndForward reports: it needs "
                "the plugin and SGLANG_SBS_ROUTERS as the first node has them"
            )
        return (
            "can those ports be reached from here, and does the endpoint in --kv-events-config "
            "have a wildcard host?"
        )


class _RankConnection:
    """Connection to one DP rank's publisher, and to its replay endpoint while needed. Input is
    bounded, counted and read in turns; its :class:`.RankFeed` handles the order of events."""

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
        self._read_live = partial(live_frames, topic=topic.encode())
        self._until_s = 0.0
        """Monotonic time until which messages are handled before other work gets a turn."""
        counts = owner.counts_of(instance, dp_rank)
        self.feed = RankFeed(instance, dp_rank, owner.submit, bool(endpoints.replay), counts)
        self._foreign_before = counts["foreign"]
        live = owner.socket(zmq.SUB, _LIVE_HWM)
        live.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._monitor = Inbox(live.get_monitor_socket(_CONNECTION_EVENTS))
        self._live = Inbox(live)
        follow_s = owner.times.follow_s
        self._dialler = Dialler(live, "KV events", stands=lambda: self.connected, follow_s=follow_s)
        self._dialler.dial({endpoints.live})
        self._held: deque[list[bytes]] = deque()
        """Live messages received during a replay."""
        self._watching = owner.start(self._watch())
        self._following: asyncio.Task[None] | None = None

    @property
    def foreign(self) -> bool:
        """Whether another rank publishes at this address."""
        return self.feed.counts["foreign"] > self._foreign_before

    def close(self) -> None:
        if self._live.sock.closed:
            return
        self._gone()
        self._watching.cancel()
        self._dialler.close()
        # Disable first: libzmq would block on its next event without a reader of the monitor.
        self._live.sock.disable_monitor()
        self._monitor.close()
        self._live.close()

    async def _watch(self) -> None:
        """Track whether the rank is connected. Forget its blocks when a connection ends, and learn
        them anew with each connection, which may lead to another publisher."""
        while True:
            event = parse_monitor_message(await self._monitor.get())["event"]
            self._gone()
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.connected = True
                self.learn()

    def _gone(self) -> None:
        self.connected = False
        if self._following is not None:
            self._following.cancel()
        self.feed.disconnected()

    def learn(self) -> None:
        """Follow the rank from the beginning again, with a replay if there is one."""
        if self._following is not None:
            self._following.cancel()
        self._following = self._owner.start(self._follow())

    async def _follow(self) -> None:
        last_cause = ""
        while True:
            try:
                await asyncio.sleep(self._owner.times.subscribed_s)
                await self._pass_over()
                self.feed.connected()
                while True:
                    if self.feed.replaying:
                        holding = self._owner.start(self._hold())
                        try:
                            while self.feed.replaying:
                                await self._replay()
                        finally:
                            holding.cancel()
                    self.feed.live(*await self._take(self._live, self._read_live))
            except Exception as error:  # an error must not stop it for good
                if repr(error) != last_cause:  # log each cause once: without descriptors it repeats
                    logger.exception("following KV events of %s failed", self.endpoints.live)
                last_cause = repr(error)

    async def _pass_over(self) -> None:
        """Skip earlier messages, which may be from another publisher."""
        with suppress(zmq.Again):
            while True:
                self._live.sock.recv_multipart(zmq.NOBLOCK)
                await self._turn()

    async def _hold(self) -> None:
        """Hold live messages that arrive during a replay; those held before are dropped, because
        the replay contains them. Above the byte limit only the latest is kept, and the missing ones
        are requested later."""
        self._held.clear()
        held_bytes = 0
        while not self._live.sock.closed:
            frames = await self._live.get()
            size = sum(_FRAME_BYTES + len(frame) for frame in frames)
            held_bytes += size
            if held_bytes > _MOST_HELD_BYTES:
                self._held.clear()
                held_bytes = size
            self._held.append(frames)
            await self._turn()

    async def _replay(self) -> None:
        """Run one replay on a separate socket, because responses do not identify their request."""
        async with self._owner.replays:
            inbox = Inbox(self._owner.socket(zmq.DEALER, _REPLAY_HWM))
            try:
                inbox.sock.connect(self._dialler.by_address(self.endpoints.replay))
                inbox.sock.send_multipart(replay_request(self.feed.asked_from))
                seq = 0
                while seq != END_OF_REPLAY:
                    silence_s = self._owner.times.replay_silence_s
                    seq, batch = await self._take(inbox, replay_frames, silence_s)
                    self.feed.replayed(seq, batch)
            except TimeoutError:
                self.feed.replay_failed()
            finally:
                inbox.close()

    # Messages ---------------------------------------------------------------------------------

    async def _take(
        self,
        inbox: Inbox,
        read: Callable[[Sequence[bytes]], tuple[int, bytes]],
        limit_s: float | None = None,
    ) -> tuple[int, KvBatch | None]:
        """Return the next message's sequence number and batch (``None``: invalid). Raises:
        TimeoutError, none arrived within ``limit_s``."""
        while True:
            await self._turn()
            while not self._owner.room.is_set():
                await self._owner.room.wait()
            async with asyncio.timeout(limit_s):
                held = inbox is self._live and self._held
                frames = held.popleft() if held else await inbox.get()
            try:
                seq, payload = read(frames)
            except MalformedMessage as error:
                self._malformed(error)
                continue
            return seq, await self._decoded(payload)

    async def _decoded(self, payload: bytes) -> KvBatch | None:
        parts = decode_in_parts(payload)
        try:
            while True:
                began_s, took_s = time.monotonic(), 0.0
                while took_s <= self._owner.times.turn_s:
                    next(parts)
                    took_s = time.monotonic() - began_s
                # A step can be a whole message of one event, so let others run for the same time.
                await asyncio.sleep(took_s)
        except StopIteration as over:
            batch: KvBatch = over.value
            return batch
        except MalformedMessage:
            return None

    async def _turn(self) -> None:
        """Let other work run if this rank has handled messages for ``turn_s``."""
        if time.monotonic() >= self._until_s:
            await asyncio.sleep(0)
            self._until_s = time.monotonic() + self._owner.times.turn_s

    def _malformed(self, error: MalformedMessage) -> None:
        self.feed.counts["malformed"] += 1
        if self.feed.counts["malformed"] == 1:
            text = "malformed KV events at %s (counted from now on): %s"
            logger.warning(text, self.endpoints.live, error)
