"""What is in storage that several instances share, so that a hit there is the same for every rank.

SGLang's HiCache writes to such storage what a rank has in host memory
(``--hicache-storage-backend``). Nobody publishes what storage holds (0.5.23 names a medium
``EXTERNAL`` for it and sends none), so it is taken to hold what any rank of these instances ever
published, until this table is full. Storage that drops blocks sooner makes a prediction too large,
as for any cache: the engine's answer says what it found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.prefix.places import Hits, Place
from sglang_sbs.scheduling.prefix.tables import BlockTable

_HELD = 1


class SharedBlocks:
    """One storage."""

    def __init__(self, max_blocks: int) -> None:
        self._table = BlockTable(max_blocks)

    def __len__(self) -> int:
        return len(self._table)

    def add(self, blocks: Sequence[int]) -> bool:
        """Some rank has computed these; whether any is new."""
        return self._table.add(blocks, _HELD)[1] > 0

    def depth(self, blocks: Sequence[int], count: int) -> int:
        """How many of the first ``count`` blocks it holds. What is before a block was written with
        it, so by halving."""
        low, high = 0, count
        while low < high:
            middle = (low + high + 1) // 2
            if self._table.get(blocks[middle - 1]):
                low = middle
            else:
                high = middle - 1
        return low


def with_shared(
    by_instance: dict[InstanceId, list[int]],
    best_tokens: int,
    tokens: int,
    block_tokens: int,
    places: Iterable[Place],
) -> Hits:
    """What ranks hold, with what those that share storage can get of the first ``tokens`` in it."""
    to_fetch: dict[InstanceId, list[int]] = {}
    for place in places:
        if place.shares_storage and place.is_up and place.block_tokens == block_tokens:
            own = by_instance.get(place.id) or [0] * len(place.ranks)
            by_instance[place.id] = [max(mine, tokens) for mine in own]
            to_fetch[place.id] = [max(0, tokens - mine) for mine in own]
            best_tokens = max(best_tokens, tokens)
    return Hits(by_instance, best_tokens, to_fetch)
