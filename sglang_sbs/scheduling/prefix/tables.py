"""Bounded tables of KV blocks and the ranks that hold them, and helpers that process long block
lists in slices."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, islice

SLICE = 2_048
"""Number of blocks processed in one step."""
_PARTS = 64
_SLOTS = 1 << 10
_DROPPED_SHARE = 64
"""When the table is full, a part drops its oldest blocks: one in this many."""


class BlockTable:
    """Maps each block to a bit mask of the ranks that hold it, for at most ``max_blocks`` blocks.
    It consists of many dicts of different sizes, because a dict of a million blocks takes a quarter
    of a second to grow."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        parts = 1 if max_blocks < SLICE * _PARTS else _PARTS
        self._parts: list[dict[int, int]] = [{} for _ in range(parts)]
        # The largest part gets three times as many blocks as the smallest, which is the growth
        # factor of a dict.
        shares = [3 ** (part / parts) for part in range(parts)]
        ends = [round(end * _SLOTS / sum(shares)) for end in accumulate(shares)]
        self._part_of_slot = bytes(bisect_right(ends, slot) for slot in range(_SLOTS))
        self._blocks = 0
        self._full = 0
        """Index of the part that drops blocks next."""
        self.rooms_made = 0
        """How often blocks were dropped to make room."""

    def __len__(self) -> int:
        return self._blocks

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._parts)

    def get(self, block: int) -> int:
        """Return the bit mask of the ranks that hold a block; 0: none."""
        return self._parts[self._part_of_slot[block % _SLOTS]].get(block, 0)

    def add(self, blocks: Sequence[int], bit: int) -> tuple[list[int], int]:
        """Record that the rank ``bit`` holds these blocks. Returns the blocks that are new to the
        table, and the number of blocks that are new for this rank."""
        parts, of_slot = self._parts, self._part_of_slot
        new = []
        changed = 0
        room = self._max_blocks - self._blocks
        for block in blocks:
            part = parts[of_slot[block % _SLOTS]]
            mask = part.get(block)
            if mask is None:
                if room <= 0:
                    self._blocks = self._max_blocks - room
                    while self._blocks >= self._max_blocks:
                        self._make_room()
                    room = self._max_blocks - self._blocks
                part[block] = bit
                room -= 1
                new.append(block)
            elif not mask & bit:
                part[block] = mask | bit
                changed += 1
        self._blocks = self._max_blocks - room
        return new, changed + len(new)

    def take(self, blocks: Sequence[int], bits: int) -> int:
        """Record that the ranks in the mask ``bits`` no longer hold these blocks. Returns the
        number of blocks that any of these ranks held."""
        parts, of_slot = self._parts, self._part_of_slot
        changed = 0
        for block in blocks:
            part = parts[of_slot[block % _SLOTS]]
            mask = part.get(block, 0)
            if mask & bits:
                changed += 1
                if left := mask & ~bits:
                    part[block] = left
                else:
                    del part[block]
                    self._blocks -= 1
        return changed

    def _make_room(self) -> None:
        """Drop the oldest blocks of one part; of those that several ranks hold, only about half.
        Many are dropped at once, because a dict finds its oldest entry in linear time."""
        self.rooms_made += 1
        part = self._parts[self._full]
        self._full = (self._full + 1) % len(self._parts)
        before = len(part)
        spare = True
        for block in list(islice(part, 1 + before // _DROPPED_SHARE)):
            mask = part[block]
            spare = not spare
            if not (spare and mask & (mask - 1)):
                del part[block]
        self._blocks -= before - len(part)


def slices_of(blocks: Sequence[int]) -> list[Sequence[int]]:
    """Split a list into slices of at most ``SLICE`` blocks, in order."""
    if 0 < len(blocks) <= SLICE:
        return [blocks]
    return [blocks[at : at + SLICE] for at in range(0, len(blocks), SLICE)]


def take_lapsed(claims: OrderedDict[int, float], now_s: float, most: int) -> list[int]:
    """Remove the oldest claims that have expired, or that exceed ``most`` claims, and return their
    blocks; at most ``SLICE`` per call. ``claims``: expiry time by block, oldest first."""
    lapsed: list[int] = []
    for block, until_s in islice(claims.items(), SLICE):
        if until_s > now_s and len(claims) - len(lapsed) <= most:
            break
        lapsed.append(block)
    for block in lapsed:
        del claims[block]
    return lapsed


def bits_of(mask: int) -> Iterator[int]:
    """Yield each set bit of a mask as an integer (a power of two), lowest first."""
    while mask:
        bit = mask & -mask
        mask ^= bit
        yield bit


def depths(
    tables: tuple[BlockTable, BlockTable], blocks: Sequence[int], count: int, live: int
) -> list[tuple[int, int]]:
    """Return pairs of a number of leading blocks, at least 1, and the bit mask of the ranks that
    hold exactly that many in either table (device, host). Considers only the first ``count`` blocks
    and the ranks in the mask ``live``."""
    device = tables[0].get
    host = tables[1].get if tables[1] else None
    first = device(blocks[0])
    if host is not None:
        first |= host(blocks[0])
    first &= live
    if not first:
        return []
    found = []
    # Bits of the ranks that hold the block at ``low``, and of those that also hold the one at
    # ``high``.
    parts = [(0, first, count, 0)]
    while parts:
        low, at_low, high, at_high = parts.pop()
        ends = at_low & ~at_high
        if not ends:
            continue
        if high == low + 1:
            found.append((high, ends))
            continue
        middle = (low + high) // 2
        mask = device(blocks[middle])
        if host is not None:
            mask |= host(blocks[middle])
        mask &= at_low
        parts.append((low, at_low, middle, mask))
        parts.append((middle, mask, high, at_high & mask))
    return found
