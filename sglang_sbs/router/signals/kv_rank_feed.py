"""Follows one DP rank's cache through its KV events: order, gaps, replays, restarts.

Sans-I/O: batches, connections and timeouts are reported here, and the caller requests a replay when
one is wanted.

Theory of operation
-------------------
Each publisher numbers its batches from 0. A new connection
starts with a replay of everything the engine still keeps; only the blocks left at its end are
passed on. Live batches wait at the caller until a replay is over. Later, a missing number starts a
replay from there. If a batch is lost for good (no replay, or the engine has dropped it),
``BlocksCleared`` is sent and the rank is learned anew. That is safe: a block stored earlier is then
merely unknown, and removing an unknown block does nothing.

A broken connection, or a lower number with a later timestamp, means another publisher: blocks are
cleared and learned from the beginning. An engine may drop parts of a long replay, even its end; the
rest is requested again while there is progress."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from sglang_sbs.router.signals.kv_messages import END_OF_REPLAY, Change, KvBatch
from sglang_sbs.scheduling.events import BlocksCleared, BlocksRemoved, BlocksStored, CacheTier

BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared
MAX_BLOCKS_PER_EVENT = 2048
_LONG_REPLAY = 256
"""A replay of at least this many batches is followed by another from its end on: an engine's ROUTER
socket holds 1000 messages and may have dropped the last ones."""
_MAX_FRUITLESS = 3
"""Number of replays in a row without progress after which no more are requested."""


class RankFeed:
    """Follows one rank, and reports changes of its cache to ``submit`` as scheduler events. The
    caller passes an invalid batch as ``None``."""

    def __init__(
        self,
        instance: str,
        dp_rank: int,
        submit: Callable[[BlockEvent], None],
        replays: bool,
        counts: Counter[str],
    ) -> None:
        """Create a feed; ``replays``: the engine has a replay endpoint."""
        self.instance = instance
        self.dp_rank = dp_rank
        self.counts = counts
        """Counts of ``events`` (batches), ``stored``, ``removed`` (blocks), ``gaps``, ``replays``,
        ``lost`` (times that known blocks had to be dropped), ``malformed``, ``foreign``."""
        self._submit = submit
        self._has_replays = self._can_ask = replays
        self._has_reported = False
        """Blocks were sent to the scheduler since the last ``BlocksCleared``."""
        self._next: int | None = None
        """Number of the next batch; ``None`` accepts any."""
        self._ts_s = -math.inf
        self.replaying = False
        """A replay from ``asked_from`` on is wanted or running."""
        self.asked_from = 0
        self._broken = False
        """Part of the running replay was lost."""
        self._fruitless = 0
        self._survivors: dict[CacheTier, dict[int, None]] | None = None
        """Blocks by tier while a replay from the beginning runs, whose end reports them."""
        self._ahead: tuple[int, KvBatch | None] | None = None
        """Number and content of a live batch after a gap, kept until the gap's replay is over."""

    # Connection -------------------------------------------------------------------------------

    def connected(self) -> None:
        """Handle a new connection: forget all blocks, and request a replay if there is one."""
        self.disconnected()
        self._can_ask = self._has_replays
        self._fruitless = 0
        if self._can_ask:
            self._learn_all()

    def disconnected(self) -> None:
        """Forget all blocks of the rank, because its changes are unknown from now on."""
        self._forget()
        self._next = None
        self._ts_s = -math.inf
        self.replaying = False
        self._survivors = self._ahead = None

    # Live batches -----------------------------------------------------------------------------

    def live(self, seq: int, batch: KvBatch | None) -> None:
        """Handle a live batch; not allowed during a replay."""
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
        """Handle a live batch with the expected number, or with a lower one: it is a duplicate, or
        with a later timestamp a restarted publisher's."""
        if self._next is not None and seq < self._next:
            if batch is None or not batch.ts_s > self._ts_s:
                return  # it was part of the replay
            self._lose()
            if seq > 0 and self._can_ask:
                self._learn_all()
                return
        self._next = seq + 1
        if batch is None:
            self._lose()
            return
        self._ts_s = batch.ts_s
        self._report(batch.changes)

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
        """Handle one batch of the replay; the last has the number ``END_OF_REPLAY``."""
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
                self._broken = True  # dropped on the way: request it again
                return
            # The engine has dropped the batches before it.
            if expected > 0:
                self._lose()
        self._next = seq + 1
        batch = self._own(batch)
        if batch is None:
            self._lose()
            return
        self._ts_s = batch.ts_s
        if self._survivors is None:
            self._report(batch.changes)
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
        self._report_survivors()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if self._next is not None and ahead[0] > self._next:
                # The replay lacked the missing batches: they are lost.
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
        if self._has_reported:
            self._has_reported = False
            self._submit(BlocksCleared(instance=self.instance, dp_rank=self.dp_rank))

    def _report_survivors(self) -> None:
        survivors, self._survivors = self._survivors, None
        if survivors is not None:
            self._report(Change("stored", tier, list(held)) for tier, held in survivors.items())

    def _report(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if change.kind == "cleared":
                self._has_reported = True  # clears expected blocks as well
                self._forget()
                continue
            self.counts[change.kind] += len(change.blocks)
            kind = BlocksStored if change.kind == "stored" else BlocksRemoved
            for start in range(0, len(change.blocks), MAX_BLOCKS_PER_EVENT):
                self._has_reported = True
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
