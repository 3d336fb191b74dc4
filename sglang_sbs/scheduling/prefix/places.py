"""The prefix index's records of instances, DP ranks, and dispatched requests, by which later
requests find prefixes that are still being computed."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_sbs.scheduling.events import InstanceId, PrefixSource

_MOST = 8
"""Limit on the requests with the same first block that are searched, newest first."""
_MOST_ROOTS = 1024
"""Limit on the first blocks of which :class:`Changes` knows the last change."""


class Hits(NamedTuple):
    """Cached tokens of one prompt per rank."""

    by_instance: dict[InstanceId, list[int]]
    """Tokens per DP rank; instances without any are omitted."""
    best_tokens: int
    to_fetch: dict[InstanceId, list[int]] = {}  # noqa: RUF012 - never changed
    """Part of these tokens that the rank must first load from shared storage."""


NO_HITS = Hits({}, 0)


@dataclass(slots=True)
class Place:
    """Records of one instance."""

    id: InstanceId
    source: PrefixSource
    page_tokens: int
    block_tokens: int = 0
    """Size of its known blocks: one page, or several without KV events."""
    ranks: list[CachedRank] = field(default_factory=list)
    capacity_tokens: int = 0
    capacity_blocks: int = 1
    is_up: bool = True
    shares_storage: bool = False

    @property
    def shape(self) -> tuple[PrefixSource, int, int]:
        """Source, page size and number of ranks; a change of any of them empties the instance."""
        return self.source, self.page_tokens, len(self.ranks)

    def takes(self, block_tokens: int) -> bool:
        """Return whether blocks of that size can be found here."""
        if self.source == "events":
            return block_tokens == self.page_tokens
        return block_tokens > 0 and block_tokens % self.page_tokens == 0

    def cut_into(self, block_tokens: int) -> None:
        """Set the size of its blocks from now on."""
        self.block_tokens = block_tokens
        self.capacity_blocks = max(1, self.capacity_tokens // block_tokens)


@dataclass(slots=True, eq=False)
class CachedRank:
    """A DP rank, until it loses all its blocks."""

    place: Place
    number: int
    bit: int
    claims: OrderedDict[int, float] = field(default_factory=OrderedDict)
    """Expiry times of unpublished blocks, oldest claim first."""


@dataclass(slots=True)
class SentPrefix:
    """A dispatched request until its prefill is done."""

    place: Place
    rank: int
    blocks: Sequence[int]
    visible_s: float
    visible: bool = False
    claimed_on: CachedRank | None = None
    """The rank on which its blocks were claimed last, without KV events."""
    claimed_s: float = 0.0


class Upcoming(NamedTuple):
    """A rank that is going to hold the beginning of a prompt."""

    instance: InstanceId
    rank: int
    tokens: int
    visible_s: float


class Changes:
    """Counts changes of the cached blocks. A block's name covers all before it, so a change of one
    prompt's blocks concerns only prompts with the same first block."""

    def __init__(self) -> None:
        self.version = 0
        """Change counter."""
        self._of_all = 0
        """Version of the last change that may concern any prompt."""
        self._of_root: OrderedDict[int, int] = OrderedDict()
        """Version of the last change by first block, for the most recent ones."""

    def add(self, count: int, root: int | None = None) -> None:
        """Count changes of blocks in prompts that begin with ``root``; None: in any prompt."""
        if not count:
            return
        self.version += count
        if root is None:
            self._of_all = self.version
            return
        self._of_root[root] = self.version
        self._of_root.move_to_end(root)
        if len(self._of_root) > _MOST_ROOTS:
            self._of_all = max(self._of_all, self._of_root.popitem(last=False)[1])

    def concern(self, blocks: Sequence[int], since: int) -> bool:
        """Return whether a change since that version may concern a prompt."""
        return self._of_all > since or self._of_root.get(blocks[0], 0) > since


class UpcomingBlocks:
    """Dispatched requests that cannot be found yet, by first block."""

    def __init__(self) -> None:
        self.version = 0
        """Change counter."""
        self._by_root: dict[int, list[SentPrefix]] = {}
        self._changed: dict[int, int] = {}
        """Version of the last change by first block."""

    def add(self, sent: SentPrefix) -> None:
        self.version += 1
        self._by_root.setdefault(sent.blocks[0], []).append(sent)
        self._changed[sent.blocks[0]] = self.version

    def remove(self, sent: SentPrefix) -> None:
        self.version += 1
        root = sent.blocks[0]
        others = [other for other in self._by_root.pop(root, ()) if other is not sent]
        if others:
            self._by_root[root] = others
            self._changed[root] = self.version
        else:
            self._changed.pop(root, None)

    def all_changed(self) -> None:
        self.version += 1
        self._changed = dict.fromkeys(self._by_root, self.version)

    def changed(self, blocks: Sequence[int], since: int) -> bool:
        """Return whether requests with the same first block have changed since that version."""
        return self._changed.get(blocks[0], self.version) > since

    def begins_like(self, blocks: Sequence[int]) -> bool:
        return bool(blocks) and blocks[0] in self._by_root

    def sharing(self, blocks: Sequence[int], count: int) -> Iterator[tuple[SentPrefix, int]]:
        """Yield requests that share some of the first ``count`` blocks, and the number shared."""
        for sent in self._by_root.get(blocks[0], ())[-_MOST:]:
            yield sent, shared_blocks(blocks, sent.blocks, count)


def shared_blocks(blocks: Sequence[int], other: Sequence[int], most: int) -> int:
    """Number of leading blocks that two prompts share. A block's name covers all before it, so
    binary search works."""
    shared = range(min(len(blocks), len(other), most))
    return bisect_left(shared, True, key=lambda at: blocks[at] != other[at])
