"""The radix cache of one DP rank, block by block, as SGLang 0.5.23 keeps it.

SGLang (``mem_cache/radix_cache.py``) keeps a tree. A block's name stands for everything before it,
too, so a map of names is enough here, and leaf-first LRU needs no tree either: whoever unlocks a
path does so from its end, so no block is ever evicted before the blocks that follow it.

A request takes room for its whole prompt when it is first scheduled (SGLang's admission asks for as
much), locks what it found, turns the room into blocks as they are computed, and gives it all back
when its KV has been sent; what it computed stays until somebody needs the room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_sbs.simulator.cluster.cache_tiers import BlockEvents, LowerTiers

Blocks = Sequence[int]
"""Names of a prompt's full blocks from the first on; equal names: equal tokens up to there."""


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
        self, capacity_tokens: int, block_tokens: int, *, lower: LowerTiers | None = None
    ) -> None:
        self.block_tokens = block_tokens
        self._lower = lower or LowerTiers(0, None)
        self.capacity = capacity_tokens // block_tokens
        """Blocks."""
        self.room = 0
        """Blocks that requests have taken and not computed yet."""
        self._locks: dict[int, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""

    def __contains__(self, block: int) -> bool:
        return block in self._locks or block in self._evictable

    def __len__(self) -> int:
        """Blocks it holds, locked or not."""
        return len(self._locks) + len(self._evictable)

    def match(self, blocks: Blocks, prompt_tokens: int) -> int:
        """Leading blocks it holds: at most (L - 1) // block, as the last token must be computed."""
        limit = self._limit(blocks, prompt_tokens)
        for index in range(limit):
            if blocks[index] not in self:
                return index
        return limit

    def _limit(self, blocks: Blocks, prompt_tokens: int) -> int:
        return min(len(blocks), (prompt_tokens - 1) // self.block_tokens)

    def loadable(self, blocks: Blocks, hit: int, prompt_tokens: int) -> int:
        """How many more can be loaded from host memory, after the ``hit`` first ones."""
        limit = self._limit(blocks, prompt_tokens)
        return self._lower.in_host(blocks, hit, limit) - hit

    def to_fetch(self, blocks: Blocks, prompt_tokens: int) -> list[int]:
        """Those that have to come from storage first."""
        if self._lower.storage is None:
            return []
        hit = self.match(blocks, prompt_tokens)
        return self._lower.to_fetch(blocks, hit, self._limit(blocks, prompt_tokens))

    def fetched(self, blocks: Blocks, new: Blocks) -> None:
        """The ``new`` ones of a prompt have come from storage to host memory."""
        self._lower.bring(blocks, new)

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
            self._lower.events.removed.append(block)
        return hold

    def publish(self, hold: Hold, computed_tokens: int) -> None:
        """The prompt is computed so far: others have its full blocks (``checkpoint``). What
        another request of the rank has computed at the same time is kept once."""
        full = min(len(hold.blocks), computed_tokens // self.block_tokens)
        new = hold.blocks[hold.locked : full]
        self._lower.events.stored += [block for block in new if block not in self]
        self._lower.write(hold.blocks[:full])
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
        events, self._lower.events = self._lower.events, BlockEvents()
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
