"""The caches of one DP rank, block by block, as SGLang 0.5.23 keeps them.

SGLang (``mem_cache/radix_cache.py``) keeps a tree. Here a map of block names is enough, because a
block's name depends on all blocks before it. Leaf-first LRU needs no tree either: a path is
unlocked from its end, so a block is never evicted before the blocks that follow it.

When a request is first scheduled, it locks the blocks it found, and reserves room for its whole
prompt (as SGLang's admission requires). Computed blocks take the place of the room. When its KV has
been sent, the request releases all of it; its blocks stay until other requests need the room.

Below the device are two tiers, as in HiCache with write-through. Computed blocks are copied at once
to the rank's host memory, and to storage that all ranks share. Host memory keeps the blocks used
last, and loads them while the pass that needs them runs. Blocks that only storage has are fetched
from the time when the rank accepts the request, which cannot be scheduled before they have arrived
(``prefetch_from_storage`` in ``mem_cache/unified_radix_cache.py``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from sglang_sbs.scheduling.events import BlocksRemoved, BlocksStored, CacheTier

Blocks = Sequence[int]
"""Names of a prompt's full blocks in order; equal names mean equal tokens up to that block."""
SharedStorage = set[int]
"""Names of the blocks in storage, which all ranks share."""


@dataclass(slots=True)
class BlockEvents:
    """Names of the blocks that a rank's device cache and host memory removed and stored since the
    last :meth:`BlockCache.take_events`. Removals are published first."""

    removed: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    host_removed: list[int] = field(default_factory=list)
    host_stored: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Hold:
    blocks: Blocks
    locked: int
    """Number of leading prompt blocks that are in the cache and locked for the request."""
    room: int
    """Number of blocks reserved and not computed yet, including the last one, which is not full."""


