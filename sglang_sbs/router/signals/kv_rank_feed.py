"""What one DP rank's cache holds, followed through its KV events: order, gaps, replays, restarts.

Sans-I/O: batches, connections and timeouts are reported here; whoever does so asks for a replay
where one is wanted.

Theory of operation
-------------------
Batches are numbered from 0 by each publisher. A connection begins with nothing known and a replay
of all the engine still keeps: of it only what is left at its end is passed on. Live batches wait
where they come from until a replay is over. Later a missing number starts a replay from there. What
cannot be had any more (no replay, or the engine has dropped it) ends with ``BlocksCleared``: the
rank is learned anew from there. That is safe, since a block stored before is then merely not known,
and removing an unknown one does nothing.

A broken connection, or a number that goes back with a later time stamp, is another publisher:
cleared, and from the beginning. Of a long replay an engine may drop parts, also its end: the rest
is asked for again, as long as that gets on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from sglang_sbs.router.signals.kv_messages import END_OF_REPLAY, Change, KvBatch
from sglang_sbs.scheduling.events import BlocksCleared, BlocksRemoved, BlocksStored, CacheTier

BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared
MAX_BLOCKS_PER_EVENT = 2048
_LONG_REPLAY = 256
"""Batches after which the end of a replay is only believed if a further one brings nothing: an
engine's ROUTER, which holds 1000 messages, may have dropped some before the end."""
_MAX_FRUITLESS = 3
"""Replays without progress after which the engine is taken to give none."""


