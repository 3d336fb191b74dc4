"""Blocks that ranks are computing right now: who shares a prefix with a request on its way."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.prefix.places import Sent

_MOST = 8
"""So many requests with the same beginning that are on their way are looked at, newest ones."""


class Upcoming(NamedTuple):
    """A rank that is going to hold the beginning of a prompt."""

    instance: InstanceId
    rank: int
    tokens: int
    visible_s: float


class UpcomingBlocks:
    """The requests that were sent and cannot be found yet, by their first block."""

    def __init__(self) -> None:
        self.version = 0
        """Counts changes."""
        self._by_root: dict[int, list[Sent]] = {}

    def add(self, sent: Sent) -> None:
        self._by_root.setdefault(sent.blocks[0], []).append(sent)
        self.version += 1

    def remove(self, sent: Sent) -> None:
        self.version += 1
        root = sent.blocks[0]
        others = [one for one in self._by_root.pop(root, ()) if one is not sent]
        if others:
            self._by_root[root] = others

    def begins_like(self, blocks: Sequence[int]) -> bool:
        """Whether anybody has the first of these blocks."""
        return bool(blocks) and blocks[0] in self._by_root

    def sharing(self, blocks: Sequence[int], count: int) -> Iterator[tuple[Sent, int]]:
        """Those that have some of the first ``count`` blocks, and how many."""
        for sent in self._by_root.get(blocks[0], ())[-_MOST:]:
            yield sent, shared_blocks(blocks, sent.blocks, count)


def shared_blocks(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """How many blocks two prompts have in common. A block names all before it, so by halving."""
    shared = range(min(len(one), len(other), most))
    return bisect_left(shared, True, key=lambda at: one[at] != other[at])
