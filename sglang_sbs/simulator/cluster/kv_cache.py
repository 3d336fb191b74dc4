"""The caches of one DP rank, block by block, as SGLang 0.5.23 keeps them.

SGLang (``mem_cache/radix_cache.py``) keeps a tree. A block's name stands for everything before it,
too, so a map of names is enough here, and leaf-first LRU needs no tree either: whoever unlocks a
path does so from its end, so no block is ever evicted before the blocks that follow it.

A request takes room for its whole prompt when it is first scheduled (SGLang's admission asks for as
much), locks what it found, turns the room into blocks as they are computed, and gives it all back
when its KV has been sent; what it computed stays until somebody needs the room.

Below the device, as HiCache with write-through: what a rank computes is copied at once to host
memory of its own, and to storage that all ranks share. Host memory keeps the blocks used last; what
is found there is loaded while its pass runs. What only storage has is fetched first, from when the
rank takes the request in, which cannot be scheduled until then (``prefetch_from_storage`` in
``mem_cache/unified_radix_cache.py``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

Blocks = Sequence[int]
"""Names of a prompt's full blocks from the first on; equal names: equal tokens up to there."""
SharedStorage = set[int]
"""Blocks that any rank can have."""


@dataclass(slots=True)
class BlockEvents:
    """What became of the blocks of a rank since they were last asked for, removals first."""

    removed: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    host_removed: list[int] = field(default_factory=list)
    host_stored: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Hold:
    """What one request has of the cache."""

    blocks: Blocks
    locked: int
    """Leading blocks that are in the cache and stay there for it."""
    room: int
    """Blocks taken and not computed yet, with the last one, which is not full."""


class BlockCache:
    def __init__(
        self,
        capacity_tokens: int,
        block_tokens: int,
        *,
        host_tokens: int = 0,
        storage: SharedStorage | None = None,
    ) -> None:
        """``host_tokens``: with less than a block there is neither host memory nor ``storage``."""
        self.block_tokens = block_tokens
        self.capacity = capacity_tokens // block_tokens
        """Blocks."""
        self.room = 0
        """Blocks that requests have taken and not computed yet."""
        self._locks: dict[int, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Least recently used first; so is ``_host``."""
        self._host: OrderedDict[int, None] = OrderedDict()
        self._host_capacity = host_tokens // block_tokens
        self._storage = storage if self._host_capacity else None
        self._events = BlockEvents()

    def __contains__(self, block: object) -> bool:
        return block in self._locks or block in self._evictable

    def __len__(self) -> int:
        """Blocks it holds, locked or not."""
        return len(self._locks) + len(self._evictable)

    def match(self, blocks: Blocks, prompt_tokens: int) -> int:
        """Leading blocks it holds."""
        return self._end_of(self, blocks, 0, prompt_tokens)

    def _limit(self, blocks: Blocks, prompt_tokens: int) -> int:
        """At most (L - 1) // block can be found, as the last token must be computed."""
        return min(len(blocks), (prompt_tokens - 1) // self.block_tokens)

    def _end_of(self, tier: Container[int], blocks: Blocks, start: int, prompt_tokens: int) -> int:
        """Up to where blocks from ``start`` on are in a tier."""
        limit = self._limit(blocks, prompt_tokens)
        return next((at for at in range(start, limit) if blocks[at] not in tier), limit)

    def loadable(self, blocks: Blocks, hit: int, prompt_tokens: int) -> int:
        """How many more can be loaded from host memory, after the ``hit`` first ones."""
        return self._end_of(self._host, blocks, hit, prompt_tokens) - hit

    def to_fetch(self, blocks: Blocks, prompt_tokens: int) -> list[int]:
        """Those that have to come from storage first, up to the first that nobody has."""
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
        """The ``new`` ones of a prompt come to host memory, and take the place of none of the
        others."""
        fetched = set(new)
        self._write([block for block in blocks if block in fetched or block in self._host])

    def _write(self, blocks: Sequence[int]) -> None:
        """The device has them, or they were fetched."""
        if not self._host_capacity:
            return
        host = self._host
        # The end first: it is what must go first.
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
        """Lock the ``hit`` first blocks and take room for the rest, by evicting what is needed;
        None if that is not enough."""
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
        """The prompt is computed so far: others have its full blocks (``checkpoint``). What
        another request of the rank has computed at the same time is kept once."""
        full = min(len(hold.blocks), computed_tokens // self.block_tokens)
        new = hold.blocks[hold.locked : full]
        self._events.stored += [block for block in new if block not in self]
        self._write(hold.blocks[:full])
        self._lock(new)
        self.room -= len(new)
        hold.room -= len(new)
        hold.locked += len(new)

    def end(self, hold: Hold) -> None:
        """The request needs its KV no longer (``release_kv_cache``)."""
        self.room -= hold.room
        hold.room = 0
        self._unlock(hold)

    def take_events(self) -> BlockEvents | None:
        """What happened since the last call; None if nothing did."""
        events, self._events = self._events, BlockEvents()
        return None if events == BlockEvents() else events

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