class RankFeed:
    """``submit`` takes scheduler events. A batch is ``None`` where what came under its number is
    none."""

    def __init__(
        self,
        instance: str,
        dp_rank: int,
        submit: Callable[[BlockEvent], None],
        replays: bool,
        counts: Counter[str],
    ) -> None:
        """``replays``: the engine has an endpoint for them."""
        self.instance = instance
        self.dp_rank = dp_rank
        self.counts = counts
        """``events`` (batches), ``stored``, ``removed`` (blocks), ``gaps``, ``replays``, ``lost``
        (times that what was known had to be forgotten), ``malformed``, ``foreign``."""
        self._submit = submit
        self._has_replays = self._can_ask = replays
        self._told = False
        """The scheduler was told of blocks since it was last told that there are none."""
        self._next: int | None = None
        """Number of the batch to come; ``None``: whichever comes first."""
        self._ts_s = -math.inf
        self.replaying = False
        """A replay from ``asked_from`` on is wanted, or under way."""
        self.asked_from = 0
        self._broken = False
        """Something of the replay under way did not arrive."""
        self._fruitless = 0
        self._survivors: dict[CacheTier, dict[int, None]] | None = None
        """While everything is learned: blocks that are there so far. ``None``: only what is new."""
        self._ahead: tuple[int, KvBatch | None] | None = None
        """The live batch before which some are missing."""

    # Connection -------------------------------------------------------------------------------

    def connected(self) -> None:
        """From now on no batch is missed: learn what was before."""
        self.disconnected()
        self._can_ask = self._has_replays
        self._fruitless = 0
        if self._can_ask:
            self._learn_all()

    def disconnected(self) -> None:
        """What the rank does from now on is not known."""
        self._forget()
        self._next = None
        self._ts_s = -math.inf
        self.replaying = False
        self._survivors = self._ahead = None

    # Live batches -----------------------------------------------------------------------------

    def live(self, seq: int, batch: KvBatch | None) -> None:
        """Not while a replay is under way."""
        batch = self._own(batch)
        if self._next is not None and seq > self._next:
            self.counts["gaps"] += 1
            if self._can_ask:
                self._ahead = seq, batch
                self._replay_from(self._next)
                return
            self._lose()
        self._take(seq, batch)

    def _take(self, seq: int, batch: KvBatch | None) -> None:
        """A batch in its turn, or one from before it."""
        if self._next is not None and seq < self._next:
            if batch is None or not batch.ts_s > self._ts_s:
                return  # the replay had it
            self._lose()
            if seq > 0 and self._can_ask:
                self._learn_all()
                return
        self._next = seq + 1
        if batch is None:
            self._lose()
            return
        self._ts_s = batch.ts_s
        self._tell(batch.changes)

    def _own(self, batch: KvBatch | None) -> KvBatch | None:
        if batch is None:
            kind = "malformed"
        elif batch.dp_rank in (None, self.dp_rank):
            kind = "events"
        else:
            kind, batch = "foreign", None
        self.counts[kind] += 1
        return batch

    # Replays ----------------------------------------------------------------------------------

    def replayed(self, seq: int, batch: KvBatch | None) -> None:
        """One of the replay; the last has the number ``END_OF_REPLAY``."""
        if not self.replaying:
            return
        if seq == END_OF_REPLAY:
            self._replay_ended()
            return
        expected = self.asked_from if self._next is None else self._next
        if self._broken or seq < expected:
            return
        if seq > expected:
            if self._next is not None and self._next > self.asked_from:
                self._broken = True  # dropped on the way: ask for it again
                return
            # The engine has forgotten what was before it.
            if expected > 0:
                self._lose()
        self._next = seq + 1
        batch = self._own(batch)
        if batch is None:
            self._lose()
            return
        self._ts_s = batch.ts_s
        if self._survivors is None:
            self._tell(batch.changes)
        else:
            _apply(batch.changes, self._survivors)

    def replay_failed(self) -> None:
        if self.replaying:
            self._broken = True
            self._replay_ended()

    def _replay_ended(self) -> None:
        position = self._next or 0
        if self._broken:
            self._fruitless = 0 if position > self.asked_from else self._fruitless + 1
            if self._fruitless < _MAX_FRUITLESS:
                self._replay_from(position)
                return
            self._can_ask = False
            self._lose()
        elif position - self.asked_from >= _LONG_REPLAY:
            self._replay_from(position)
            return
        self.replaying = False
        self._fruitless = 0
        self._tell_survivors()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if self._next is not None and ahead[0] > self._next:
                # The replay did not have what was missing before it: it cannot be had.
                self._lose()
                self._next = ahead[0]
            self._take(*ahead)

    def _learn_all(self) -> None:
        self._next = None
        self._survivors = {"device": {}, "host": {}}
        self._replay_from(0)

    def _replay_from(self, seq: int) -> None:
        self.replaying = True
        self._broken = False
        self.asked_from = seq
        self.counts["replays"] += 1

    # To the scheduler -------------------------------------------------------------------------

    def _lose(self) -> None:
        self.counts["lost"] += 1
        if self._survivors is not None:
            self._survivors = {"device": {}, "host": {}}
        self._forget()

    def _forget(self) -> None:
        if self._told:
            self._told = False
            self._submit(BlocksCleared(instance=self.instance, dp_rank=self.dp_rank))

    def _tell_survivors(self) -> None:
        survivors, self._survivors = self._survivors, None
        if survivors is not None:
            self._tell(Change("stored", tier, list(held)) for tier, held in survivors.items())

    def _tell(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if change.kind == "cleared":
                self._told = True  # also what it was only expected to hold
                self._forget()
                continue
            self.counts[change.kind] += len(change.blocks)
            kind = BlocksStored if change.kind == "stored" else BlocksRemoved
            for start in range(0, len(change.blocks), MAX_BLOCKS_PER_EVENT):
                self._told = True
                blocks = change.blocks[start : start + MAX_BLOCKS_PER_EVENT]
                instance, rank = self.instance, self.dp_rank
                event = kind(instance=instance, dp_rank=rank, blocks=blocks, tier=change.tier)
                self._submit(event)


def _apply(changes: Iterable[Change], held: dict[CacheTier, dict[int, None]]) -> None:
    for change in changes:
        if change.kind == "cleared":
            for blocks in held.values():
                blocks.clear()
        elif change.kind == "stored":
            held[change.tier].update(dict.fromkeys(change.blocks))
        else:
            for block in change.blocks:
                held[change.tier].pop(block, None)
