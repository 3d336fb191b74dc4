"""What is below a rank's KV cache: host memory of its own, and storage that all ranks share.

As SGLang's HiCache 0.5.23 with write-through: what a rank computes is copied to both at once. Host
memory keeps the blocks used last; what is found there is loaded while its pass runs. What only
storage has is fetched first, from when the rank takes the request in, which cannot be scheduled
until then (``prefetch_from_storage`` in ``mem_cache/unified_radix_cache.py``)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec


class TierSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and speeds."""

    host_kv_tokens: int = 1_000_000
    """Of each prefill rank: twice its device memory (``--hicache-ratio 2``). 0: no such tier, and
    none below it."""
    host_load_s: float = 1.5e-6
    """Per token, from host memory to the device: 70272 bytes at 50 GB/s."""
    storage: bool = True
    """Of all prefill ranks together, and as large as it takes."""
    storage_load_s: float = 7e-6
    """Per token, from storage to host memory: 70272 bytes at 10 GB/s."""

    @property
    def has_storage(self) -> bool:
        """Storage is reached through host memory only."""
        return self.storage and self.host_kv_tokens > 0


SharedStorage = set[int]
"""Blocks that any rank can have."""


@dataclass(slots=True)
class BlockEvents:
    """What became of the blocks of a rank since they were last asked for, removals first."""

    removed: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    host_removed: list[int] = field(default_factory=list)
    host_stored: list[int] = field(default_factory=list)


class LowerTiers:
    """Below one rank's device memory."""

    def __init__(self, capacity_blocks: int, storage: SharedStorage | None) -> None:
        self._capacity = capacity_blocks
        self._host: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""
        self.storage = storage
        self.events = BlockEvents()
        """Of the cache above, too."""

    def write(self, blocks: Sequence[int]) -> None:
        """The device has them, or they were fetched."""
        if not self._capacity:
            return
        host = self._host
        # The end first: it is what must go first.
        for block in reversed(blocks):
            if block not in host:
                self.events.host_stored.append(block)
                host[block] = None
            host.move_to_end(block)
        while len(host) > self._capacity:
            block, _ = host.popitem(last=False)
            self.events.host_removed.append(block)
        if self.storage is not None:
            self.storage.update(blocks)

    def bring(self, blocks: Sequence[int], new: Sequence[int]) -> None:
        """The ``new`` ones of a prompt come, and take the place of none of the others."""
        fetched = set(new)
        self.write([block for block in blocks if block in fetched or block in self._host])

    def in_host(self, blocks: Sequence[int], start: int, limit: int) -> int:
        """Up to where blocks from ``start`` on are in host memory."""
        for index in range(start, limit):
            if blocks[index] not in self._host:
                return index
        return limit

    def to_fetch(self, blocks: Sequence[int], start: int, limit: int) -> list[int]:
        """The blocks from ``start`` on that only storage has, up to the first that nobody has."""
        fetched: list[int] = []
        for block in blocks[start:limit]:
            if block not in self._host:
                if self.storage is None or block not in self.storage:
                    break
                fetched.append(block)
        return fetched
