"""Follows the KV events of engines, from the time the scheduler is told of one until it is gone.

SGLang publishes without authentication: only the host that the worker's own URL names is connected
to, and for ranks on other nodes what :mod:`~sglang_sbs.router.workers.kv_addresses` believes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import zmq
from prometheus_client.core import Metric

from sglang_sbs.router.engines.urls import split_worker_url
from sglang_sbs.router.metric_families import gauge, total
from sglang_sbs.router.signals.kv_rank_sockets import TURN_S, BlockEvent, RankSockets
from sglang_sbs.router.workers.kv_addresses import default_endpoints
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.server_info import KvEventsBlock, node_of_rank
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.scheduling.events import BlocksCleared, Event, InstanceId

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""An instance is taken to publish nothing after some rank could not be connected to for so long."""
KEEP_S = 60.0
"""An instance that is not used is listened to for so long."""
_TICK_S = 0.5
_MAX_REPLAYS = 8
"""At once, of all ranks: one can be hundreds of megabytes."""
_MOST_UNTOLD = 64
"""Events for the scheduler that wait for their turn."""
_MAX_SOCKETS = 32_768


class KvEventSubscriber:
    """Must be used from one event loop only. Follows instances from ``up`` to ``down``."""

    def __init__(self, registry: Registry, submit: Callable[[Event], None]) -> None:
        self.registry = registry
        self._submit = submit
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._instances: dict[InstanceId, _Subscription] = {}
        self._counts: dict[tuple[InstanceId, int], Counter[str]] = {}
        self._named_elsewhere: set[InstanceId] = set()
        self._replays: dict[RankSockets, None] = {}
        """Those under way, then those that wait for one of them to end."""
        self._untold: deque[BlockEvent] = deque()
        self._telling = False
        self._ticker = asyncio.create_task(self._tick())

    # Instances --------------------------------------------------------------------------------

    def up(self, worker: Worker) -> None:
        """The scheduler was told of the instance, or of a change."""
        info = worker.info
        known = self._instances.get(worker.url)
        if info is None or info.kv_events is None or not self.registry.listens_to_events(worker):
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
        if worker.info is None:  # restarted, though the connections may not know yet
            self._forget(worker.url)
        elif worker.url in self._instances:
            self._instances[worker.url].down_s = time.monotonic()

    def _forget(self, instance: InstanceId) -> None:
        if subscription := self._instances.pop(instance, None):
            for rank in subscription.ranks:
                rank.close()

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
        self.context.term()

    def _say_if_elsewhere(self, worker: Worker, source: KvEventsBlock) -> None:
        host = split_worker_url(worker.url)[1]
        if source.host in ("", "*", "0.0.0.0", "::", host) or worker.url in self._named_elsewhere:
            return
        self._named_elsewhere.add(worker.url)
        told = "worker %s says that it publishes KV events at host %r, which is not followed: its"
        logger.warning(f"{told} own host is connected to", worker.url, source.host[:256])

    # For its parts ----------------------------------------------------------------------------

    def counts_of(self, instance: InstanceId, rank: int) -> Counter[str]:
        return self._counts.setdefault((instance, rank), Counter())

    def submit(self, event: BlockEvent) -> None:
        """While some rank cannot be heard the scheduler is told nothing of any."""
        worker = self.registry.get(event.instance)
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
        until_s = time.monotonic() + TURN_S
        try:
            while self._untold:
                self._submit(self._untold.popleft())
                if time.monotonic() >= until_s:
                    break
        finally:
            self._tell_soon()

    @property
    def behind(self) -> bool:
        return len(self._untold) >= _MOST_UNTOLD

    def may_replay(self, rank: RankSockets) -> bool:
        """False: it is told to when its turn has come."""
        self._replays.setdefault(rank)
        return rank in islice(self._replays, _MAX_REPLAYS)

    def replay_over(self, rank: RankSockets) -> None:
        if rank not in self._replays:
            return
        waiting = islice(self._replays, _MAX_REPLAYS, _MAX_REPLAYS + 1)
        following = next(waiting, None) if self.may_replay(rank) else None
        del self._replays[rank]
        if following is not None:
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

    # Metrics ----------------------------------------------------------------------------------

    def families(self) -> Iterator[Metric]:
        for kind, name, text in (
            ("events", "sbs_prefix_events", "Batches of KV events taken"),
            ("gaps", "sbs_prefix_event_gaps", "Missing batches noticed"),
            ("replays", "sbs_prefix_replays", "Replays asked for"),
            ("lost", "sbs_prefix_losses", "A rank's blocks forgotten for a loss"),
            ("malformed", "sbs_prefix_events_malformed", "Messages that are none"),
            ("foreign", "sbs_prefix_events_foreign", "Batches of another rank"),
        ):
            found = {(one, str(rank)): counts[kind] for (one, rank), counts in self._counts.items()}
            yield total(name, text, found, "worker", "dp_rank")
        blocks = {
            (instance, str(rank), change): counts[change]
            for (instance, rank), counts in self._counts.items()
            for change in ("stored", "removed")
        }
        about = "Blocks by what became of them"
        yield total("sbs_prefix_blocks", about, blocks, "worker", "dp_rank", "change")
        sources = {(w.url, self.registry.prefix_source_of(w)): 1 for w in self.registry}
        about = "1 for how an instance's cache is known"
        yield gauge("sbs_prefix_source", about, sources, "worker", "source")


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
        self._missing = partial(owner.registry.set_kv_events_missing, worker)
        self._heard_s = time.monotonic()
        self.ranks = [self._open(dp_rank) for dp_rank in range(dp_size)]

    def _open(self, dp_rank: int) -> RankSockets:
        worker = self._worker
        endpoints = worker.kv_endpoints.get(dp_rank)
        if endpoints is None:
            endpoints = default_endpoints(worker.url, self.source, dp_rank)
        return RankSockets(self._owner, worker.url, endpoints, self.source.topic, dp_rank)

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

    def resume(self) -> None:
        if self.down_s is not None:
            self.down_s = None
            self._heard_s = time.monotonic()

    def tick(self, now_s: float) -> None:
        silent = [rank for rank in self.ranks if not rank.connected]
        foreign = [rank for rank in self.ranks if rank.foreign]
        if not silent and not foreign:
            self._heard_s = now_s
            if self._worker.kv_events_missing:
                self._missing("")
                for rank in self.ranks:
                    rank.learn()
        elif foreign:
            self._missing(
                f"at {foreign[0].endpoints.live} another DP rank than {foreign[0].feed.dp_rank} "
                "publishes KV events: do the ports of two engines overlap?",
            )
        elif now_s - self._heard_s >= PATIENCE_S:
            shown = ", ".join(f"rank {r.feed.dp_rank} at {r.endpoints.live}" for r in silent[:4])
            more = " …" if len(silent) > 4 else ""
            why = self._why(silent[0].feed.dp_rank)
            self._missing(f"KV events cannot be had from {shown}{more}: {why}")

    def _why(self, dp_rank: int) -> str:
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
