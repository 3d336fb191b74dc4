"""Records of the prefix index: instances, DP ranks, and dispatched requests. By the latter, later
requests find prefixes that are still being computed."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_sbs.scheduling.events import InstanceId, PrefixSource

_MOST = 8
"""Number of requests with the same first block, the newest ones, that a search compares."""
_MOST_ROOTS = 1024
"""Number of prompts' first blocks whose last change :class:`Changes` remembers. A forgotten one
counts as a change of every prompt."""


class Hits(NamedTuple):
    """Cached tokens of one prompt per DP rank. ``best_tokens``: most on any rank."""

    by_instance: dict[InstanceId, list[int]]
    """Cached tokens per DP rank; instances without any are omitted."""
    best_tokens: int
    to_fetch: dict[InstanceId, list[int]] = {}  # noqa: RUF012 - never changed
    """Part of the tokens in ``by_instance`` that each rank must first load from shared storage;
    instances that cannot are omitted."""


NO_HITS = Hits({}, 0)


@dataclass(slots=True)
class Place:
    """An instance as the prefix index knows it: source of its blocks, their size, and its ranks."""

    id: InstanceId
    source: PrefixSource
    page_tokens: int
    block_tokens: int = 0
    """Size in tokens of the blocks that are indexed for it: one page, or several pages without KV
    events."""
    ranks: list[CachedRank] = field(default_factory=list)
    capacity_tokens: int = 0
    capacity_blocks: int = 1
    is_up: bool = True
    shares_storage: bool = False

    @property
    def shape(self) -> tuple[PrefixSource, int, int]:
        """Source, page size and number of ranks. If any of them changes, the index forgets the
        instance's blocks."""
        return self.source, self.page_tokens, len(self.ranks)

    def takes(self, block_tokens: int) -> bool:
        """Return whether the index can find blocks of this size on the instance: one page, or
        without KV events a multiple."""
        if self.source == "events":
            return block_tokens == self.page_tokens
        return block_tokens > 0 and block_tokens % self.page_tokens == 0

    def cut_into(self, block_tokens: int) -> None:
        """Set the block size in tokens, and the capacity in blocks accordingly."""
        self.block_tokens = block_tokens
        self.capacity_blocks = max(1, self.capacity_tokens // block_tokens)


@dataclass(slots=True, eq=False)
class CachedRank:
    """A DP rank until it loses all its blocks; a new object with another bit replaces it."""

    place: Place
    number: int
    bit: int
    claims: OrderedDict[int, float] = field(default_factory=OrderedDict)
    """Claimed blocks that the rank has not published, oldest claim first, with the time of the
    claim (with KV events) or of its expiry (without)."""


@dataclass(slots=True)
class SentPrefix:
    """The blocks of a dispatched request until its prefill is done. ``visible_s``: time from which
    other requests can find them as cached."""

    place: Place
    rank: int
    blocks: Sequence[int]
    visible_s: float
    visible: bool = False
    claimed_on: CachedRank | None = None
    """Rank on which its blocks were claimed last (at ``claimed_s``), without KV events; None: claim
    them again."""
    claimed_s: float = 0.0


class Upcoming(NamedTuple):
    """A rank that is going to hold the first ``tokens`` of a prompt from ``visible_s`` on."""

    instance: InstanceId
    rank: int
    tokens: int
    visible_s: float


class Changes:
    """Counts changes of the cached blocks, so that results can be kept until they may differ. A
    block's name covers all before it, so a change of one prompt's blocks concerns only prompts with
    the same first block."""

    def __init__(self) -> None:
        self.version = 0
        """Number of changes so far."""
        self._of_all = 0
        """``version`` at the last change that may concern any prompt."""
        self._of_root: OrderedDict[int, int] = OrderedDict()
        """``version`` at the last change by prompts' first block, least recently changed first."""

    def add(self, count: int, root: int | None = None) -> None:
        """Count changes of blocks in prompts with first block ``root``; None: in any prompts."""
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
        """Return whether a change after version ``since`` may concern a prompt."""
        return self._of_all > since or self._of_root.get(blocks[0], 0) > since


class UpcomingBlocks:
    """Dispatched requests whose blocks do not count as cached yet, by first block."""

    def __init__(self) -> None:
        self.version = 0
        """Number of changes so far."""
        self._by_root: dict[int, list[SentPrefix]] = {}
        self._changed: dict[int, int] = {}
        """``version`` at the last change by first block."""

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
        """Return whether requests with the same first block were added or removed after version
        ``since``."""
        return self._changed.get(blocks[0], self.version) > since

    def begins_like(self, blocks: Sequence[int]) -> bool:
        return bool(blocks) and blocks[0] in self._by_root

    def sharing(self, blocks: Sequence[int], count: int) -> Iterator[tuple[SentPrefix, int]]:
        """Yield the newest requests with the same first block as a prompt, each with the number of
        leading blocks shared, at most ``count``."""
        for sent in self._by_root.get(blocks[0], ())[-_MOST:]:
            yield sent, shared_blocks(blocks, sent.blocks, count)


def shared_blocks(blocks: Sequence[int], other: Sequence[int], most: int) -> int:
    """Return how many leading blocks two prompts share, at most ``most``. Binary search works,
    because a block's name covers all blocks before it."""
    shared = range(min(len(blocks), len(other), most))
    return bisect_left(shared, True, key=lambda at: blocks[at] != other[at])