class BlockCache:
    def __init__(
        self,
        capacity_tokens: int,
        block_tokens: int,
        *,
        host_tokens: int = 0,
        storage: SharedStorage | None = None,
    ) -> None:
        """Create an empty cache. ``host_tokens``: size of the host memory. If it is less than a
        block, the rank uses neither host memory nor ``storage``."""
        self.block_tokens = block_tokens
        self.capacity = capacity_tokens // block_tokens
        self.room = 0
        """Number of blocks reserved by requests and not computed yet."""
        self._locks: dict[int, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Unlocked blocks, least recently used first; ``_host`` has the same order."""
        self._host: OrderedDict[int, None] = OrderedDict()
        self._host_capacity = host_tokens // block_tokens
        self._storage = storage if self._host_capacity else None
        self._events = BlockEvents()

    def __contains__(self, block: object) -> bool:
        return block in self._locks or block in self._evictable

    def __len__(self) -> int:
        """Return the number of blocks on the device, locked or not."""
        return len(self._locks) + len(self._evictable)

    def match(self, blocks: Blocks, prompt_tokens: int) -> int:
        return self._end_of(self, blocks, 0, prompt_tokens)

    def _limit(self, blocks: Blocks, prompt_tokens: int) -> int:
        """Return the most blocks that a prompt can find. The last token must be computed, so that
        is (L - 1) // block."""
        return min(len(blocks), (prompt_tokens - 1) // self.block_tokens)

    def _end_of(self, tier: Container[int], blocks: Blocks, start: int, prompt_tokens: int) -> int:
        """Return the position after the last consecutive block, from ``start`` on, that the tier
        has."""
        limit = self._limit(blocks, prompt_tokens)
        return next((at for at in range(start, limit) if blocks[at] not in tier), limit)

    def loadable(self, blocks: Blocks, hit: int, prompt_tokens: int) -> int:
        """Return the number of blocks after the first ``hit`` that can be loaded from host
        memory."""
        return self._end_of(self._host, blocks, hit, prompt_tokens) - hit

    def to_fetch(self, blocks: Blocks, prompt_tokens: int) -> list[int]:
        """Return the blocks that must be fetched from storage, up to the first that no tier has."""
        fetched: list[int] = []
        if self._storage is not None:
            hit = self.match(blocks, prompt_tokens)
            for block in blocks[hit : self._limit(blocks, prompt_tokens)]:
                if block not in self._host:
                    if block not in self._storage:
                        break
                    fetched.append(block)
        return fetched

    def fetched(self, blocks: Blocks, new: Blocks) -> None:
        """Store the ``new`` blocks of a prompt in host memory without displacing its others."""
        fetched = set(new)
        self._write([block for block in blocks if block in fetched or block in self._host])

    def _write(self, blocks: Sequence[int]) -> None:
        if not self._host_capacity:
            return
        host = self._host
        # Write the end first, because it must be evicted first.
        for block in reversed(blocks):
            if block not in host:
                self._events.host_stored.append(block)
                host[block] = None
            host.move_to_end(block)
        while len(host) > self._host_capacity:
            block, _ = host.popitem(last=False)
            self._events.host_removed.append(block)
        if self._storage is not None:
            self._storage.update(blocks)

    def start(self, blocks: Blocks, hit: int, prompt_tokens: int) -> Hold | None:
        """Lock the first ``hit`` blocks and reserve room for the rest of the prompt, evicting
        unlocked blocks; None if there is not enough room."""
        room = -(-prompt_tokens // self.block_tokens) - hit
        hold = Hold(blocks, hit, room)
        self._lock(blocks[:hit])
        if len(self._locks) + self.room + room > self.capacity:
            self._unlock(hold)
            return None
        self.room += room
        while len(self) + self.room > self.capacity:
            block, _ = self._evictable.popitem(last=False)
            self._events.removed.append(block)
        return hold

    def publish(self, hold: Hold, computed_tokens: int) -> None:
        """Make the computed full blocks of a prompt available to others (``checkpoint``). Blocks
        computed concurrently by another request of the rank are kept once."""
        full = min(len(hold.blocks), computed_tokens // self.block_tokens)
        new = hold.blocks[hold.locked : full]
        self._events.stored += [block for block in new if block not in self]
        self._write(hold.blocks[:full])
        self._lock(new)
        self.room -= len(new)
        hold.room -= len(new)
        hold.locked += len(new)

    def end(self, hold: Hold) -> None:
        """Release the KV of a request (``release_kv_cache``)."""
        self.room -= hold.room
        hold.room = 0
        self._unlock(hold)

    def take_events(self) -> BlockEvents | None:
        """Return the block changes since the last call; None if there are none."""
        events, self._events = self._events, BlockEvents()
        return None if events == BlockEvents() else events

    def take_messages(self, instance: str, dp_rank: int) -> list[BlocksRemoved | BlocksStored]:
        """Return the block changes since the last call as KV events; removals first in each
        tier."""
        changes = self.take_events()
        if changes is None:
            return []
        kinds: tuple[tuple[type[BlocksRemoved | BlocksStored], list[int], CacheTier], ...] = (
            (BlocksRemoved, changes.removed, "device"),
            (BlocksStored, changes.stored, "device"),
            (BlocksRemoved, changes.host_removed, "host"),
            (BlocksStored, changes.host_stored, "host"),
        )
        return [
            kind(instance=instance, dp_rank=dp_rank, blocks=blocks, tier=tier)
            for kind, blocks, tier in kinds
            if blocks
        ]

    def _lock(self, blocks: Blocks) -> None:
        for block in blocks:
            self._locks[block] = self._locks.get(block, 0) + 1
            self._evictable.pop(block, None)

    def _unlock(self, hold: Hold) -> None:
        for block in reversed(hold.blocks[: hold.locked]):
            locks = self._locks[block] - 1
            if locks:
                self._locks[block] = locks
            else:
                del self._locks[block]
                self._evictable[block] = None
        hold.locked = 0
